"""Run one case, or a few small ones: `python -m tests.gpu.reproduce '{...}'`, `python -m tests.gpu.reproduce --small`.

The small ones are for slow tools: `compute-sanitizer --tool racecheck python -m tests.gpu.reproduce --small`, and
`--small-backward` for the gradients. After either may come the head dims to keep, as in `--small-backward 64,128`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from fa3.config.backward_table import BACKWARD
from fa3.config.table import FORWARD
from tests.gpu.cases import DTYPES, Case
from tests.gpu.checking import verdict
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import gradient_verdict

AnyCase = Case | GradientCase


def small_cases() -> list[Case]:
    """One case for each row of the table and dtype: two tiles and a rest each way, grouped heads, cut out of NaN."""
    return [
        Case(
            seqlen_q=row.tile_m + 9,
            seqlen_k=2 * row.tile_n + 9,
            head_dim=row.head_dim,
            head_dim_v=row.head_dim_v,
            batch=1,
            heads_kv=1,
            group=2,
            causal=row.causal,
            dtype=dtype,
            layouts=("packed", "cut", "cut"),
        )
        for row in FORWARD
        for dtype in sorted(DTYPES)
    ]


def small_gradient_cases() -> list[GradientCase]:
    """One case for each row of the backward's table, way of adding up dQ and dtype: two tiles and a rest each way, so
    that every ring goes around, grouped heads, gradients of both outputs."""
    return [
        GradientCase(
            Case(
                seqlen_q=2 * row.tile_m + 9,
                seqlen_k=2 * row.tile_n + 9,
                head_dim=row.head_dim,
                head_dim_v=row.head_dim_v,
                group=2,
                causal=row.causal,
                dtype=dtype,
                layouts=("packed", "cut", "cut"),
            ),
            do_layout="cut",
            incoming="both",
            deterministic=deterministic,
        )
        for row in BACKWARD
        for deterministic, dtype in ((False, "bf16"), (True, "fp16"))
    ]


def read(text: str) -> AnyCase:
    """The case of a reproducer's line."""
    return GradientCase.from_json(text) if '"case"' in text else Case.from_json(text)


def verdict_of(case: AnyCase, device: str = "cuda") -> str | None:
    return verdict(case, device) if isinstance(case, Case) else gradient_verdict(case, device)


def chosen(arguments: Sequence[str]) -> list[AnyCase]:
    """The cases that a command line names."""
    small = {"--small": small_cases, "--small-backward": small_gradient_cases}
    if arguments[0] not in small:
        return [read(arguments[0])]
    cases: list[AnyCase] = [*small[arguments[0]]()]
    if len(arguments) == 1:
        return cases
    kept = [int(dim) for dim in arguments[1].split(",")]
    return [each for each in cases if (each if isinstance(each, Case) else each.case).head_dim in kept]


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    wrong = 0
    for case in chosen(arguments):
        before = time.perf_counter()
        problem = verdict_of(case)
        seconds = time.perf_counter() - before
        print(f"{'right' if problem is None else problem}: {case}, {seconds:.1f} s", flush=True)
        wrong += problem is not None
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
