"""Where and when the backward runs: the stream of its forward, many streams at once, CUDA graphs, other devices."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.gpu.cases import Case
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, differentiable, gradients, leaves
from tests.gpu.test_streams_and_graphs import SPIN


def _same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _deterministic(inputs, do):
    return gradients(inputs, do, causal=True, deterministic=True)


def test_the_backward_runs_on_the_stream_of_its_forward(device):
    """The inputs appear on a side stream after a long wait, and vanish on it afterwards. A backward on another stream
    would read what was before, or after."""
    q, k, v, do, _ = GradientCase(Case(400, 400, 128, 128, batch=2, heads_kv=4)).inputs(device)
    expected = _deterministic((q, k, v), do)
    late = [torch.full_like(x, 3.0) for x in (q, k, v, do)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        for to, x in zip(late, (q, k, v, do), strict=True):
            to.copy_(x)
        got = _deterministic(tuple(late[:3]), late[3])
        for to in late:
            to.fill_(9.0)
    torch.cuda.synchronize()
    assert _same(got, expected)


def test_a_backward_that_is_asked_for_from_another_stream(device):
    """Autograd runs it on the stream of the forward and makes the asking stream wait."""
    q, k, v, do, _ = GradientCase(Case(400, 400, 128, 128, batch=2, heads_kv=4)).inputs(device)
    expected = _deterministic((q, k, v), do)
    inputs = leaves(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        out, _ = differentiable(*inputs, None, True, True)
    got = torch.autograd.grad(out, inputs, do)
    copies = tuple(x.clone() for x in got)
    torch.cuda.synchronize()
    assert _same(copies, expected)


def test_many_streams_at_once(device):
    """Backward passes that overlap on the GPU share neither sums nor counters."""
    cases = [Case(300 + 7 * i, 350, 64, 64, heads_kv=3, causal=True, seed=i) for i in range(16)]
    given = [GradientCase(case).inputs(device)[:4] for case in cases]
    expected = [_deterministic((q, k, v), do) for q, k, v, do in given]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in cases]
    for _ in range(10):
        for (q, k, v, do), stream, into in zip(given, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(_deterministic((q, k, v), do))
    torch.cuda.synchronize()
    assert all(_same(got, right) for many, right in zip(results, expected, strict=True) for got in many)


def test_many_threads_at_once(device):
    cases = [Case(200 + 31 * i, 300, 128, 128, heads_kv=2, causal=True, seed=i) for i in range(6)]
    given = [GradientCase(case).inputs(device)[:4] for case in cases]
    expected = [_deterministic((q, k, v), do) for q, k, v, do in given]
    torch.cuda.synchronize()
    right: list[int] = []

    def work(at: int) -> None:
        q, k, v, do = given[at]
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [_deterministic((q, k, v), do) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        if all(_same(got, expected[at]) for got in results):
            right.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == list(range(len(cases)))


# ---- CUDA graphs


class Captured:
    """One forward and backward in a CUDA graph, with inputs that can be replaced."""

    def __init__(self, problem: GradientCase, device: torch.device, calls: int = 1) -> None:
        self.problem = problem
        q, k, v, self.do, self.dlse = problem.inputs(device)
        self.inputs = leaves(q, k, v)
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            self._both()
        torch.cuda.current_stream().wait_stream(warm)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [self._both() for _ in range(calls)]

    def _both(self) -> tuple[torch.Tensor, ...]:
        outputs = differentiable(*self.inputs, None, self.problem.case.causal, self.problem.deterministic)
        incoming = [(x, dx) for x, dx in zip(outputs, (self.do, self.dlse), strict=True) if dx is not None]
        return torch.autograd.grad([x for x, _ in incoming], self.inputs, [dx for _, dx in incoming])

    def renew(self) -> None:
        with torch.no_grad():
            for x in (*self.inputs, self.do):
                x.copy_(torch.randn(x.shape, device=x.device))

    def check(self) -> None:
        q, k, v = (x.detach() for x in self.inputs)
        causal = self.problem.case.causal
        check_gradient_tensors((q, k, v), self.results[-1], self.do, self.dlse, None, causal)
        if self.problem.deterministic:
            expected = gradients((q, k, v), self.do, self.dlse, None, causal, True)
            assert all(_same(got, expected) for got in self.results)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_graph_replays_on_new_values(device, widths, causal):
    for deterministic in (False, True):
        case = Case(500, 700, *widths, batch=2, heads_kv=4, group=2, causal=causal)
        captured = Captured(GradientCase(case, incoming="both", deterministic=deterministic), device)
        for _ in range(3):
            captured.renew()
            captured.graph.replay()
            torch.cuda.synchronize()
            captured.check()


def test_a_graph_of_many_calls(device):
    case = Case(300, 300, 128, 128, heads_kv=8, causal=True)
    captured = Captured(GradientCase(case, deterministic=True), device, calls=10)
    captured.renew()
    for _ in range(5):
        captured.graph.replay()
    torch.cuda.synchronize()
    captured.check()


def test_a_graph_with_a_gradient_that_must_be_copied(device):
    """dO of odd strides: its copy is part of the graph."""
    case = Case(300, 300, 128, 128, heads_kv=4, causal=True)
    captured = Captured(GradientCase(case, do_layout="odd_rows", deterministic=True), device)
    captured.renew()
    captured.graph.replay()
    torch.cuda.synchronize()
    captured.check()


def test_replays_run_beside_eager_calls_and_other_graphs(device):
    """Nobody takes another's sums or counters."""
    graphs = [
        Captured(
            GradientCase(Case(900, 900, d, d, batch=2, heads_kv=4, causal=True, seed=d), deterministic=True), device
        )
        for d in (64, 64, 128)
    ]
    q, k, v, do, _ = GradientCase(Case(800, 800, 64, 64, batch=2, heads_kv=6, causal=True)).inputs(device)
    expected = _deterministic((q, k, v), do)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for captured, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                captured.graph.replay()
        results.append(_deterministic((q, k, v), do))
    torch.cuda.synchronize()
    assert all(_same(got, expected) for got in results)
    for captured in graphs:
        captured.check()


def test_make_graphed_callables(device):
    """PyTorch's own way to put both passes of a module into graphs."""

    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return differentiable(q, k, v, None, True)[0]

    q, k, v, do, _ = GradientCase(Case(200, 200, 64, 64, heads_kv=4)).inputs(device)
    graphed = torch.cuda.make_graphed_callables(Block(), tuple(x.clone().requires_grad_() for x in (q, k, v)))
    inputs = leaves(q, k, v)
    got = torch.autograd.grad(graphed(*inputs), inputs, do)
    check_gradient_tensors((q, k, v), got, do, causal=True)


# ---- devices


def test_another_device_than_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = GradientCase(Case(300, 300, 128, 128, heads_kv=4, causal=True))
    for at in (1, 0, 1):
        q, k, v, do, _ = problem.inputs(f"cuda:{at}")
        check_gradient_tensors((q, k, v), gradients((q, k, v), do, causal=True), do, causal=True)
        assert torch.cuda.current_device() == device.index
