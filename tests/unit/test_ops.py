"""The ops as PyTorch's machinery sees them: opcheck, fake tensors, torch.compile, autograd, functorch.

On the CPU the stand-in computes; the last section runs the real kernels where there is a Hopper GPU.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import get_args

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fa3
from fa3 import errors, launch, launch_backward, ops, reference
from fa3.config.backward import BackwardKey, Wanted

BF = torch.bfloat16
assert ops  # it defines torch.ops.fa3


def qkv(device="cpu", dtype=BF, requires_grad=False, d=16, dv=16, sq=5, sk=7):
    g = torch.Generator().manual_seed(0)
    shapes = (2, sq, 4, d), (2, sk, 2, d), (2, sk, 2, dv)
    return tuple(torch.randn(s, generator=g).to(device, dtype).requires_grad_(requires_grad) for s in shapes)


def close(o, q, k, v, **options):
    want = reference.attention(q, k, v, **options)[0]
    torch.testing.assert_close(o.detach().double(), want, rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------------------------ the op
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(causal, transposed, stand_in):
    q, k, v = qkv(dv=24)
    if transposed:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    torch.library.opcheck(torch.ops.fa3.forward.default, (q, k, v, 0.3, causal))


def test_opcheck_empty(stand_in):
    torch.library.opcheck(torch.ops.fa3.forward.default, (*qkv(sk=0), 0.3, True))


def test_fake_tensors_on_a_gpu_that_is_not_there():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, 4, 64, dtype=BF, device="cuda") for n in (5, 7, 7))
        q = torch.empty(2, 4, 5, 64, dtype=BF, device="cuda").transpose(1, 2)
        o, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
        assert o.shape == q.shape and o.dtype == BF and o.device == q.device and o.is_contiguous()
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
        with pytest.raises(ValueError, match="head_dim"):
            fa3.flash_attn_func(*(torch.empty(2, 5, 4, 12, dtype=BF, device="cuda"),) * 3)
        with pytest.raises(ValueError, match=r"stride\(2\)"):
            fa3.flash_attn_func(torch.empty_strided(q.shape, (1360, 272, 68, 1), dtype=BF, device="cuda"), k, v)


def test_the_op_itself_refuses_cpu_tensors():
    with pytest.raises(ValueError, match=r"Hopper.*fa3\.emulate"):
        torch.ops.fa3.forward(*qkv(), 0.3, False)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_one_operation(stand_in):
    q, k, v = qkv()
    with Seen() as seen:
        o = fa3.flash_attn_func(q, k, v)
    assert seen.names[0] == "fa3.forward.default"
    close(o, q, k, v)


def test_a_subclass_goes_through_the_op(stand_in):
    q, k, v = qkv()
    o = fa3.flash_attn_func(torch.nn.Parameter(q), k, v)
    assert o.requires_grad
    close(o, q, k, v)


def test_make_fx_records_the_op(stand_in):
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True))(*qkv())
    assert next(str(n.target) for n in traced.graph.nodes if n.op == "call_function") == "fa3.forward.default"


# ------------------------------------------------------------------------------------------------ torch.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(backend, dynamic, stand_in):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend, dynamic=dynamic)
    def f(q, k, v):
        o, lse = fa3.flash_attn_func(q * 1.0, k, v, softmax_scale=0.25, window_size=(-1, 0), return_lse=True)
        return o + 0.0, lse

    for sq, sk in ((5, 7), (6, 9), (9, 4)):
        q, k, v = qkv(sq=sq, sk=sk)
        o, lse = f(q, k, v)
        close(o, q, k, v, softmax_scale=0.25, causal=True)
        assert lse.shape == (2, 4, sq)


def test_compile_keeps_strides(stand_in):
    torch._dynamo.reset()
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())
    torch.compile(fa3.flash_attn_func, fullgraph=True, backend="aot_eager")(q, k, v)
    assert [t.stride() for t in stand_in.calls[-1][:3]] == [t.stride() for t in (q, k, v)]


def test_compile_reports_what_the_fake_refuses(stand_in):
    torch._dynamo.reset()
    q, k, v = qkv()
    with pytest.raises(Exception, match="head_dim"):
        torch.compile(fa3.flash_attn_func, fullgraph=True, backend="eager")(q[..., :12], k[..., :12], v)
    assert not stand_in.calls


def test_compile_with_gradients(stand_in):
    torch._dynamo.reset()
    q, k, v = qkv(requires_grad=True)
    f = torch.compile(lambda *t: fa3.flash_attn_func(*t, causal=True) * 1.0, fullgraph=True, backend="aot_eager")
    o = f(q, k, v)
    close(o, q, k, v, causal=True)
    do = torch.randn(o.shape).to(BF)
    close_gradients(torch.autograd.grad(o, (q, k, v), do), do, q, k, v, causal=True)


def test_export(stand_in):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fa3.flash_attn_func(q, k, v, causal=True)

    q, k, v = qkv()
    program = torch.export.export(Model(), (q, k, v))
    assert "fa3.forward" in str(program.graph)
    close(program.module()(q, k, v), q, k, v, causal=True)


# ------------------------------------------------------------------------------------------------ autograd
def close_gradients(found, do, *qkv, **options):
    for got, want in zip(found, reference.gradients(do, *(t.detach() for t in qkv), **options), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("which", get_args(Wanted))
def test_gradients_that_are_asked_for(which, stand_in):
    tensors = [t.requires_grad_(name in which) for name, t in zip("qkv", qkv(), strict=True)]
    o, lse = fa3.flash_attn_func(*tensors, return_lse=True)
    assert o.requires_grad and o.grad_fn is not None
    close(o, *tensors)
    do, dlse = torch.randn(o.shape).to(BF), torch.randn(lse.shape)
    torch.autograd.backward([o, lse], [do, dlse])
    want = reference.gradients(do, *(t.detach() for t in tensors), dlse=dlse)
    for name, tensor, exact in zip("qkv", tensors, want, strict=True):
        if name in which:
            torch.testing.assert_close(tensor.grad.double(), exact, rtol=2e-2, atol=2e-2)
        else:
            assert tensor.grad is None
    kernels = {key.part: key for key in stand_in.keys if isinstance(key, BackwardKey)}
    assert kernels["backward"].wanted == which and ("backward_finish" in kernels) == ("q" in which)


@pytest.mark.parametrize("which", ["q", "kv"])
def test_a_graph_asks_for_the_same_gradients(which, stand_in):
    torch._dynamo.reset()
    tensors = [t.requires_grad_(name in which) for name, t in zip("qkv", qkv(), strict=True)]
    f = torch.compile(lambda *t: fa3.flash_attn_func(*t) * 1.0, fullgraph=True, backend="aot_eager")
    f(*tensors).sum().backward()
    assert [t.grad is not None for t in tensors] == [name in which for name in "qkv"]
    assert [key.wanted for key in stand_in.keys if getattr(key, "part", "") == "backward"] == [which]


def test_frozen_parts_of_a_model_cost_nothing_more(stand_in):
    """torch.autograd.grad asks for fewer gradients than there could be. About leaves the engine gives no answer."""
    q, k, v = qkv(requires_grad=True)
    o = fa3.flash_attn_func(q * 1, k * 1, v)
    for inputs, wanted in (((k, v), "kv"), ((v,), "v"), ((q, k, v), "qkv"), ((q,), "qv")):
        stand_in.keys.clear()
        launch_backward._plans.clear()
        found = torch.autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
        assert [g.shape for g in found] == [t.shape for t in inputs]
        assert [key.wanted for key in stand_in.keys if key.part == "backward"] == [wanted]


def test_the_engine_may_keep_to_itself_what_it_runs(stand_in, monkeypatch):
    monkeypatch.setattr(ops, "_will_run", None)
    q, k, v = qkv(requires_grad=True)
    o = fa3.flash_attn_func(q * 1, k * 1, v)
    (dk,) = torch.autograd.grad(o, k, torch.ones_like(o))
    assert dk.shape == k.shape and stand_in.keys[-1].wanted == "qkv"


@pytest.mark.parametrize("through", ["eager", "op"])
def test_no_second_derivatives(through, stand_in):
    q, k, v = qkv(requires_grad=True)
    o = fa3.flash_attn_func(q, k, v) if through == "eager" else torch.ops.fa3.forward(q, k, v, 0.25, False)[0]
    (dq,) = torch.autograd.grad(o, q, torch.ones_like(o), create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.float().square().sum().backward()
    weights = torch.ones_like(o).requires_grad_()
    o = fa3.flash_attn_func(q, k, v)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(o, q, weights, create_graph=True)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "odd"], ids=lambda layout: f"dO {layout}")
def test_gradients_of_any_strides(layout, stand_in):
    q, k, v = qkv(requires_grad=True)
    o = fa3.flash_attn_func(q, k, v)
    do = {
        "expanded": torch.ones(1).to(BF).expand(o.shape),
        "transposed": torch.randn(*o.shape[::-1]).to(BF).permute(3, 2, 1, 0),
        "sliced": torch.randn(*o.shape[:3], 48).to(BF)[..., 8:24],
        "odd": torch.randn(*o.shape[:3], 33).to(BF)[..., 1:17],
    }[layout]
    close_gradients(torch.autograd.grad(o, (q, k, v), do), do, q, k, v)


def test_opcheck_of_the_backward(stand_in):
    q, k, v = qkv()
    o, lse = torch.ops.fa3.forward(q, k, v, 0.3, True)
    options = o.clone(), q, k, v, o, lse, torch.ones_like(lse), 0.3, True
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for mask in itertools.product((False, True), repeat=3):
        arguments = (*options, False, list(mask))
        torch.library.opcheck(torch.ops.fa3.backward.default, arguments, test_utils=tests)
        found = torch.ops.fa3.backward(*arguments)
        for gradient, tensor, wanted in zip(found, (q, k, v), mask, strict=True):
            assert gradient.shape == (tensor.shape if wanted else (0,)) and gradient.dtype == tensor.dtype


def test_the_backward_checks_what_it_gets(stand_in):
    q, k, v = qkv()
    o, lse = torch.ops.fa3.forward(q, k, v, 0.3, True)
    with pytest.raises(ValueError, match="do has shape"):
        torch.ops.fa3.backward(o[:, :-1], q, k, v, o, lse, None, 0.3, True)
    with pytest.raises(TypeError, match="lse has dtype"):
        torch.ops.fa3.backward(o, q, k, v, o, lse.double(), None, 0.3, True)
    with pytest.raises(ValueError, match="dlse has shape"):
        torch.ops.fa3.backward(o, q, k, v, o, lse, lse[:1], 0.3, True)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd(fullgraph, stand_in):
    """The backward of an eager forward is traced into a graph of its own."""
    torch._dynamo.reset()
    inputs = qkv(requires_grad=True)
    o = fa3.flash_attn_func(*(t * 1.0 for t in inputs))
    do = torch.randn(o.shape).to(BF)
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager", fullgraph=fullgraph)):
        o.backward(do)
    close_gradients([t.grad for t in inputs], do, *inputs)


def test_gradients_of_tensors_inside_a_graph(stand_in):
    """Those that somebody waits for, by `inputs`, by retaining them or by a hook."""
    q, k, v = (t * 1.0 for t in qkv(requires_grad=True))
    o = fa3.flash_attn_func(q, k, v)
    do = torch.randn(o.shape).to(BF)
    every = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    close_gradients(every, do, q, k, v)
    some = torch.autograd.grad(o, (v, q), do, retain_graph=True)
    assert torch.equal(some[0], every[2]) and torch.equal(some[1], every[0])
    seen = []
    k.retain_grad()
    k.register_hook(seen.append)
    o.backward(do)
    assert torch.equal(k.grad, every[1]) and torch.equal(seen[0], every[1])


def test_without_gradients_no_node(stand_in):
    q, k, v = qkv(requires_grad=True)
    with torch.no_grad():
        assert not fa3.flash_attn_func(q, k, v).requires_grad
    with torch.inference_mode():
        assert not fa3.flash_attn_func(q, k, v).requires_grad
    assert not fa3.flash_attn_func(q.detach(), k.detach(), v.detach()).requires_grad


def test_functorch_and_forward_mode_are_not_silently_wrong(stand_in):
    q, k, v = qkv()
    with pytest.raises(RuntimeError):  # PyTorch itself refuses transforms of an op from torch.library
        torch.func.grad(lambda t: fa3.flash_attn_func(t, k, v).float().sum())(q)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: fa3.flash_attn_func(t, k, v), (q,), (q,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="forward-mode"):
            fa3.flash_attn_func(q, k, forward_ad.make_dual(v, v))
        close(fa3.flash_attn_func(q, k, v), q, k, v)


def test_eager_and_op_agree_on_options(stand_in):
    q, k, v = qkv()
    plan = launch.plan(q, k, v, -0.25, True)
    assert (plan.softmax_scale, plan.causal) == (-0.25, True)
    torch.ops.fa3.forward(q, k, v, -0.25, True)
    assert len(stand_in.keys) == 1  # one plan serves both


# ------------------------------------------------------------------------------------------------ on the GPU
@pytest.mark.gpu
def test_opcheck_on_the_gpu(hopper):
    torch.library.opcheck(torch.ops.fa3.forward.default, (*qkv(hopper, d=64, dv=64), 0.3, True))


@pytest.mark.gpu
def test_compiled_by_inductor(hopper):
    torch._dynamo.reset()
    q, k, v = qkv(hopper, d=64, dv=64, sq=130, sk=200)
    f = torch.compile(lambda *t: fa3.flash_attn_func(t[0] * 1.0, *t[1:], causal=True) + 0.0, fullgraph=True)
    close(f(q, k, v), q, k, v, causal=True)


@pytest.mark.gpu
def test_side_stream(hopper):
    q, k, v = qkv(hopper, d=64, dv=64, sq=130, sk=200)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.mul_(2.0)
        o = fa3.flash_attn_func(q, k, v)
    stream.synchronize()
    close(o, q, k, v)


CAPTURE_FIRST = """
import torch, fa3
from fa3 import reference
q, k, v = (torch.randn(2, n, 4, 64, dtype=torch.bfloat16, device="cuda") for n in (130, 200, 200))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):                     # nothing of fa3 has run before
    a = fa3.flash_attn_func(q, k, v, causal=True)
    b = fa3.flash_attn_func(a, k, v, causal=True)
for _ in range(3):
    a.zero_(), b.zero_()
    graph.replay()
    torch.cuda.synchronize()
    want = reference.attention(q, k, v, causal=True)[0]
    assert (a.double() - want).abs().max() < 2e-2
    want = reference.attention(a, k, v, causal=True)[0]
    assert (b.double() - want).abs().max() < 2e-2
"""


@pytest.mark.gpu
def test_first_use_may_be_a_capture(hopper):
    done = subprocess.run([sys.executable, "-c", CAPTURE_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_graphs_replayed_together_and_beside_eager_calls(hopper):
    inputs = [qkv(hopper, d=64, dv=64, sq=700 + i, sk=900) for i in range(3)]
    wants = [reference.attention(*x, causal=True)[0] for x in inputs]
    fa3.flash_attn_func(*inputs[0], causal=True)
    graphs, outs = [], []
    for x in inputs[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([fa3.flash_attn_func(*x, causal=True) for _ in range(4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(5):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = fa3.flash_attn_func(*inputs[2], causal=True)
        torch.cuda.synchronize()
        for o, want in zip([*outs[0], *outs[1], eager], [wants[0]] * 4 + [wants[1]] * 4 + [wants[2]], strict=True):
            torch.testing.assert_close(o.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_failed_launch_leaves_cuda_usable(hopper, monkeypatch):
    q, k, v = qkv(hopper, d=64, dv=64)
    plan = launch.plan(q, k, v, None, False)
    plan.run(q, k, v)
    monkeypatch.setattr(plan.gpu, "sm_count", -1)  # CUDA refuses the grid
    with pytest.raises(errors.LaunchError, match="forward_bf16_d64"):
        plan.run(q, k, v)
    monkeypatch.undo()
    assert torch.ones(3, device=hopper).sum().item() == 3
    close(plan.run(q, k, v)[0], q, k, v)
