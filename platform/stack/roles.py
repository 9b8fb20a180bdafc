"""Which processes make up the platform on one machine, as data.

Servers come first; every worker role waits for their ports and may then start in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from vla_platform.broker import environment_queues
from vla_platform.control.environment_hosts import split_budget
from vla_platform.envs.installs import interpreter_for

APP = "vla_platform.app:app"
SERVERS = ("redis-control", "redis-payload", "s3")

# Two cores are shared by everything: spinning threads only take time from each other.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}


MOST_FLOWER_TASKS = 10_000
"""That Flower keeps in memory; the ledger keeps what matters."""


class Ready(StrEnum):
    """How `up` learns that a role works."""

    FILE = "file"
    """The process creates the file that `VLA_READY_FILE` names (see `readiness.py`)."""
    HTTP = "http"
    """The role's port answers `/healthcheck` with 200."""
    TCP = "tcp"
    """The role's port accepts connections."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """One process of the platform.

    `command` gets the role's own environment, from which it may take addresses.
    """

    name: str
    command: Callable[[dict[str, str]], tuple[str, ...]]
    ready: Ready = Ready.FILE
    stop_s: float = 20.0  # grace between SIGTERM and SIGKILL
    port: bool = False  # whether it listens; the number comes as VLA_PORT
    environment: dict[str, str] = field(default_factory=dict)


def _celery(*arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    return (python, "-m", "celery", "-A", APP, *arguments)


def _worker(name: str, queues: str, *, concurrency: int, stop_s: float = 20.0) -> Role:
    return Role(
        name=name,
        stop_s=stop_s,
        # Threads keep the process answering `inspect` and Flower during long steps.
        command=lambda _: _celery(
            *("worker", "--queues", queues, "--hostname", f"{name}@%h"),
            *("--pool", "threads", "--concurrency", str(concurrency)),
            *("--loglevel", "INFO", "--without-mingle"),
        ),
    )


def _flower(environment: dict[str, str]) -> tuple[str, ...]:
    # The password comes as FLOWER_BASIC_AUTH, not on the command line that every user can list.
    where = ("--address=127.0.0.1", f"--port={environment['VLA_PORT']}")
    return _celery("flower", *where, f"--max-tasks={MOST_FLOWER_TASKS}")


def _beat(name: str) -> Role:
    scheduler = ("-S", "vla_platform.control.beat.Scheduler")
    return Role(
        name=name,
        stop_s=5.0,  # one that waits for the lock has nothing to finish
        command=lambda _: _celery("beat", *scheduler, "--loglevel", "INFO", "--pidfile="),
    )


_WATCHERS = (
    Role(name="flower", command=_flower, ready=Ready.HTTP, port=True),
    Role(
        name="page",
        command=lambda _: (sys.executable, "-m", "vla_platform.operators.page"),
        ready=Ready.HTTP,
        port=True,
    ),
    Role(
        name="metrics",
        command=lambda _: (sys.executable, "-m", "vla_platform.metrics.collector"),
        ready=Ready.TCP,
        port=True,
    ),
)

ROLES: tuple[Role, ...] = (
    _worker("control", "control", concurrency=4),
    _worker("sft", "sft,graders,advantages,audit", concurrency=8),
    _worker("gpu", "training", concurrency=1, stop_s=45.0),
    _beat("beat"),
    *_WATCHERS,
)
"""As few processes as do everything: for one machine."""

CLUSTER_LIKE: tuple[Role, ...] = (
    *(_worker(f"control-{number}", "control", concurrency=4) for number in (1, 2)),
    _worker("sft", "sft", concurrency=8),
    _worker("graders", "graders", concurrency=2),
    _worker("advantages", "advantages", concurrency=2),
    _worker("audit", "audit", concurrency=1),
    *(_worker(f"gpu-{number}", "training", concurrency=1, stop_s=45.0) for number in (1, 2)),
    *(_beat(f"beat-{number}") for number in (1, 2)),
    *_WATCHERS,
)
"""A process per duty and two of what must not be missing, as a cluster has them."""


class Profile(StrEnum):
    LAPTOP = "laptop"
    CLUSTER_LIKE = "cluster-like"

    @property
    def roles(self) -> tuple[Role, ...]:
        return ROLES if self is Profile.LAPTOP else CLUSTER_LIKE

    @property
    def hosts_per_harness(self) -> int:
        return 1 if self is Profile.LAPTOP else 2


HOST_CONCURRENCY = 4
"""Rollouts and evaluations at once in one environment host."""


def environment_roles(budget: int, shares: Mapping[str, float], var: Path) -> tuple[Role, ...]:
    """`budget` environment hosts, split by share; each runs in its harness's interpreter.

    Raises `ConfigurationError` for a harness that is not installed.
    """
    return tuple(
        _environment_host(harness, f"env-{harness}-{number}", str(interpreter_for(harness, var)))
        for harness, count in split_budget(budget, shares).items()
        for number in range(1, count + 1)
    )


def _environment_host(harness: str, name: str, python: str) -> Role:
    queues = ",".join(environment_queues(harness))
    return Role(
        name=name,
        stop_s=30.0,
        environment={"VLA_HARNESS": harness},
        command=lambda _: _celery(
            *("worker", "--queues", queues, "--hostname", f"{name}@%h"),
            *("--pool", "threads", "--concurrency", str(HOST_CONCURRENCY)),
            *("--loglevel", "INFO", "--without-mingle"),
            python=python,
        ),
    )
