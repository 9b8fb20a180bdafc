"""Hosts and the faulty harness for the tests of environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_platform.envs.harnesses import HARNESSES, load_plugins
from vla_platform.envs.host import EnvironmentHost, HostLimits
from vla_platform.envs.sessions import EnvironmentRequest

PLUGIN = "faulty_harness:HARNESS"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The faulty harness, importable here and in child processes."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)
    load_plugins([PLUGIN])
    yield PLUGIN
    del HARNESSES["faulty"]


@pytest.fixture
def make_host(plugin: str) -> Iterator[Callable[..., EnvironmentHost]]:
    """Hosts with the faulty harness, shut down at the end."""
    with contextlib.ExitStack() as stack:

        def make(**limits: Any) -> EnvironmentHost:
            host = EnvironmentHost(HostLimits(**limits), plugins=[plugin])
            stack.callback(host.shut_down)
            return host

        yield make


@pytest.fixture
def faulty() -> Callable[..., EnvironmentRequest]:
    def request(fault: str = "none", **options: Any) -> EnvironmentRequest:
        return EnvironmentRequest(
            env_id="faulty/one", options={"fault": fault, **options}, expert=True
        )

    return request


@pytest.fixture
def one_action() -> Any:
    return np.zeros((1, 1), np.float32)
