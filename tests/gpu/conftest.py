"""Every test in this folder needs the GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device(hopper: torch.device) -> torch.device:
    """The Hopper GPU, with torch's random numbers at a fixed start."""
    torch.manual_seed(0)
    return hopper
