"""torch.compile takes the call into its graph without a break, with fixed and with changing shapes."""

from __future__ import annotations

import pytest
import torch

import fa3
from tests.gpu.cases import Case
from tests.gpu.checking import call, check_tensors


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with something to fuse on either side of it."""
    out, lse = fa3.flash_attn_func(q * 2, k, v, causal=True, return_lse=True)
    return out + 1, lse


def _compare(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], compiled) -> None:
    out, lse = compiled(*inputs)
    eager, eager_lse = _block(*inputs)
    assert out.shape == eager.shape
    assert out.dtype == eager.dtype
    torch.testing.assert_close(out, eager, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, eager_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_without_a_graph_break(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (130, 257, 300):
        _compare(Case(seqlen, seqlen + 20, 128, 128, batch=2, heads_kv=2, group=2).inputs(device), compiled)


@pytest.mark.slow
def test_with_inductor(device):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True)
    _compare(Case(257, 300, 128, 128, batch=2, heads_kv=2, group=2).inputs(device), compiled)


def test_transposed_inputs_under_compilation(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: call(q, k, v, None, True), fullgraph=True, backend="aot_eager")
    inputs = Case(200, 300, 64, 64, batch=2, heads_kv=2, layouts=("heads_first",) * 3).inputs(device)
    check_tensors(inputs, compiled(*inputs), None, True)


def test_the_op_passes_the_checks_of_torch_library(device):
    """Schema, fake tensors and AOT dispatch, with real tensors beside them."""
    inputs = Case(70, 90, 64, 32, batch=2, heads_kv=2, group=2).inputs(device)
    torch.library.opcheck(torch.ops.fa3.forward.default, (*inputs, 0.2, True))
