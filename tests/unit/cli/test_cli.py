"""The `vla` command: help, checks before anything is sent, errors as one line and a status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vla_platform.cli.main import app

GOOD = "kind: sft\npolicy: pick\nsteps: 10\ndataset: {path: demos}\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vla_platform.cli.main", *arguments]
    wide = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=wide)


@pytest.mark.parametrize("words", [[], ["runs"], ["checkpoints"], ["tenants"], ["check"], ["up"]])
def test_help_teaches(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_every_command_with_a_state_folder_finds_it_in_the_environment() -> None:
    found = []
    waiting: list[Any] = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for option in command.params:
            if option.name == "var":
                found.append((command.name, option.envvar, option.opts))
    assert len(found) > 10
    assert {("VLA_VAR", ("--var",))} == {(envvar, tuple(opts)) for _, envvar, opts in found}


def test_check_prints_the_effective_spec(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD)
    shown = CliRunner().invoke(app, ["check", str(file), "--print-config"])
    assert shown.exit_code == 0
    assert json.loads(shown.output)["batch_size"] == 8
    schema = json.loads(CliRunner().invoke(app, ["check", "--schema"]).output)
    assert set(schema["discriminator"]["mapping"]) == {"sft", "rl"}


def test_a_wrong_spec_is_one_line_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(GOOD + "batch_sise: 4\n")
    done = run("check", str(file))
    assert done.returncode == 2
    assert "did you mean 'batch_size'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "VLA_URL" in run("runs", "list").stderr
    assert "vla up" in run("tenants", "list", "--var", str(tmp_path / "none")).stderr
    done = run("check", str(tmp_path / "none.yaml"))
    assert (done.returncode, "No such file" in done.stderr) == (2, True)
    (tmp_path / "latin.yaml").write_bytes(b"kind: \xff")
    done = run("check", str(tmp_path / "latin.yaml"))
    assert (done.returncode, "not UTF-8" in done.stderr) == (2, True)
    for port in ("abc", "99999"):
        done = run("runs", "list", "--url", f"vla://a:b@127.0.0.1:{port}/0?bucket=x")
        assert (done.returncode, "not a URL" in done.stderr) == (2, True)
    done = run("runs", "list", "--url", "vla://a:b@127.0.0.1:1/0?bucket=x")
    assert (done.returncode, "does not answer" in done.stderr) == (1, True)
    for command in ("status", "down"):
        done = run(command, "--var", str(tmp_path / "none"))
        assert (done.returncode, "no stack in" in done.stderr) == (1, True)
    done = run("up", "--dataset-root", str(tmp_path / "none"))
    assert (done.returncode, "does not exist" in done.stderr) == (2, True)
