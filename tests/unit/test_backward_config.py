"""Rows of the backward, their budgets, and what is refused."""

from dataclasses import replace
from typing import get_args

import pytest

from fa3.config.backward import PARTS, BackwardKey, Wanted, backward_keys
from fa3.config.backward_budget import backward_smem, backward_topology, check_backward
from fa3.config.backward_table import BACKWARD, backward_config
from fa3.layouts.smem import SharedMemoryError

ROW = next(row for row in BACKWARD if row.head_dim == 128 and row.causal)
WIDE = next(row for row in BACKWARD if row.head_dim == 256)


@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_every_row_fits_and_is_found(row):
    assert check_backward(row) is row
    assert backward_config(row.head_dim, row.head_dim_v, row.causal) is row


@pytest.mark.parametrize("dim", range(8, 257, 8))
@pytest.mark.parametrize("causal", [False, True])
def test_every_width_has_a_row(dim, causal):
    row = backward_config(dim, dim, causal)
    assert row.head_dim >= dim and row.head_dim_v >= dim and row.causal == causal


@pytest.mark.parametrize("dim", [0, 4, 12, 264])
def test_other_widths_are_refused(dim):
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 256"):
        backward_config(dim, 64, False)


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        (ROW, {"dq_gemm": "sideways"}, "dq_gemm is 'sideways'"),
        (ROW, {"stages_q": 0}, "stages_q is 0"),
        (ROW, {"tile_m": 72}, "tile_m is 72"),
        (ROW, {"tile_n": 64}, "tile_n is 64; for 2 warpgroups it must be 128"),
        (ROW, {"dq_gemm": "rows"}, "tile_m is 64, it must be 128"),
        (ROW, {"head_dim": 100}, "head_dim is 100"),
        (WIDE, {"tile_m": 128}, "tile_m 64"),
        (WIDE, {"tile_n": 88}, "tile_n is 88"),
        (ROW, {"dq_pieces": 3}, "dq_pieces is 3; a slice of 4096"),
    ],
)
def test_what_makes_no_sense_is_refused(row, change, words):
    with pytest.raises(ValueError, match=words):
        check_backward(replace(row, **change))


def test_too_much_shared_memory_shows_the_sum():
    with pytest.raises(SharedMemoryError, match="over what one CTA can have"):
        check_backward(replace(ROW, stages_q=8))


def test_the_writer_waits_for_one_warpgroup_a_stage():
    """dQ's stages belong to the warpgroups that fill them: four warps arrive, the writer's one frees."""
    plan = backward_topology(ROW)["dq"]
    assert (plan.full_arrivals, plan.empty_arrivals, plan.edge.stages) == (4, 1, 2)
    assert plan.edge.fillers(1) == ("math1",)
    lone = next(row for row in BACKWARD if row.dq_gemm == "lone")
    assert backward_topology(lone)["dq"].edge.producers == ("math0",)


def test_names_tell_kernels_apart():
    keys = [
        BackwardKey(part, row, dtype, dlse, ordered, wanted)
        for part in PARTS for row in BACKWARD for dtype in ("bf16", "fp16")
        for dlse in (False, True) for ordered in (False, True) for wanted in get_args(Wanted)
    ]  # fmt: skip
    assert len({key.name for key in keys}) == len(keys)
    assert backward_smem(ROW)["k"].bytes == 128 * 128 * 2


@pytest.mark.parametrize("wanted", get_args(Wanted))
def test_a_key_holds_what_its_kernel_looks_at(wanted):
    """`prepare` clears dQ or does not; the order of sums and `finish` are dQ's alone."""
    keys = backward_keys(ROW, "bf16", wanted, dlse=True, deterministic=True)
    assert [key.part for key in keys] == list(PARTS[: 2 + ("q" in wanted)])
    assert keys[0].dlse and keys[0].wanted == ("qkv" if "q" in wanted else "kv")
    assert keys[1].wanted == wanted and keys[1].deterministic == ("q" in wanted) and not keys[1].dlse
    assert keys[2:] == (backward_keys(ROW, "bf16")[2:] if "q" in wanted else ())


@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_fewer_gradients_need_less(row):
    """Without dQ there are no edge and no room for it, nor for what two CTAs exchange for it. Where P and dS go through
    shared memory, P serves dV, and dS the other two."""

    def buffers(wanted):
        return {field.name for field in backward_smem(row, wanted).fields}

    assert buffers("kv").isdisjoint({"dq", "k_peer", "ds_peer"})
    assert {plan.edge.name for plan in backward_topology(row, "kv").plans} == {"k", "v", "q", "do"}
    assert buffers("qk") - {"p"} == buffers("qkv") - {"p"}
    if row.design == "registers":
        assert "ds" in buffers("q") and "ds" not in buffers("kv")
    else:
        assert ("p" in buffers("qk"), "ds" in buffers("qk")) == (False, True)
        assert ("p" in buffers("v"), "ds" in buffers("v")) == (True, False)
