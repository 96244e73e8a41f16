"""The judge of the GPU tests, on the CPU: it accepts what a kernel does and rejects what a broken kernel does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fa3.reference import attention
from tests.gpu import reproduce
from tests.gpu.cases import LAYOUTS, Case
from tests.gpu.checking import check, verdict
from tests.gpu.guard import GARBAGE, GuardedOutputs
from tests.gpu.oracle import expect
from tests.gpu.strategies import cases, edges

TILE = 48
ORDINARY = Case(70, 150, 32, 40, batch=2, heads_kv=2, group=2, causal=True, layouts=("packed", "cut", "narrow"), seed=1)


def emulated(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, lazy: bool = False, drop: int = 0
) -> tuple[Tensor, Tensor]:
    """What a kernel does: float32 sums, a running maximum, P rounded tile by tile. `drop` forgets the last keys."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[2] // k.shape[2]
    qh = q.float().transpose(1, 2)
    kh, vh = (x.repeat_interleave(group, 2).float().transpose(1, 2) for x in (k, v))
    acc = torch.zeros(*qh.shape[:3], v.shape[-1])
    top = torch.full((*qh.shape[:3], 1), -math.inf)
    total = torch.zeros_like(top)
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    for first in range(0, k.shape[1] - drop, TILE):
        tile = slice(first, min(first + TILE, k.shape[1] - drop))
        s = qh @ kh[:, :, tile].transpose(2, 3) * scale
        if causal:
            s = s.masked_fill(torch.arange(tile.start, tile.stop)[None] > rows, -math.inf)
        higher = torch.maximum(top, s.amax(-1, keepdim=True))
        higher = torch.where((higher - top < 8 * math.log(2)) & lazy, top, higher)
        base = higher.masked_fill(torch.isneginf(higher), 0.0)
        p, alpha = torch.exp(s - base), torch.exp(top - base)
        acc = acc * alpha + p.to(q.dtype).float() @ vh[:, :, tile]
        total, top = total * alpha + p.sum(-1, keepdim=True), higher
    alive = total > 0
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    out.copy_((acc / torch.where(alive, total, 1.0)).transpose(1, 2))
    lse = torch.empty(top.shape[:3])
    lse.copy_((torch.where(alive, top, -math.inf) + torch.where(alive, total, 1.0).log())[..., 0])
    return out, lse


@settings(max_examples=40)
@given(case=cases(longest=260))
def test_what_a_kernel_does_is_right(case):
    check(case, "cpu", lambda *call: emulated(*call, lazy=case.seed % 2 == 0))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", [1, 2, 150, 1000])
def test_the_oracle_agrees_with_the_specification(dtype, causal, seqlen_k):
    q, k, v = Case(70, seqlen_k, 32, 40, heads_kv=2, group=3, dtype=dtype).inputs("cpu")
    expected = expect(q, k, v, -0.4, causal)
    out, lse = attention(q, k, v, -0.4, causal)
    torch.testing.assert_close(expected.out, out)
    torch.testing.assert_close(expected.lse, lse)


def _unwritten(out: Tensor, lse: Tensor) -> None:
    out[-1, -1, -1, -1] = math.nan


def _overrun(out: Tensor, lse: Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)


def _underrun(out: Tensor, lse: Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(math.nan)


def _one_row(out: Tensor, lse: Tensor) -> None:
    out[0, 33, 1] *= 1.03


def _one_element(out: Tensor, lse: Tensor) -> None:
    out[0, 33, 1, 2] += 0.03


def _swapped_heads(out: Tensor, lse: Tensor) -> None:
    out.copy_(out.flip(2))


def _base_two(out: Tensor, lse: Tensor) -> None:
    lse /= math.log(2)


def _lse_of_one_row(out: Tensor, lse: Tensor) -> None:
    lse[1, 1, 60] += 1e-3


def _dead_row(out: Tensor, lse: Tensor) -> None:
    lse[0, 0, 5] = -math.inf


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_unwritten, "not finite"),
        (_overrun, "after an output"),
        (_underrun, "before an output"),
        (_one_row, "O:"),
        (_one_element, "O:"),
        (_swapped_heads, "O:"),
        (_base_two, "LSE"),
        (_lse_of_one_row, "LSE"),
        (_dead_row, "LSE"),
    ],
)
def test_a_broken_result_is_named(spoil, word):
    def broken(*call):
        out, lse = emulated(*call)
        spoil(out, lse)
        return out, lse

    assert verdict(ORDINARY, "cpu", emulated) is None
    complaint = verdict(ORDINARY, "cpu", broken)
    assert complaint is not None
    assert word in complaint


@pytest.mark.parametrize("seqlen_k", [150, 500, 1000])
def test_one_forgotten_key_among_many_is_seen(seqlen_k):
    case = Case(128, seqlen_k, 64, 64, heads_kv=4, seed=3)
    assert verdict(case, "cpu", emulated) is None
    complaint = verdict(case, "cpu", lambda *call: (emulated(*call, drop=1)[0], emulated(*call)[1]))
    assert complaint is not None
    assert complaint.startswith("O:")


def test_a_third_rounding_is_too_much():
    """O rounded in the middle of its sum: within any loose tolerance, above 1.3 times the unavoidable."""

    def sloppy(*call):
        out, lse = emulated(*call)
        return out * (1 + 2.0**-7 * torch.randn(out.shape)), lse

    complaint = verdict(Case(256, 256, 64, 64, heads_kv=4), "cpu", lambda *call: sloppy(*call))
    assert complaint is not None


def test_changed_inputs_are_noticed():
    def changing(q, k, v, scale, causal):
        result = emulated(q, k, v, scale, causal)
        k[0, 0, 0, 0] += 1
        return result

    assert verdict(ORDINARY, "cpu", changing) == "an input was changed"


def test_outputs_from_elsewhere_are_noticed():
    complaint = verdict(ORDINARY, "cpu", lambda *call: tuple(x.clone() for x in emulated(*call)))
    assert complaint is not None
    assert "torch.empty" in complaint


def test_guarded_outputs_keep_their_form_and_put_torch_back():
    original = torch.empty
    with GuardedOutputs("cpu") as guard:
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        made = [x, torch.empty_like(x.t()), torch.empty_strided((2, 3), (8, 1)), x.new_empty(5), torch.empty(0, 3)]
        counters, integers = torch.empty(2, dtype=torch.int32), torch.empty(2, dtype=torch.int64)
    assert torch.empty is original
    assert [y.stride() for y in made[:3]] == [(4, 1), (1, 4), (8, 1)]
    assert all(torch.isnan(y.float()).all() for y in made)
    assert (counters == GARBAGE).all()
    assert guard.complaint(*made, counters) is None
    assert guard.complaint(integers) is not None


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_layout_changes_where_and_never_what(name):
    x = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    y = LAYOUTS[name](x)
    assert torch.equal(x, y)
    assert y.stride(-1) == 1
    assert all(stride % 8 == 0 for n, stride in zip(y.shape, y.stride(), strict=True) if n > 1 and stride != 1)


def test_a_case_comes_back_from_its_reproducer():
    text = ORDINARY.reproducer.split("reproduce ")[1].strip("'")
    assert Case.from_json(text) == ORDINARY


def test_the_reproducer_prints_the_verdict_and_sets_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "verdict", lambda case, device: verdict(case, "cpu", emulated))
    text = ORDINARY.reproducer.split("reproduce ")[1].strip("'")
    assert reproduce.main([text]) == 0
    assert capsys.readouterr().out.startswith("right: ")
    monkeypatch.setattr(reproduce, "verdict", lambda case, device: "O: wrong")
    assert reproduce.main(["--small"]) == 1
    assert reproduce.main([]) == 2


def test_the_edges_hold_the_neighbours_of_every_tile():
    assert {0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193} <= set(edges())
