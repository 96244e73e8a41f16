"""Where and when the kernel runs: the current stream, many streams at once, CUDA graphs, other devices."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.gpu.cases import Case
from tests.gpu.checking import call, check_tensors

LONG_MS = 5
SPIN = LONG_MS * 1_800_000
"""GPU clocks of about five milliseconds: far longer than the calls under test take."""

Result = tuple[torch.Tensor, torch.Tensor]


def _same(a: Result, b: Result) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_a_side_stream_is_used_and_waited_for(device):
    """The inputs appear on a side stream after a long wait; a kernel on any other stream would read what was before."""
    case = Case(400, 400, 128, 128, batch=2, heads_kv=4)
    inputs = case.inputs(device)
    expected = call(*inputs, None, True)
    late = [torch.full_like(x, 3.0) for x in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        for to, x in zip(late, inputs, strict=True):
            to.copy_(x)
        got = call(*late, None, True)
        for to in late:  # and whatever comes after on this stream comes after the kernel
            to.fill_(9.0)
    torch.cuda.synchronize()
    assert _same(got, expected)


def test_many_streams_at_once(device):
    """Launches that overlap on the GPU do not share a tile counter."""
    cases = [Case(300 + 7 * i, 350, 64, 64, heads_kv=3, causal=i % 2 == 0, seed=i) for i in range(32)]
    inputs = [case.inputs(device) for case in cases]
    expected = [call(*x, None, case.causal) for case, x in zip(cases, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list[Result]] = [[] for _ in cases]
    for _ in range(20):
        for case, x, stream, into in zip(cases, inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(call(*x, None, case.causal))
    torch.cuda.synchronize()
    assert all(_same(got, right) for many, right in zip(results, expected, strict=True) for got in many)


def test_many_threads_at_once(device):
    """Each with a stream and a shape of its own."""
    cases = [Case(200 + 31 * i, 300, 128, 128, heads_kv=2, causal=True, seed=i) for i in range(8)]
    inputs = [case.inputs(device) for case in cases]
    expected = [call(*x, None, True) for x in inputs]
    torch.cuda.synchronize()
    right: list[int] = []

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [call(*inputs[at], None, True) for _ in range(50)]
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
    """One call in a CUDA graph, with inputs that can be replaced."""

    def __init__(self, case: Case, device: torch.device, calls: int = 1) -> None:
        self.case = case
        self.inputs = case.inputs(device)
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            call(*self.inputs, case.scale, case.causal)
        torch.cuda.current_stream().wait_stream(warm)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call(*self.inputs, case.scale, case.causal) for _ in range(calls)]

    def renew(self) -> None:
        for x in self.inputs:
            x.copy_(torch.randn(x.shape, device=x.device))

    def check(self) -> None:
        expected = call(*self.inputs, self.case.scale, self.case.causal)
        assert all(_same(got, expected) for got in self.results)
        check_tensors(self.inputs, self.results[-1], self.case.scale, self.case.causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_graph_replays_on_new_values(device, head_dim, causal):
    captured = Captured(Case(500, 700, head_dim, head_dim, batch=2, heads_kv=8, causal=causal), device)
    for _ in range(3):
        captured.renew()
        captured.graph.replay()
        torch.cuda.synchronize()
        captured.check()


def test_a_graph_of_many_calls(device):
    captured = Captured(Case(300, 300, 128, 128, heads_kv=8, causal=True), device, calls=20)
    captured.renew()
    for _ in range(5):
        captured.graph.replay()
    torch.cuda.synchronize()
    captured.check()


def test_a_graph_of_parallel_branches(device):
    """Forked streams inside of one capture: these kernels really run at the same time, each replay."""
    case = Case(300, 300, 64, 64, heads_kv=4, causal=True)
    inputs = case.inputs(device)
    expected = call(*inputs, None, True)
    branches = [torch.cuda.Stream() for _ in range(8)]
    graph = torch.cuda.CUDAGraph()
    results: list[Result] = []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        origin = torch.cuda.current_stream()
        for branch in branches:
            branch.wait_stream(origin)
            with torch.cuda.stream(branch):
                results.append(call(*inputs, None, True))
        for branch in branches:
            origin.wait_stream(branch)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(_same(got, expected) for got in results)


def test_replays_run_beside_eager_calls_and_other_graphs(device):
    """Several graphs replay on streams of their own while eager calls go on: nobody takes another's tile counter."""
    graphs = [Captured(Case(900, 900, d, d, batch=2, heads_kv=6, causal=True, seed=d), device) for d in (64, 64, 128)]
    eager = Case(800, 800, 64, 64, batch=2, heads_kv=6, causal=True).inputs(device)
    expected = call(*eager, None, True)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    results = []
    for _ in range(30):
        for captured, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                captured.graph.replay()
        results.append(call(*eager, None, True))
    torch.cuda.synchronize()
    assert all(_same(got, expected) for got in results)
    for captured in graphs:
        captured.check()


def test_a_graph_outlives_many_eager_calls(device):
    """A captured launch keeps what it was captured with, however many launches come between two replays."""
    captured = Captured(Case(500, 500, 128, 128, heads_kv=4, causal=True), device)
    small = Case(64, 64, 64, 64).inputs(device)
    for _ in range(20_000):
        call(*small)
    captured.renew()
    captured.graph.replay()
    torch.cuda.synchronize()
    captured.check()


# ---- devices


def test_another_device_than_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = Case(300, 300, 128, 128, heads_kv=4, causal=True)
    for at in (1, 0, 1):
        inputs = case.inputs(f"cuda:{at}")
        check_tensors(inputs, call(*inputs, None, True), None, True)
        assert torch.cuda.current_device() == device.index
    mixed = case.inputs("cuda:0")[:2] + case.inputs("cuda:1")[2:]
    with pytest.raises(ValueError, match="device"):
        call(*mixed)
