"""The real simulators' Python environments, made once and kept below `var/` of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_platform.envs.installs import RECIPES, install, installed
from vla_platform.errors import ConfigurationError

Play = Callable[..., Any]


def _unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def python_of(repository: Path) -> Callable[[str], Path]:
    """The interpreter of a harness; installs what is missing, drivers only where it is root."""
    found: dict[str, Path] = {}

    def python(harness: str) -> Path:
        if harness not in RECIPES:
            return Path(sys.executable)
        if harness not in found:
            var = repository / "var"
            is_root = os.geteuid() == 0 and Path("/usr/bin/apt-get").exists()
            try:
                found[harness] = install(
                    harness,
                    var,
                    say=print,
                    system_packages=is_root and installed(harness, var) is None,
                )
            except ConfigurationError as error:
                _unavailable(f"{harness} cannot be installed here: {error}")
        return found[harness]

    return python


@pytest.fixture(scope="session")
def play_in(python_of: Callable[[str], Path], single_threaded_environment: dict[str, str]) -> Play:
    """Run a script of this folder in a harness's interpreter; what it prints last is JSON."""

    def play(harness: str, script: str, *arguments: str, timeout_s: float = 280.0) -> Any:
        path = Path(__file__).parent / script
        done = subprocess.run(
            (str(python_of(harness)), str(path), *arguments),
            capture_output=True,
            text=True,
            env={**os.environ, **single_threaded_environment},
            timeout=timeout_s,
            check=False,
        )
        if done.returncode and "no usable Vulkan driver" in done.stderr:
            _unavailable(done.stderr[-500:])
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return play


@pytest.fixture(scope="session")
def single_threaded_environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
