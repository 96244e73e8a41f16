"""The providers of a benchmark run: which are here, checked for one problem, and put into comparable calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.problems import Problem
from fa3 import _providers
from fa3._accuracy import Errors, GradientErrors, Slice, float64_gradients, float64_slice
from fa3._providers import Attention, Provider
from fa3._timing import Call, input_sets, rotating

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, ...]

DETERMINISTIC = " deterministic"
"""Ends the name of a candidate that is its provider's deterministic mode."""


@dataclass
class Candidates:
    """What is left to time for one problem, and what the check against float64 said about everyone."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, Errors | GradientErrors] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Provider -> why it is not timed: it refused the problem, it failed, or its numerics are wrong."""

    def judge(self, name: str, problem: Problem, errors: Errors | GradientErrors, call: Call) -> None:
        """Record the errors, and the call if they allow it."""
        self.errors[name] = errors
        refusal = errors.refusal(problem.torch_dtype)
        if refusal is None:
            self.calls[name] = call
        else:
            self.failures[name] = f"wrong numerics: {refusal}"


def select(only: Iterable[str] | None) -> list[Provider]:
    """The providers that import, after a line about each that does not."""
    found, missing = _providers.find(only)
    for name, reason in missing.items():
        print(f"# {name} is not here: {reason}")
    return found


def candidates(problem: Problem, providers: Sequence[Provider], device: str = "cuda") -> Candidates:
    """Run every provider once, compare it with float64, and keep as calls only those that are right."""
    return _backward(problem, providers, device) if problem.mode == "bwd" else _forward(problem, providers, device)


def _forward(problem: Problem, providers: Sequence[Provider], device: str) -> Candidates:
    sets = [problem.inputs(seed, device) for seed in range(input_sets(problem.input_bytes))]
    reference = float64_slice(*sets[0], problem.causal)
    result = Candidates()
    for provider in providers:
        try:
            errors = _errors(provider, sets[0], problem.causal, reference)
        except Exception as error:  # a foreign library may refuse or fail in any way; the others still count
            result.failures[provider.name] = reason(error)
            continue
        result.judge(provider.name, problem, errors, _call(provider, sets, problem.causal))
    return result


def _backward(problem: Problem, providers: Sequence[Provider], device: str) -> Candidates:
    """The forward is run once for each candidate; a call is its backward alone, over a graph that is kept."""
    inputs = [x.requires_grad_() for x in problem.inputs(device=device)]
    do = problem.output_gradient(device=device)
    q, k, v = inputs
    reference = float64_gradients(q, k, v, do, problem.causal)
    result = Candidates()
    for name, attention in _differentiable(problem, providers).items():
        try:
            call = _backward_call(attention(q, k, v, problem.causal), inputs, do)
            errors = reference.errors(*call(0))
        except Exception as error:  # as above
            result.failures[name] = reason(error)
            continue
        result.judge(name, problem, errors, call)
    return result


def _differentiable(problem: Problem, providers: Sequence[Provider]) -> dict[str, Attention]:
    """Candidate -> its forward. The deterministic modes only where the problem wants them."""
    able = [provider for provider in providers if provider.differentiable]
    found = {provider.name: provider.forward for provider in able}
    if problem.also_deterministic:
        found |= {p.name + DETERMINISTIC: p.deterministic for p in able if p.deterministic is not None}
    return found


def _backward_call(out: torch.Tensor, inputs: Sequence[torch.Tensor], do: torch.Tensor) -> Callable[[int], Gradients]:
    return lambda _: torch.autograd.grad(out, inputs, do, retain_graph=True)


def reason(error: Exception) -> str:
    """One line about an exception, for a result file."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _errors(provider: Provider, inputs: Inputs, causal: bool, reference: Slice) -> Errors:
    if provider.forward_lse is None:
        return reference.errors(provider.forward(*inputs, causal))
    return reference.errors(*provider.forward_lse(*inputs, causal))


def _call(provider: Provider, sets: Sequence[Inputs], causal: bool) -> Call:
    return rotating(lambda q, k, v: provider.forward(q, k, v, causal), sets)
