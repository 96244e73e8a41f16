"""Tests that need a Hopper GPU: `python -m pytest tests/gpu`. Elsewhere they are skipped, with the reason printed."""
