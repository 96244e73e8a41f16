"""The backward inside of PyTorch: torch.compile, checkpointing, autocast, opcheck, no second derivatives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import fa3
from tests.gpu.cases import Case
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, differentiable, gradients, leaves

CASE = Case(257, 300, 128, 128, batch=2, heads_kv=2, group=2, causal=True)


def _block(q, k, v):
    """Attention with something to fuse on either side of it."""
    return fa3.flash_attn_func(q * 1.0, k, v, causal=True) + 0.0


# ---- torch.compile


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (130, 257, 300):
        case = Case(seqlen, seqlen + 20, 128, 128, batch=2, heads_kv=2, group=2)
        q, k, v, do, _ = GradientCase(case).inputs(device)
        inputs = leaves(q, k, v)
        got = torch.autograd.grad(compiled(*inputs), inputs, do)
        check_gradient_tensors((q, k, v), got, do, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(64, 64), (192, 128)])
def test_compiled_by_inductor(device, widths):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True)
    case = Case(257, 300, *widths, batch=2, heads_kv=2, group=2)
    q, k, v, do, _ = GradientCase(case).inputs(device)
    inputs = leaves(q, k, v)
    got = torch.autograd.grad(compiled(*inputs), inputs, do)
    check_gradient_tensors((q, k, v), got, do, causal=True)


def test_compiled_with_transposed_inputs_and_gradient(device):
    """As models have them: (B, H, S, D) in memory on all sides of the call."""
    torch._dynamo.reset()

    def f(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return fa3.flash_attn_func(q, k, v, causal=True).transpose(1, 2)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    inputs = leaves(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    got = torch.autograd.grad(compiled(*inputs), inputs, do.transpose(1, 2).contiguous())
    check_gradient_tensors((q, k, v), tuple(x.transpose(1, 2) for x in got), do, causal=True)


@pytest.mark.parametrize("incoming", ["lse", "both"])
def test_compiled_with_a_gradient_of_lse(device, incoming):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    q, k, v, do, dlse = GradientCase(CASE, incoming=incoming).inputs(device)
    got = gradients((q, k, v), do, dlse, attention=lambda q, k, v, *options: compiled(q, k, v))
    check_gradient_tensors((q, k, v), got, do, dlse, causal=True)


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_compiled_with_some_gradients_only(device, wanted):
    torch._dynamo.reset()
    compiled = torch.compile(_block, fullgraph=True, backend="aot_eager")
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    got = gradients((q, k, v), do, wanted=wanted, attention=lambda q, k, v, *options: (compiled(q, k, v), None))
    check_gradient_tensors((q, k, v), got, do, causal=True)
    assert "".join(name for name, x in zip("qkv", got, strict=True) if x is not None) == wanted


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_with_a_loss_behind_it(device, backend):
    """The gradient of O is made by the compiler: one number with strides of 0."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: _block(q, k, v).sum(), fullgraph=True, backend=backend)
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    inputs = leaves(q, k, v)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    check_gradient_tensors((q, k, v), got, torch.ones_like(do), causal=True)


def test_compiled_autograd(device):
    """The backward of an eager forward is traced into a graph of its own."""
    torch._dynamo.reset()
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    inputs = leaves(q, k, v)
    out, _ = differentiable(*(x * 1.0 for x in inputs), None, True)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager", fullgraph=True)):
        out.backward(do)
    check_gradient_tensors((q, k, v), tuple(x.grad for x in inputs), do, causal=True)


# ---- checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing(device, reentrant, compiled):
    """O and LSE are computed anew for the backward: the same bits, so the same gradients."""
    if compiled and reentrant:
        pytest.skip("torch.compile takes only checkpointing without reentrant autograd into its graph")
    torch._dynamo.reset()
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    attention = partial(fa3.flash_attn_func, causal=True, deterministic=True)
    inputs = leaves(q, k, v)

    def f(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=reentrant)

    run = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
    got = torch.autograd.grad(run(*inputs), inputs, do) if not reentrant else _by_backward(run(*inputs), inputs, do)
    expected = gradients((q, k, v), do, causal=True, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    check_gradient_tensors((q, k, v), got, do, causal=True)


def _by_backward(out, inputs, do):
    """Reentrant checkpoints work with .backward() only."""
    out.backward(do)
    return tuple(x.grad for x in inputs)


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_between_layers_under_autocast(device, dtype):
    """float32 weights, 16-bit attention, as in mixed-precision training: the weights' gradients are float32."""
    torch.manual_seed(3)
    project, back = (torch.nn.Linear(256, n, device=device) for n in (3 * 256, 256))
    x = torch.randn(2, 200, 256, device=device)

    def loss(attention):
        with torch.autocast("cuda", dtype=dtype):
            q, k, v = project(x).unflatten(-1, (3, 4, 64)).unbind(2)
            assert q.dtype == dtype
            return back(attention(q, k, v).flatten(2)).float().square().sum()  # a mean would underflow in float16

    def math(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    weights = [*project.parameters(), *back.parameters()]
    got = torch.autograd.grad(loss(partial(fa3.flash_attn_func, causal=True)), weights)
    expected = torch.autograd.grad(loss(math), weights)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-2 * b.norm()


def test_float32_under_autocast_is_refused_by_name(device):
    q = torch.randn(1, 40, 2, 64, device=device, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16), pytest.raises(TypeError, match="autocast"):
        fa3.flash_attn_func(q, q, q)


def test_the_backward_runs_under_autocast_too(device):
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    inputs = leaves(q, k, v)
    with torch.autocast("cuda", dtype=torch.float16):
        out, _ = differentiable(*inputs, None, True)
        got = torch.autograd.grad(out, inputs, do)
    check_gradient_tensors((q, k, v), got, do, causal=True)


def test_grad_scaler(device):
    """float16 training scales the loss by a power of two; the gradients carry it exactly."""
    problem = GradientCase(Case(130, 130, 64, 64, heads_kv=2, causal=True, dtype="fp16"))
    q, k, v, do, _ = problem.inputs(device)
    got = gradients((q, k, v), do * 64.0, causal=True, deterministic=True)
    check_gradient_tensors((q, k, v), got, do * 64.0, causal=True)


# ---- the ops


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_forward_op_passes_the_checks_of_torch_library(device, requires_grad):
    """Schema, fake tensors, autograd registration and AOT dispatch, forward and backward."""
    q, k, v, _, _ = GradientCase(Case(70, 90, 64, 32, batch=2, heads_kv=2, group=2)).inputs(device)
    inputs = tuple(x.requires_grad_(requires_grad) for x in (q, k, v))
    torch.library.opcheck(torch.ops.fa3.forward.default, (*inputs, 0.2, True, True))


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_backward_op_passes_the_checks_of_torch_library(device, with_dlse, mask):
    """In the deterministic mode, because the check compares two runs."""
    q, k, v, do, dlse = GradientCase(Case(70, 90, 64, 32, batch=2, heads_kv=2, group=2), incoming="both").inputs(device)
    o, lse = torch.ops.fa3.forward(q, k, v, 0.2, True)
    arguments = (do, q, k, v, o, lse, dlse if with_dlse else None, 0.2, True, True, mask)
    torch.library.opcheck(torch.ops.fa3.backward.default, arguments)


# ---- second derivatives


@pytest.mark.parametrize("through", ["eager", "op"])
def test_second_derivatives_are_refused_in_words(device, through):
    q, k, v, do, _ = GradientCase(Case(33, 33, 64, 64)).inputs(device)
    q, k, v = leaves(q, k, v)
    out = fa3.flash_attn_func(q, k, v) if through == "eager" else torch.ops.fa3.forward(q, k, v, 0.125, False)[0]
    (dq,) = torch.autograd.grad(out, q, do, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(dq.float().square().sum(), q)


def test_a_differentiable_gradient_of_o_is_refused_in_words(device):
    q, k, v, do, _ = GradientCase(Case(33, 33, 64, 64)).inputs(device)
    q, k, v = leaves(q, k, v)
    out = fa3.flash_attn_func(q, k, v)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(out, q, do.requires_grad_(), create_graph=True)


# ---- what autograd holds


def test_no_graph_under_no_grad_and_inference_mode(device):
    q, k, v, _, _ = GradientCase(Case(33, 33, 64, 64)).inputs(device)
    inputs = leaves(q, k, v)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not fa3.flash_attn_func(*inputs).requires_grad


def test_an_input_that_was_changed_after_the_forward_is_noticed(device):
    q, k, v, do, _ = GradientCase(Case(33, 33, 64, 64)).inputs(device)
    k.requires_grad_()
    out = fa3.flash_attn_func(q, k, v)
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, k, do)


def test_hooks_on_saved_tensors(device):
    """Offloading of activations: what was saved comes back as other tensors with the same numbers."""
    q, k, v, do, _ = GradientCase(CASE).inputs(device)
    inputs = leaves(q, k, v)
    with torch.autograd.graph.save_on_cpu():
        out, _ = differentiable(*inputs, None, True)
    got = torch.autograd.grad(out, inputs, do)
    check_gradient_tensors((q, k, v), got, do, causal=True)
