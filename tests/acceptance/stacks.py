"""A real stack for the tests of a module, and what they ask of it and of its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import wait_until
from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Run
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.stack import operate, supervisor
from vla_platform.stack.roles import ROLES, Role, environment_roles
from vla_storage.checkpoint_types import MODULE

RANDOM = {"VLA_BASE_MODELS": "tiny=tiny-random"}
"""The base model with random weights: nothing to load, and nothing general to learn."""
WORKERS = tuple(role for role in ROLES if role.name in ("control", "sft", "gpu", "beat"))
"""Who does a run's work: all but those that watch."""


@dataclass(frozen=True)
class Stack:
    var: Path
    data: Path  # the datasets that specs may name
    admin: Operator

    def pid(self, role: str) -> int:
        pid = next(one.pid for one in operate.status(self.var) if one.role == role)
        assert pid is not None, role
        return pid

    def working(self, role: str, *, after: int | None = None, timeout_s: float = 60.0) -> int:
        """The pid of a role's process once it runs, and is another than `after`."""
        found: list[int] = []

        def runs() -> bool:
            one = next(one for one in operate.status(self.var) if one.role == role)
            found[:] = [one.pid] if one.pid not in (None, 0, after) else []
            return bool(found) and str(one.state) == "running"

        wait_until(runs, timeout_s)
        return found[0]

    def kill(self, role: str) -> int:
        """SIGKILL a role's process; returns the pid that it had."""
        pid = self.pid(role)
        psutil.Process(pid).kill()
        return pid

    def digests(self, tenant: str, run: Run) -> dict[str, str]:
        """SHA-256 of the objects of the run's newest checkpoint, which has to verify."""
        manifest = self.admin.checkpoints(tenant).verify(run.status().checkpoint or "")
        return {one.name: one.sha256 for one in manifest.objects}

    def module(self, tenant: str, run: Run) -> str:
        return self.digests(tenant, run)[MODULE]


@contextmanager
def started(
    folder: Path, *, environment: dict[str, str] | None = None, roles: Iterable[Role] = ROLES
) -> Iterator[Stack]:
    """`vla up` with its state in `folder` and specs that may name the datasets of `folder/data`."""
    var, data = folder / "var", folder / "data"
    data.mkdir(exist_ok=True)
    try:
        operate.up(
            var, roles=tuple(roles), environment={**os.environ, **(environment or {})},
            dataset_roots=str(data), timeout_s=240,
        )  # fmt: skip
        with operator(var) as admin:
            yield Stack(var, data, admin)
    finally:
        daemon = supervisor.daemon(var.resolve())
        if daemon is not None:
            daemon.kill()  # its data go with the folder: no need for the seconds of a warm stop
        operate.down(var)


def with_tabletop(folder: Path, roles: Iterable[Role] = ROLES) -> tuple[Role, ...]:
    """These and an environment host, for `started(folder)`."""
    return (*roles, *environment_roles(1, {"tabletop": 1.0}, folder / "var"))


def demonstrate(folder: Path, *, episodes: int) -> None:
    """The dataset `reach`."""
    make_demonstrations(folder / "data" / "reach", env=Tabletop(), episodes=episodes, seed=0)


def sft(policy: str, path: str = "reach", **changes: Any) -> dict[str, Any]:
    return {
        "kind": "sft",
        "policy": policy,
        "dataset": {"path": path, "heldout_samples": 8},
        "batch_size": 4,
        "checkpoint": {"every_steps": 10},
        **changes,
    }


def losses(run: Run) -> dict[int, float]:
    """By step, of what has taken effect."""
    return {event["step"]: event["loss"] for event in run.metrics() if event["kind"] == "step"}


def at_step(run: Run, step: int, *, kind: str = "step") -> None:
    """Wait for the event of that step."""
    for event in run.events():
        if event["kind"] == kind and event["step"] >= step:
            return
    raise AssertionError(f"{run.id} ended before its {kind} {step}")


def vla(var: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """The command line as a process; returns its exit status and what it printed."""
    done = subprocess.run(
        (sys.executable, "-m", "vla_platform.cli.main", *arguments),
        env={**os.environ, "VLA_VAR": str(var), **environment},
        stdout=subprocess.PIPE, text=True, check=False, timeout=400,
    )  # fmt: skip
    return done.returncode, done.stdout


def vla_json(var: Path, *arguments: str) -> tuple[int, Any]:
    rc, told = vla(var, *arguments, "--format", "json")
    return rc, json.loads(told)
