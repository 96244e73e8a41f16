"""What all tests share: the hypothesis profiles, and the reason why this machine cannot run the GPU tests."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read by the DSL when a first test imports it

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests also run in a tree that is not installed

from fa3._hardware import why_no_hopper

ROOT = Path(__file__).resolve().parents[1]

GPU_EXAMPLES = int(os.environ.get("FA3_GPU_EXAMPLES", "300"))
"""Random problems of the numerics test. One takes about 20 ms on an H200 once its kernel is compiled."""
GPU_SEED = int(os.environ.setdefault("FA3_GPU_SEED", str(random.SystemRandom().randrange(1 << 31))))
"""Where the random problems start; another one each time, printed at the top of the run, and one for all
processes of a run."""

# Speed differs between machines: no deadline anywhere. On the CPU the same examples every time, so that a change of
# the code is the only thing that can turn a test red. On the GPU fresh ones: their seed is printed, and each failure
# prints a line that repeats it. Shrinking launches many kernels for little; the cases are small to begin with.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "gpu",
    deadline=None,
    database=None,
    max_examples=GPU_EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    verbosity=Verbosity.normal,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def hopper() -> torch.device:
    """The Hopper GPU under test. Skips the test on other machines, with the reason."""
    reason = why_no_hopper()
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


def pytest_report_header(config: pytest.Config) -> str:
    reason = why_no_hopper()
    if reason is not None:
        return f"fa3: GPU tests skipped: {reason}"
    return f"fa3: {torch.cuda.get_device_name()}, FA3_GPU_SEED={GPU_SEED} FA3_GPU_EXAMPLES={GPU_EXAMPLES}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ROOT / "tests" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
