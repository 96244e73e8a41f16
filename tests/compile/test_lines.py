"""Line information: an instruction that synchronises names the line of the kernel that asks for it.

Rule 17 of docs/dsl_rules.md. What is checked here is what a report about a fault can say: `self.rings["k"].wait(k)` in
the main loop, not a line of `Ring` that all rings and roles share.
"""

import re
from linecache import getline
from pathlib import Path

import pytest

from fa3 import kernels
from fa3.compile import artefacts
from fa3.sass.ptx_code import parse_body
from fa3.sass.record import table_keys

pytestmark = pytest.mark.compile

(KEY,) = (
    key
    for key in table_keys()
    if (key.dtype, key.config.head_dim, key.config.head_dim_v, key.config.causal) == ("bf16", 64, 64, True)
)
KERNELS = Path(kernels.__file__).parent

CALLS = {
    "mbarrier.init": ("init_barriers(",),
    "fence.mbarrier_init": ("init_barriers(",),
    "mbarrier.try_wait": (".acquire(", ".wait(", "let_pass("),
    "mbarrier.arrive.expect_tx": (".acquire(",),
    "mbarrier.arrive.shared": (".commit(", ".release(", "let_pass("),
    "bar.sync": ("turns.wait()", "barrier.join()", "sync_threads()"),
    "bar.arrive": ("turns.open()", "turns.give()"),
    "bar.warp.sync": ("sync_warp()",),
    "wgmma.fence": (".start_scores(", ".start_output("),
    "wgmma.mma_async": (".start_scores(", ".start_output("),
    "wgmma.commit_group": (".start_scores(", ".start_output("),
    "wgmma.wait_group": ("wait_gemms(",),
    "cp.async.bulk.tensor": ("cute.copy(",),
    "cp.async.bulk.commit_group": ("cp_async_bulk_commit_group(",),
    "cp.async.bulk.wait_group": ("cp_async_bulk_wait_group(",),
    "fence.proxy": ("fence_proxy(",),
}
"""The instructions that synchronise, and what the line that asks for each of them holds."""

EXAMPLES = (
    ("mbarrier.try_wait", "forward_overlap.py", 'self.rings["q"].wait(q)', 1),
    ("mbarrier.try_wait", "forward_overlap.py", 'self.rings["k"].wait(k)', 2),  # prologue and main loop
    ("mbarrier.try_wait", "forward_overlap.py", 'self.rings["v"].wait(v)', 2),  # main loop and drain
    ("mbarrier.try_wait", "forward.py", 'k = let_pass(self.rings["k"], k)', 1),
    ("mbarrier.arrive.shared", "forward_overlap.py", 'self.rings["k"].release(k)', 2),
    ("mbarrier.arrive.shared", "forward.py", "ring.commit(cursor)", 1),
    ("bar.sync", "forward_overlap.py", "self.turns.wait()", 1),
    ("bar.sync", "parts/epilogue.py", "self.barrier.join()", 2),
    ("bar.arrive", "forward.py", "self.main_loop.turns.open()", 1),
    ("wgmma.mma_async", "forward_overlap.py", "self.gemms.start_scores(q, k)", 2),
    ("wgmma.wait_group", "forward_overlap.py", "wait_gemms(1)", 1),
)
"""Opcode, file, text, and how many lines of the file hold it."""


@pytest.fixture(scope="module", name="statements")
def _statements():
    return parse_body(without_counted_lines(artefacts(KEY).ptx)).statements


def without_counted_lines(ptx: str) -> str:
    """Inside inline assembly the compiler counts on from the line of the call: those lines are nobody's."""
    return re.sub(
        r"// begin inline asm\n.*?// end inline asm",
        lambda assembly: re.sub(r"^[ \t]*\.loc[^\n]*$", "", assembly[0], flags=re.MULTILINE),
        ptx,
        flags=re.DOTALL,
    )


def of(statements, opcode):
    return [statement for statement in statements if statement.opcode.startswith(opcode)]


def text(source):
    return getline(source.file, source.line).strip()


def test_nothing_that_synchronises_is_left_out(statements):
    names = {"mbarrier", "bar", "barrier", "wgmma", "cp", "fence"}
    found = {statement.opcode for statement in statements if statement.name in names}
    assert {opcode for opcode in found if not opcode.startswith(tuple(CALLS))} == set()


@pytest.mark.parametrize("opcode", CALLS)
def test_every_line_is_of_a_kernel_and_asks_for_the_instruction(statements, opcode):
    found = of(statements, opcode)
    assert found
    for statement in found:
        assert Path(statement.source.file).is_relative_to(KERNELS), f"{statement}: {statement.source}"
        assert any(call in text(statement.source) for call in CALLS[opcode]), f"{statement}: {text(statement.source)}"


@pytest.mark.parametrize(("opcode", "file", "line", "times"), EXAMPLES)
def test_every_call_has_instructions_of_its_own(statements, opcode, file, line, times):
    places = {number for number, each in enumerate((KERNELS / file).read_text().splitlines(), 1) if line in each}
    named = {s.source.line for s in of(statements, opcode) if s.source.file == str(KERNELS / file)}
    assert len(places) == times
    assert places <= named
