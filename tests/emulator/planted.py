"""Faults planted in the text of the kernels: what one edit of a Python line may break, and what must be said about it.

Each is compiled from a copy of the package and checked in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fa3
from fa3.emulator.mutate.mutant import BYTES, EARLY, NAMED, REGISTERS, STUCK, SUMS, UNEVEN, UNORDERED

PACKAGE = Path(fa3.__file__).parent
CAUSAL, FULL = "forward_bf16_d64_causal_*", "forward_bf16_d128_full_*"
ORDERED = "backward_bf16_d64_causal_*_ordered"
SECONDS = 300


@dataclass(frozen=True)
class Planted:
    """`old`, which stands exactly once in the file, becomes `new`; `line` is a part of a line that must be named."""

    file: str
    """Relative to fa3/kernels."""
    old: str
    new: str
    kinds: frozenset[str]
    line: str
    kernel: str = CAUSAL
    """A pattern of the name."""

    def apply(self, text: str) -> str:
        """Lines of `old` may have any indent; lines of `new` are indented as the first one that they replace."""
        found = list(re.finditer(r"\n *".join(map(re.escape, self.old.split("\n"))), text))
        assert len(found) == 1, f"{self.file} holds this {len(found)} times, not once:\n{self.old}"
        start, end = found[0].span()
        line = text[text.rfind("\n", 0, start) + 1 : start]
        indent = line[: len(line) - len(line.lstrip())]
        return text[:start] + self.new.replace("\n", "\n" + indent) + text[end:]


def overlap(old: str, new: str, kinds: frozenset[str], line: str) -> Planted:
    return Planted("forward_overlap.py", old, new, kinds, line)


def forward(old: str, new: str, kinds: frozenset[str], line: str, kernel: str = CAUSAL) -> Planted:
    return Planted("forward.py", old, new, kinds, line, kernel)


def epilogue(old: str, new: str, kinds: frozenset[str], line: str) -> Planted:
    return Planted("parts/epilogue.py", old, new, kinds, line, FULL)


def backward(file: str, old: str, new: str, kinds: frozenset[str], line: str) -> Planted:
    return Planted(file, old, new, kinds, line, ORDERED)


RELEASE_K, RELEASE_V = 'self.rings["k"].release(k)', 'self.rings["v"].release(v)'
WAIT_V, FENCE = 'self.rings["v"].wait(v)', 'cute.arch.fence_proxy("async.shared", space="cta")'
SCORES, OUTPUT = "start_scores(q, k)", "start_output(v)"
PROXY = frozenset(("no proxy fence",))
DEPENDENCY = frozenset(("grid dependency",))
TURNSTILE, DQ, MAIN = "parts/turnstile.py", "parts/dq.py", "backward.py"
PUT = "to_global(target, source, count)"

PLANTED = {
    # ---- waits
    "no wait for q": overlap('self.rings["q"].wait(q)', "pass", UNORDERED, SCORES),
    "no wait for k in the main loop": overlap(
        'self.rings["k"].wait(k)\nself.turns.wait()', "self.turns.wait()", UNORDERED | EARLY, SCORES
    ),
    "no wait for v in the drain": overlap(
        f"{WAIT_V}\nself.gemms.{OUTPUT}\nwait_gemms(0)",
        f"self.gemms.{OUTPUT}\nwait_gemms(0)",
        UNORDERED | EARLY,
        OUTPUT,
    ),
    "waits for too few GEMMs": overlap("wait_gemms(1)", "wait_gemms(2)", REGISTERS | UNORDERED, SCORES),
    "p taken under the GEMM that reads it": overlap(
        f"wait_gemms(0)\n{RELEASE_V}\nself.gemms.take_p()",
        f"self.gemms.take_p()\nwait_gemms(0)\n{RELEASE_V}",
        REGISTERS,
        OUTPUT,
    ),
    "passes over k without a wait": forward(
        "ring.wait(cursor)\nring.release(cursor)\nreturn",
        "ring.release(cursor)\nreturn",
        EARLY | UNEVEN,
        'self.rings["k"].wait(k)',  # the next one, which may find the phase before still running
    ),
    # ---- releases and commits
    "k released twice": overlap(
        f"wait_gemms(1)\n{RELEASE_K}", f"wait_gemms(1)\n{RELEASE_K}\n{RELEASE_K}", EARLY | UNORDERED, RELEASE_K
    ),
    "k released before its GEMM is done": overlap(
        f"wait_gemms(1)\n{RELEASE_K}", f"{RELEASE_K}\nwait_gemms(1)", UNORDERED, SCORES
    ),
    "k not released": overlap(f"wait_gemms(1)\n{RELEASE_K}", "wait_gemms(1)", STUCK, "ring.acquire(cursor)"),
    "the tile's number is never published": forward("ring.commit(cursor)  #", "#", STUCK, "ring.wait(cursor)"),
    "numbers released by the first lane": forward("cute.arch.sync_warp()", "pass", UNORDERED | EARLY, "sTile"),
    # ---- turns
    "no turn is given": overlap("self.turns.give()", "pass", STUCK | NAMED, "turns.wait()"),
    "no turn is taken": overlap("self.turns.wait()", "pass", NAMED, "turns.give()"),
    # ---- stages
    "stages of k swapped": forward(
        "self.tSrK[None, None, None, k.stage]", "self.tSrK[None, None, None, 1 - k.stage]", UNORDERED, "start_scores("
    ),
    "bytes reported to another stage": forward(
        "tma_bar_ptr=ring.barrier(cursor))",
        "tma_bar_ptr=ring.barrier(cursor.advance()))",
        STUCK | UNORDERED | EARLY | BYTES,
        "tma_bar_ptr",
    ),
    "v in the stages of k": forward(
        "partition(ops.v, self.sV, gV)", "partition(ops.v, self.sK, gV)", UNORDERED, "cute.copy("
    ),
    "no last v": forward('v = self._load("v", values, v, 0)', "pass", STUCK, WAIT_V),
    # ---- stores
    "the CTA ends under its stores": forward(
        "self.epilogue.drain()", "pass", frozenset(("copy never waited for",)), "cute.copy(self.target.atom", FULL
    ),
    "no proxy fence": epilogue(FENCE, "pass", PROXY, "cute.copy("),
    "stores before the rows are there": epilogue(
        f"{FENCE}\nself.barrier.join()", FENCE, UNORDERED | PROXY, "cute.copy("
    ),
    # ---- values
    "a mask that hides one key too few": Planted(
        "parts/mask.py",
        "limit = self._limit(first_row + row_of_thread()) -",
        "limit = self._limit(first_row + row_of_thread() + 1) -",
        frozenset(("wrong mask",)),
        OUTPUT,
    ),
    "k of the block after": forward(
        '"k", keys, k, blocks - 2 - j)', '"k", keys, k, blocks - 1 - j)', frozenset(("wrong block",)), "cute.copy("
    ),
    # ---- the backward: turns to add to dQ
    "dq out of turn": backward(
        TURNSTILE, "wait_for_count(_place(self.counters, m_block, head), rank)", "pass", SUMS, PUT
    ),
    "dq one turn too early": backward(
        TURNSTILE,
        "wait_for_count(_place(self.counters, m_block, head), rank)",
        "wait_for_count(_place(self.counters, m_block, head), rank - 1)",
        SUMS,
        PUT,
    ),
    "counted before dq is complete": backward(
        TURNSTILE, "cute.arch.cp_async_bulk_wait_group(younger)", "pass", SUMS, PUT
    ),
    "counted without release": backward(TURNSTILE, "red.release.gpu", "red.relaxed.gpu", SUMS, PUT),
    # ---- the backward: dQ on its way to the writer
    "dq without a proxy fence": backward(DQ, FENCE, "pass", PROXY, PUT),
    "dq handed over by the first lane": backward(DQ, "cute.arch.sync_warp()", "pass", UNORDERED | PROXY, PUT),
    "dq over what the writer still reads": backward(
        MAIN,
        "cute.arch.cp_async_bulk_wait_group((younger + 1) * parts - 1 - p, read=True)",
        "pass",
        UNORDERED,
        PUT,
    ),
    # ---- the backward: what an earlier kernel writes
    "counters before backward_prepare has set them": backward(
        MAIN, "cute.arch.griddepcontrol_wait()  #", "#", DEPENDENCY, "turnstile.wait("
    ),
    "lse before backward_prepare has written it": backward(
        MAIN, "cute.arch.griddepcontrol_wait()\nq = self", "q = self", DEPENDENCY, "load_row("
    ),
    # ---- the backward: dS, and the stages of Q
    "ds without a proxy fence": backward(MAIN, FENCE, "pass", PROXY, ".start(ds)"),
    "ds before all warpgroups have brought it": backward(
        MAIN, f"{FENCE}\nself.everyone.join()", FENCE, UNORDERED | PROXY | NAMED, ".start(ds)"
    ),
    "q released before its GEMM is done": backward(
        MAIN,
        'wait_gemms(0)\nself.rings["q"].release(q)',
        'self.rings["q"].release(q)\nwait_gemms(0)',
        UNORDERED,
        "start_dk(q)",
    ),
    "dk over the K that others read": backward(
        MAIN, "everyone.join()\ndk_store.store", "dk_store.store", UNORDERED, ".start(ds)"
    ),
}


def plant(fault: Planted, folder: Path) -> None:
    """Copies the package to `folder`, with the fault in it."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "kernels" / fault.file
    file.write_text(fault.apply(file.read_text()))


def findings(name: str, folder: Path) -> list[dict[str, Any]]:
    """What the checkers of the package in `folder` say about its kernel of this name."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "FA3_DISK_CACHE": "0"}
    command = [sys.executable, "-m", "fa3.emulator.mutate.examine", name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
