"""The choices of the policies: what they may pick, and what a kernel sees of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator.observe import Observer
from fa3.emulator.policy import POLICIES, make_policy

from .assembler import SHARED, aligned, run

NAMES = [*POLICIES, "starve:0-3", "starve:4-7"]


@pytest.mark.parametrize(
    "name", ["", "Early", "starve", "starve:", "starve:1", "starve:a-b", "starve:1-2-3", "random:1"]
)
def test_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="early, late, random and starve"):
        make_policy(name, 0)


@given(st.sampled_from(NAMES), st.integers(0, 99), st.lists(st.integers(0, 11), min_size=1, max_size=12))
@settings(max_examples=50)
def test_every_pick_is_one_that_there_is(name: str, seed: int, indices: list[int]) -> None:
    policy = make_policy(name, seed)
    warps: Any = [SimpleNamespace(index=index) for index in indices]
    for _ in range(5):
        assert 0 <= policy.pick_warp(warps) < len(warps)
        assert 0 <= policy.pick_operation(len(warps)) < len(warps)
        assert policy.blocks() >= 1


@given(st.integers(0, 99), st.lists(st.integers(0, 11), min_size=1, max_size=12))
@settings(max_examples=50)
def test_starved_warps_are_picked_only_if_there_is_no_other(seed: int, indices: list[int]) -> None:
    policy = make_policy("starve:4-7", seed)
    warps: Any = [SimpleNamespace(index=index) for index in indices]
    picked = {indices[policy.pick_warp(warps)] for _ in range(20)}
    others = {index for index in indices if not 4 <= index <= 7}
    assert picked <= (others or set(indices))


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_make_equal_choices(name: str) -> None:
    def choices(seed: int) -> list[Any]:
        policy = make_policy(name, seed)
        warps: Any = [SimpleNamespace(index=index) for index in range(8)]
        return [
            (
                policy.operation_first(),
                policy.mma_at_once(),
                policy.pick_operation(9),
                policy.pick_warp(warps),
                policy.blocks(),
            )
            for _ in range(20)
        ]

    assert choices(5) == choices(5)
    assert (choices(5) != choices(6)) == (name not in ("early", "late"))


class Order(Observer):
    """Who steps, and which operations take effect, in order."""

    def __init__(self) -> None:
        self.warps: list[int] = []
        self.operations: list[int] = []

    def stepping(self, warp: Any, step: Any, mask: Any) -> None:
        self.warps.append(warp.index)

    def executed(self, operation: Any) -> None:
        self.operations.append(operation.nbytes)


LOOP = "mov.u32 %r0, 0;\n$LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 40; @%p0 bra $LOOP;"


@pytest.mark.parametrize("policy", ["early", "late"])
def test_warps_take_turns_and_go_on_until_they_wait(policy: str) -> None:
    order = Order()
    run(f"{LOOP} bar.sync 0;", threads=96, policy=policy, observers=[order])
    firsts = [warp for i, warp in enumerate(order.warps) if i == 0 or order.warps[i - 1] != warp]
    assert firsts == [0, 1, 2]  # the last to come to the barrier does not wait; the others' steps are not told again


def test_random_runs_warps_in_every_order_and_in_pieces() -> None:
    starts, pieces = set(), []
    for seed in range(30):
        order = Order()
        run(LOOP, threads=96, policy="random", seed=seed, observers=[order])
        starts.add(tuple(dict.fromkeys(order.warps)))
        pieces.append(sum(a != b for a, b in zip(order.warps, order.warps[1:], strict=False)))
    assert len(starts) == 6
    assert max(pieces) > 4 and min(pieces) == 2


def test_random_completes_copies_in_any_order_and_the_others_in_theirs() -> None:
    data = aligned(np.zeros(64, np.uint8))
    copies = "".join(
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [2048], [%rd0], {16 * n}, [{SHARED}];"
        for n in (1, 2, 3)
    )
    body = f"""
      ld.param.u64 %rd0, [k_param_0]; elect.sync _|%p0, -1; @!%p0 bra $END;
      mbarrier.init.shared.b64 [{SHARED}], 1; mbarrier.arrive.expect_tx.shared.b64 _, [{SHARED}], 96; {copies}
    $END: bar.sync 0;
    $WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [{SHARED}], 0; @!%p1 bra $WAIT;"""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for policy in POLICIES:
        for seed in range(40 if policy == "random" else 2):
            order = Order()
            run(body, data, policy=policy, seed=seed, observers=[order])
            seen.setdefault(policy, set()).add(tuple(order.operations))
    assert seen["early"] == seen["late"] == {(16, 32, 48)}
    assert len(seen["random"]) == 6
