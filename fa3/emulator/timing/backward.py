"""One CTA of the backward: what its warps do, for a timeline.

It is the CTA with the most to do of a launch of one head: `tile_n` keys, and `blocks` query blocks that see them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fa3.config.backward import BackwardKey
from fa3.emulator.check import describe
from fa3.emulator.timing.cost import Cost
from fa3.emulator.timing.events import Trace
from fa3.emulator.timing.recorder import Recorder
from fa3.emulator.timing.replay import replay
from fa3.emulator.timing.timeline import Timeline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def emulate(key: BackwardKey, blocks: int) -> Trace:
    """The trace of the busiest CTA. Without a mask there is only one; with one, the keys of all query blocks are there,
    and the first of them are seen by all."""
    from fa3.emulator.backend import record_backward  # needs the compiler, which replays alone do not

    c, generator = key.config, torch.Generator().manual_seed(0)
    rows = blocks * c.tile_m
    keys = rows if c.causal else c.tile_n

    def random(length: int, width: int) -> torch.Tensor:
        return torch.randn(1, length, 1, width, generator=generator).to(DTYPES[key.dtype])

    q, do, o = random(rows, c.head_dim), random(rows, c.head_dim_v), random(rows, c.head_dim_v)
    k, v = random(keys, c.head_dim), random(keys, c.head_dim_v)
    lse = torch.full((1, 1, rows), math.log(keys))
    settings: dict[str, Any] = {"causal": c.causal, "deterministic": key.deterministic, "wanted": key.wanted}
    runs = record_backward(do, q, k, v, o, lse, **settings, config=c, sms=math.ceil(keys / c.tile_n))
    run = runs[key.part]
    for name in ("lse_log2", "delta"):  # the numbers do not matter, as long as they are some
        if name in run.launch.tensors:
            run.launch.tensors[name].fill_(1.0)
    recorder = Recorder()
    run.replay(policy="early", observers=[recorder])
    return max(recorder.traces.values(), key=lambda trace: sum(map(len, trace.warps)))


def timeline(key: BackwardKey, blocks: int, cost: Cost | None = None) -> Timeline:
    """The same with times, and with the names of the roles."""
    trace, names = emulate(key, blocks), describe(key)
    roles = {warp: names.role(warp) for warp in range(len(trace.warps))}
    return replace(replay(trace, cost), kernel=key.name, roles=roles)
