"""The providers of a benchmark run: which are here, checked for one problem, and put into comparable calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.problems import Problem
from fa3 import _providers
from fa3._accuracy import Errors, Slice, float64_slice
from fa3._providers import Provider
from fa3._timing import Call, input_sets, rotating

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Candidates:
    """What is left to time for one problem, and what the check against float64 said about everyone."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, Errors] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Provider -> why it is not timed: it refused the problem, it failed, or its numerics are wrong."""


def select(only: Iterable[str] | None) -> list[Provider]:
    """The providers that import, after a line about each that does not."""
    found, missing = _providers.find(only)
    for name, reason in missing.items():
        print(f"# {name} is not here: {reason}")
    return found


def candidates(problem: Problem, providers: Sequence[Provider], device: str = "cuda") -> Candidates:
    """Run every provider once, compare it with float64, and keep as calls only those that are right."""
    sets = [problem.inputs(seed, device) for seed in range(input_sets(problem.input_bytes))]
    reference = float64_slice(*sets[0], problem.causal)
    result = Candidates()
    for provider in providers:
        try:
            errors = _errors(provider, sets[0], problem.causal, reference)
        except Exception as error:  # a foreign library may refuse or fail in any way; the others still count
            result.failures[provider.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        result.errors[provider.name] = errors
        refusal = errors.refusal(problem.torch_dtype)
        if refusal is not None:
            result.failures[provider.name] = f"wrong numerics: {refusal}"
            continue
        result.calls[provider.name] = _call(provider, sets, problem.causal)
    return result


def _errors(provider: Provider, inputs: Inputs, causal: bool, reference: Slice) -> Errors:
    if provider.forward_lse is None:
        return reference.errors(provider.forward(*inputs, causal))
    return reference.errors(*provider.forward_lse(*inputs, causal))


def _call(provider: Provider, sets: Sequence[Inputs], causal: bool) -> Call:
    return rotating(lambda q, k, v: provider.forward(q, k, v, causal), sets)
