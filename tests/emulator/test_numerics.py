"""Every row of the table on the emulator: the numbers of the compiled kernels, on a machine without a GPU.

The cases, the oracle and its bounds are those of the GPU tests (`tests.gpu.checking`).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import fa3
from fa3.config.table import FORWARD
from fa3.config.types import ForwardConfig
from tests.gpu.cases import Case
from tests.gpu.checking import verdict
from tests.gpu.strategies import cases

POLICIES = ("early", "late", "random", "starve:0-0", "starve:4-7")


def name(row: ForwardConfig) -> str:
    return f"d{row.head_dim}v{row.head_dim_v}-{'causal' if row.causal else 'full'}"


def of_row(row: ForwardConfig, seqlen_q: int, seqlen_k: int, **more: object) -> Case:
    return Case(seqlen_q, seqlen_k, row.head_dim, row.head_dim_v, causal=row.causal, **more)  # type: ignore[arg-type]


def check(case: Case, policy: str = "random", sms: int = 2) -> None:
    with fa3.emulate(policy=policy, sms=sms) as emulation:
        problem = verdict(case, "cpu")
    assert problem is None, f"{problem}\n  {case}, policy {policy}, {sms} SMs"
    assert len(emulation.runs) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row", FORWARD, ids=name)
class TestEveryRow:
    def test_tails_and_grouped_heads(self, row: ForwardConfig, dtype: str) -> None:
        """Both lengths end inside a tile, the rings go around, and one CTA gets several tiles."""
        case = of_row(
            row, row.tile_m + 24, 3 * row.tile_n + 8, group=2, dtype=dtype, layouts=("cut", "packed", "narrow")
        )
        check(case, sms=1)

    def test_more_queries_than_keys(self, row: ForwardConfig, dtype: str) -> None:
        """With a causal mask the first rows, among them whole tiles, see no key."""
        check(of_row(row, 2 * row.tile_m + 8, row.tile_n - 8, dtype=dtype))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("row", [row for row in FORWARD if row.head_dim == 64], ids=name)
def test_every_policy(row: ForwardConfig, policy: str) -> None:
    check(of_row(row, row.tile_m + 1, 2 * row.tile_n + 1, heads_kv=2), policy, sms=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_other_scales(scale: float, causal: bool) -> None:
    check(Case(70, 150, 64, 64, causal=causal, scale=scale))


@settings(max_examples=20)
@given(case=cases(longest=300))
def test_random_problems(case: Case) -> None:
    """Any widths, lengths, heads and layouts that the GPU tests draw, as far as they are small."""
    with fa3.emulate(sms=3):
        assert verdict(case, "cpu") is None, case
