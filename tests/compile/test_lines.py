"""Line information: an instruction that synchronises names the line of the kernel that asks for it.

Rule 17 of docs/dsl_rules.md. What is checked here is what a report about a fault can say: `self.rings["k"].wait(k)` in
the main loop, not a line of `Ring` that all rings and roles share.
"""

import re
from dataclasses import replace
from functools import cache
from linecache import getline
from pathlib import Path

import pytest

from fa3 import kernels
from fa3.compile import artefacts
from fa3.config.backward import BackwardKey
from fa3.config.backward_table import backward_config
from fa3.sass.ptx_code import parse_body
from fa3.sass.record import table_keys

pytestmark = pytest.mark.compile

(FORWARD,) = (
    key
    for key in table_keys()
    if (key.dtype, key.config.head_dim, key.config.head_dim_v, key.config.causal) == ("bf16", 64, 64, True)
)
SMALL, WIDE = backward_config(64, 64, True), backward_config(256, 256, True)
STAGED = BackwardKey("backward", SMALL, "bf16", deterministic=True)
STORED = BackwardKey("backward", replace(SMALL, dq_start="stored"), "bf16")
ADDED = replace(WIDE, dq_store="direct", dq_start="cleared", dq_pieces=1, stages_dq=1)
DIRECT = BackwardKey("backward", ADDED, "bf16", deterministic=True)
KERNELS = Path(kernels.__file__).parent

COMMON = {
    "mbarrier.init": ("init_barriers(",),
    "fence.mbarrier_init": ("init_barriers(",),
    "mbarrier.try_wait": (".acquire(", ".wait(", "let_pass("),
    "mbarrier.arrive.expect_tx": (".acquire(",),
    "mbarrier.arrive.shared": (".commit(", ".release(", "let_pass("),
    "bar.warp.sync": ("sync_warp()", "turnstile.wait("),
    "wgmma.wait_group": ("wait_gemms(",),
    "cp.async.bulk.tensor": ("cute.copy(",),
    "cp.async.bulk.commit_group": ("cp_async_bulk_commit_group(",),
    "cp.async.bulk.wait_group": ("cp_async_bulk_wait_group(", "turnstile."),
    "fence.proxy": ("fence_proxy(", "turnstile."),
}
WGMMA = ("wgmma.fence", "wgmma.mma_async", "wgmma.commit_group")
OF_FORWARD = {
    **COMMON,
    "bar.sync": ("turns.wait()", "barrier.join()", "sync_threads()"),
    "bar.arrive": ("turns.open()", "turns.give()"),
    **dict.fromkeys(WGMMA, (".start_scores(", ".start_output(")),
}
OF_BACKWARD = {
    **COMMON,
    "bar.sync": (".join()", "sync_threads()", "turnstile."),
    **dict.fromkeys(WGMMA, (".start", "start_nothing(")),
    "griddepcontrol.wait": ("griddepcontrol_wait()",),
    "griddepcontrol.launch_dependents": ("griddepcontrol_launch_dependents()",),
    "cp.async.bulk.shared": ("load_row(",),
    "ld.acquire": ("turnstile.wait(",),
    "red.release": ("turnstile.",),
    "mbarrier.try_wait": (*COMMON["mbarrier.try_wait"], "_load_keys(", "_load_tile("),
    "mbarrier.arrive.expect_tx": ("_load_keys(", "_load_tile("),
    "cp.async.bulk.tensor": ("cute.copy(", "_load_keys(", "_load_tile("),
}
OF_STAGED = {
    **OF_BACKWARD,
    "cp.reduce.async.bulk": ("add_to_global(",),
    "cp.async.bulk.global": ("store_to_global(",),
}
OF_STORED = {
    **OF_STAGED,
    "cp.async.bulk.global": ("store_to_global(",),
    "atom.acquire": ("turnstile.wait(",),
    "bar.warp.sync": ("sync_warp()",),
}
OF_DIRECT = {**OF_BACKWARD, "fence.acq_rel": ("turnstile.give(",), "red.relaxed": ("add_vector(",)}
del OF_DIRECT["bar.warp.sync"]
CALLS = {FORWARD: OF_FORWARD, STAGED: OF_STAGED, STORED: OF_STORED, DIRECT: OF_DIRECT}
"""Kernel -> the instructions that synchronise, and what the line that asks for each of them holds."""

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


@cache
def statements_of(key):
    return parse_body(without_counted_lines(artefacts(key).ptx)).statements


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


@pytest.mark.parametrize("key", CALLS, ids=lambda key: key.name)
def test_nothing_that_synchronises_is_left_out(key):
    names = {"mbarrier", "bar", "barrier", "wgmma", "cp", "fence", "griddepcontrol", "red"}
    found = {statement.opcode for statement in statements_of(key) if statement.name in names}
    assert {opcode for opcode in found if not opcode.startswith(tuple(CALLS[key]))} == set()


@pytest.mark.parametrize(("key", "opcode"), [(key, opcode) for key, calls in CALLS.items() for opcode in calls])
def test_every_line_is_of_a_kernel_and_asks_for_the_instruction(key, opcode):
    found = of(statements_of(key), opcode)
    assert found
    for statement in found:
        assert Path(statement.source.file).is_relative_to(KERNELS), f"{statement}: {statement.source}"
        called = any(call in text(statement.source) for call in CALLS[key][opcode])
        assert called, f"{statement}: {text(statement.source)}"


@pytest.mark.parametrize(("opcode", "file", "line", "times"), EXAMPLES)
def test_every_call_has_instructions_of_its_own(opcode, file, line, times):
    places = {number for number, each in enumerate((KERNELS / file).read_text().splitlines(), 1) if line in each}
    found = of(statements_of(FORWARD), opcode)
    named = {s.source.line for s in found if s.source.file == str(KERNELS / file)}
    assert len(places) == times
    assert places <= named
