"""The package as a user meets it: the cost of `import fa3`, the content of the wheel, the truth of the README."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fa3
from fa3.errors import DSL_RANGE

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "cutlass", "tvm_ffi", "cuda", "numpy")


def python(program: str, **environment: str) -> str:
    """What a fresh interpreter prints when it runs `program` with no GPU in sight."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tracked_files() -> list[Path]:
    """The files that git has or would take, as paths that exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_importing_fa3_imports_nothing_heavy():
    program = f"import sys, fa3; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(program) == "[]"


def test_the_public_names_need_neither_a_gpu_nor_the_dsl():
    program = "import sys, fa3; fa3.flash_attn_func, fa3.warmup, fa3.explain; print('cutlass' in sys.modules)"
    assert python(program) == "False"


def test_importing_the_api_does_not_initialise_cuda():
    assert python("import fa3; fa3.flash_attn_func; import torch; print(torch.cuda.is_initialized())") == "False"


def test_the_reference_is_an_attribute_that_costs_nothing_until_used():
    program = "import sys, fa3; before = 'torch' in sys.modules; print(before, fa3.reference.attention.__name__)"
    assert python(program) == "False attention"


def test_public_names_are_documented_and_listed():
    assert set(fa3.__all__) <= set(dir(fa3))
    for name in set(fa3.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(fa3, name)), f"fa3.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'flash_attn_fun'"):
        fa3.flash_attn_fun  # noqa: B018


def test_the_version_is_written_once():
    literal = re.compile(rf"version.*[\"']{re.escape(fa3.__version__)}[\"']")
    holders = {
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix in {".py", ".toml"} and literal.search(path.read_text())
    }
    assert holders == {"fa3/_version.py"}
    assert f"[{fa3.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project's wheel, built with the backend that is installed here, so without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_pure_python(wheel):
    assert wheel.name == f"fa3-{fa3.__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if ".dist-info/" not in name}
    sources = {p.relative_to(ROOT).as_posix() for kind in ("*.py", "*.c") for p in (ROOT / "fa3").rglob(kind)}
    assert package == sources | {"fa3/py.typed"}
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_readme_example_is_true_up_to_the_gpu():
    """The block parses, imports what exists, and calls public functions with arguments they have."""
    block, _ = readme_blocks("python")
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    ours = [c for c in calls if isinstance(c.func, ast.Attribute) and getattr(c.func.value, "id", "") == "fa3"]
    assert ours
    for call in ours:
        signature = inspect.signature(getattr(fa3, call.func.attr))
        signature.bind(*call.args, **{word.arg: None for word in call.keywords})


def test_the_readme_example_for_a_laptop_runs():
    _, block = readme_blocks("python")
    assert python(block + "print(*out.shape, *lse.shape)") == "2 256 4 64 2 4 256"


def test_the_readme_names_only_make_targets_and_files_that_exist():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_names_only_files_that_exist(page):
    """Links, and paths in backticks that begin with a top folder of the project."""
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    paths = [ROOT / path for path in re.findall(r"`((?:fa3|tests|benchmarks|examples|docs)/[\w./-]+)`", text)]
    assert [str(path) for path in links + paths if not path.exists()] == []


def test_the_rules_name_tests_that_exist():
    """`test_...` in backticks in docs/dsl_rules.md is a function of tests/compile."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "dsl_rules.md").read_text()))
    found = {
        f for path in (ROOT / "tests" / "compile").glob("*.py") for f in re.findall(r"def (\w+)", path.read_text())
    }
    assert named - found == set()


def test_tool_versions_agree():
    """ruff as pre-commit runs it is ruff as `make test` runs it."""
    pinned = re.search(r'"(ruff==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned
    hooks = re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(hooks) == {pinned.group(1)}


def test_the_dsl_range_is_the_same_everywhere():
    """The range that the package checks when it meets the DSL is the one that it asks pip for."""
    requirements = re.findall(r'"nvidia-cutlass-dsl(?:\[cu13\])?([^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert set(requirements) == {DSL_RANGE}


A_HOME = re.compile(r"(?<![\w.])/(?:(?:home|Users)/(?!reader\b)\w|root/)")
"""An absolute path of a developer's machine. The examples in tests belong to /home/reader, who is nobody."""


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if A_HOME.search(line)]
    assert found == []


def test_a_path_of_one_machine_is_recognised():
    assert all(A_HOME.search(f"open('/{top}/me/kernel.py')") for top in ("home", "Users", "root"))
    assert not any(map(A_HOME.search, ("/home/reader/kernel.py", "docs/home/index.md", "example.org/root/a")))


def test_the_rules_without_a_test_say_so():
    """Every rule of docs/dsl_rules.md names its test, or says that it has none."""
    text = (ROOT / "docs" / "dsl_rules.md").read_text()
    rules = re.split(r"^(?=\*\*\d+\. |## )", text, flags=re.M)
    silent = [rule.splitlines()[0] for rule in rules if rule.startswith("**") and "*Test:*" not in rule]
    assert silent == []
