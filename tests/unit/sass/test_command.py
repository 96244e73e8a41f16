"""The command line, the search for tools, and the checkout of another revision: no kernel is compiled here."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from fa3 import _arguments
from fa3.config.backward_table import backward_config
from fa3.config.table import forward_config
from fa3.sass import __main__ as command
from fa3.sass import diff, tools
from fa3.sass.errors import ToolError


def parsed(*words: str):
    return command.parser().parse_args(words)


def test_the_key_of_a_command_line():
    key = _arguments.key_of(
        parsed("forward", "--head-dim", "192", "--head-dim-v", "128", "--causal", "--dtype", "fp16")
    )
    assert (key.config, key.dtype) == (forward_config(192, 128, True), "fp16")


def test_the_key_of_a_backward():
    words = ["backward", "--head-dim", "256", "--causal", "--deterministic", "--set", "stages_q=1"]
    key = _arguments.key_of(parsed(*words))
    assert (key.part, key.dtype, key.deterministic, key.dlse) == ("backward", "bf16", True, False)
    assert key.config == replace(backward_config(256, 256, True), stages_q=1)
    prepare = _arguments.key_of(parsed("backward_prepare", "--head-dim", "64", "--dlse"))
    assert (prepare.part, prepare.dlse, prepare.config) == ("backward_prepare", True, backward_config(64, 64, False))


@pytest.mark.parametrize(
    "words", [["forward", "--deterministic"], ["backward", "--dlse"], ["backward_finish", "--deterministic"]]
)
def test_a_switch_of_another_kernel(words, capsys):
    assert command.main(words) == 1
    assert f"{words[1]} is for backward" in capsys.readouterr().err


def test_v_is_as_wide_as_k_unless_told():
    assert _arguments.key_of(parsed("forward", "--head-dim", "64")).config.head_dim_v == 64


def test_a_row_can_be_changed():
    config = _arguments.key_of(parsed("forward", "--set", "tile_n=64", "--set", "algorithm=plain")).config
    assert (config.tile_n, config.algorithm) == (64, "plain")


@pytest.mark.parametrize("setting", ["tile_x=3", "tile_n", "tile_n=wide", "causal=perhaps", "stages=-1"])
def test_a_setting_that_makes_no_sense(setting):
    with pytest.raises(ValueError, match=r"--set takes|does not fit"):
        _arguments.changed(forward_config(128, 128, False), setting)


def test_settings_keep_their_type():
    config = forward_config(128, 128, False)
    assert _arguments.changed(config, "causal=true").causal is True
    assert _arguments.changed(config, "stages=3").stages == 3


def test_the_other_revision_gets_the_same_question():
    words = ["forward", "--diff", "HEAD~1", "--head-dim", "64", "--json", "--plot=a.png", "--set", "stages=3"]
    assert command.without(words, "--diff", "--plot") == ["forward", "--head-dim", "64", "--set", "stages=3"]


@pytest.mark.parametrize("words", [["forward", "--set", "stages=4"], ["backward", "--set", "stages_q=4"]])
def test_a_row_that_no_sm_can_hold_is_not_compiled(words, capsys):
    assert command.main([*words, "--head-dim", "256"]) == 1
    assert "bytes" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["sideward"], ["forward", "--head-dim", "wide"], ["forward", "--dtype", "fp8"]])
def test_a_wrong_command_line_stops_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2 and "usage" in capsys.readouterr().err


def test_an_impossible_head_dim_is_one_line_of_error(capsys):
    assert command.main(["forward", "--head-dim", "7"]) == 1
    assert capsys.readouterr().err.startswith("fa3.sass: head_dim is 7")


def test_help_needs_neither_torch_nor_the_dsl():
    code = (
        "import runpy, sys; sys.argv = ['fa3.sass', '--help']\ntry: runpy.run_module('fa3.sass', run_name='__main__')"
    )
    code += "\nexcept SystemExit: pass\nassert not {'torch', 'cutlass', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- tools -----------------------------------------------------------------------------------------------------------


def test_a_wheel_comes_before_path(tmp_path, monkeypatch):
    for folder in (tmp_path / "site" / "nvidia" / "cu13" / "bin", tmp_path / "path"):
        folder.mkdir(parents=True)
        (folder / "nvdisasm").write_text("#!/bin/sh\n")
        (folder / "nvdisasm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert "site" in tools.find("nvdisasm", [str(tmp_path / "site")])
    assert "path" in tools.find("nvdisasm", [])


def test_a_missing_tool_names_the_extra_and_the_wheels(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolError, match=r'-e "\.\[sass\]".*nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump'):
        tools.find("cuobjdump", [])


def test_a_cubin_that_is_none_is_an_error_of_the_tool():
    with pytest.raises(ToolError, match="nvdisasm"):
        tools.disassemble(b"no cubin")


# --- revisions -------------------------------------------------------------------------------------------------------

FAKE = """import json, sys
print(json.dumps({"registers": VALUE, "asked": sys.argv[1:]}))
"""


@pytest.fixture(name="checkout")
def _checkout(tmp_path):
    """A git repository whose `fa3.sass` answers 1 in its first commit and 2 in its second."""
    package = tmp_path / "checkout" / "fa3" / "sass"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*words):
        identity = ["-c", "user.name=Reader", "-c", "user.email=reader@example.org"]
        subprocess.run(["git", *identity, *words], cwd=package, env=environment, check=True, capture_output=True)

    git("init", "-q", "-b", "main", str(tmp_path / "checkout"))
    for value in ("1", "2"):
        (package / "__main__.py").write_text(FAKE.replace("VALUE", value))
        git("add", "-A")
        git("commit", "-q", "-m", value)
    return package


def test_the_report_of_another_revision(checkout):
    found = diff.report_at("HEAD~1", ["forward", "--causal"], start=checkout)
    assert found == {"registers": 1, "asked": ["forward", "--causal", "--json"]}
    listed = subprocess.run(["git", "worktree", "list"], cwd=checkout, check=True, capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1, "the worktree is gone again"


def test_an_unknown_revision(checkout):
    with pytest.raises(ToolError, match="does not know the revision 'nowhere'"):
        diff.report_at("nowhere", [], start=checkout)


def test_a_revision_that_looks_like_an_option(checkout):
    with pytest.raises(ToolError, match="does not know"):
        diff.report_at("--upload-pack=x", [], start=checkout)


def test_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(ToolError, match="not in a git checkout"):
        diff.report_at("HEAD", [], start=tmp_path)


def test_a_revision_whose_report_fails(checkout):
    (checkout / "__main__.py").write_text("raise SystemExit('no such kernel then')")
    identity = ["-c", "user.name=Reader", "-c", "user.email=reader@example.org"]
    subprocess.run(["git", *identity, "commit", "-qam", "3"], cwd=checkout, check=True)
    with pytest.raises(ToolError, match=r"failed at HEAD: no such kernel then"):
        diff.report_at("HEAD", [], start=checkout)


def test_an_unknown_revision_is_refused_before_anything_is_compiled(checkout, monkeypatch, capsys):
    monkeypatch.setattr(command, "commit_of", lambda revision: diff.commit_of(revision, checkout))
    monkeypatch.setattr("fa3.sass.report.inspect", lambda key: pytest.fail("compiled"))
    assert command.main(["forward", "--diff", "nosuch"]) == 1
    assert "git does not know the revision 'nosuch'" in capsys.readouterr().err


def test_diff_as_json_is_one_object(monkeypatch, capsys):
    from tests.unit.sass.test_report import KERNEL, PTX, REMARKS, report, sass

    seen = report.read("forward", PTX, sass(*KERNEL), REMARKS, 1000)
    old = {**seen.as_dict(), "registers": 200}
    monkeypatch.setattr(report, "inspect", lambda key: seen)
    monkeypatch.setattr(command, "report_at", lambda revision, words: old)
    monkeypatch.setattr(command, "commit_of", lambda revision: None)
    assert command.main(["forward", "--diff", "main", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["changes"] == [["registers", "200", "168"]] and printed["report"]["registers"] == 168
    assert command.main(["forward", "--diff", "main"]) == 0
    assert "registers" in capsys.readouterr().out
