"""Run one case, or a few small ones: `python -m tests.gpu.reproduce '{...}'`, `python -m tests.gpu.reproduce --small`.

The small ones are for slow tools: `compute-sanitizer --tool racecheck python -m tests.gpu.reproduce --small`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fa3.config.table import FORWARD
from tests.gpu.cases import DTYPES, Case
from tests.gpu.checking import verdict


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


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    cases = small_cases() if arguments[0] == "--small" else [Case.from_json(arguments[0])]
    wrong = 0
    for case in cases:
        problem = verdict(case, "cuda")
        print(f"{'right' if problem is None else problem}: {case}", flush=True)
        wrong += problem is not None
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
