"""The DSL asks for its target when it is imported, so this comes before any test module here imports it."""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
