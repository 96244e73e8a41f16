"""How tensors lie in memory changes nothing: the same numbers give the same bits, or the call is refused in words."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import LAYOUTS, Case
from tests.gpu.checking import call, check_tensors


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_a_layout_gives_the_bits_of_contiguous_tensors(device, layout, head_dim):
    case = Case(203, 310, head_dim, head_dim, batch=2, heads_kv=2, group=2, causal=True)
    inputs = case.inputs(device)
    expected = call(*inputs, None, True)
    got = call(*(LAYOUTS[layout](x) for x in inputs), None, True)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_no_copy_is_made_of_a_strided_input(device):
    """The transposed view of a large tensor is read in place: the peak holds the outputs and nothing of its size."""
    q, k, v = Case(2048, 2048, 128, 128, batch=4, heads_kv=16, layouts=("heads_first",) * 3).inputs(device)
    call(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = call(q, k, v)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < out.nbytes + lse.nbytes + (4 << 20)


@pytest.mark.parametrize("packing", ["between_sequence_and_heads", "along_heads"])
def test_packed_projections(device, packing):
    batch, seqlen, heads, dim = 2, 300, 4, 128
    qkv = torch.randn(batch, seqlen, 3, heads, dim, device=device, dtype=torch.bfloat16)
    if packing == "between_sequence_and_heads":
        q, k, v = qkv.unbind(2)
    else:
        q, k, v = qkv.reshape(batch, seqlen, 3 * heads, dim).split([2 * heads, heads // 2, heads // 2], dim=2)
        v = qkv.reshape(batch, seqlen, 3 * heads, dim)[:, :, -2:]
    check_tensors((q, k, v), call(q, k, v, None, True), None, True)


def test_k_and_v_may_be_one_tensor_and_overlap_q(device):
    x = torch.randn(2, 200, 4, 128, device=device, dtype=torch.bfloat16)
    check_tensors((x, x, x), call(x, x, x, None, True), None, True)
    q, k, v = x[:, 50:], x[:, :150], x[:, 25:175]
    check_tensors((q, k, v), call(q, k, v))


@pytest.mark.parametrize("dim", [0, 2])
def test_an_expanded_input_is_right_or_refused(device, dim):
    """Stride 0: one batch or one head shown many times."""
    q = torch.randn(3, 150, 4, 64, device=device, dtype=torch.bfloat16)
    one = torch.randn(3, 200, 4, 64, device=device, dtype=torch.bfloat16).narrow(dim, 0, 1)
    k = one.expand(3, 200, 4, 64)
    try:
        got = call(q, k, k)
    except (ValueError, NotImplementedError) as refusal:
        assert "stride" in str(refusal)
    else:
        check_tensors((q, k, k), got)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_tma_cannot_read_is_refused_by_name(device, which):
    tensors = {name: torch.randn(1, 64, 2, 64, device=device, dtype=torch.bfloat16) for name in "qkv"}
    spread = torch.randn(1, 64, 2, 128, device=device, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match=rf"fa3: {which}\b"):
        call(*{**tensors, which: spread}.values())
    odd_row = torch.randn(1, 64, 2 * 64 + 4, device=device, dtype=torch.bfloat16)[..., :128].unflatten(-1, (2, 64))
    with pytest.raises(ValueError, match=rf"fa3: {which}\b"):
        call(*{**tensors, which: odd_row}.values())
    shifted = torch.randn(64 * 2 * 64 + 4, device=device, dtype=torch.bfloat16)[4:].view(1, 64, 2, 64)
    with pytest.raises(ValueError, match=rf"fa3: {which}\b"):
        call(*{**tensors, which: shifted}.values())
    torch.cuda.synchronize()
