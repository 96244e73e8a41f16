"""The pure part of `fa3.layouts` stands alone: it imports no DSL, no torch, no numpy, no matplotlib."""

import subprocess
import sys
from pathlib import Path

import fa3.layouts

ALONE = """
import sys, types
fa3 = types.ModuleType("fa3"); fa3.__path__ = [sys.argv[1]]; sys.modules["fa3"] = fa3
import fa3.layouts, fa3.layouts.draw
print(sorted({"cutlass", "torch", "numpy", "matplotlib"} & set(sys.modules)))
"""


def test_the_pure_part_imports_nothing_heavy():
    package = Path(fa3.layouts.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", ALONE, str(package)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_public_names_exist_and_are_sorted():
    names = fa3.layouts.__all__
    assert all(hasattr(fa3.layouts, name) for name in names)
    assert len(names) == len(set(names))
