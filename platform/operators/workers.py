"""Workers as Celery sees them: who is there, what each does, and taking one out of service.

Draining cancels a worker's queues, so it finishes what it has and takes no more; its leases end by
themselves. A GPU worker goes on answering predictions until it is restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery

from vla_platform.broker import INGRESS_PREFIX, queue
from vla_platform.errors import NotFoundError, UnavailableError

DRAINED_KEY = "vla:drained"
"""hash: worker -> its queues, to be given back."""


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    name: str  # such as gpu@host
    state: str  # online | drained
    pid: int
    pool: str
    queues: tuple[str, ...]
    active: tuple[str, ...]  # tasks under way
    done: int  # tasks since its start


class Workers:
    """The workers behind one broker. `timeout_s` is how long answers are waited for."""

    def __init__(self, url: str, client: Any, *, timeout_s: float = 2.0) -> None:
        self._app = Celery("operator", broker=url, set_as_current=False)
        self._app.conf.update(
            accept_content=["json"], task_serializer="json", broker_connection_max_retries=1
        )
        self._client = client
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._app.close()

    def rows(self) -> list[WorkerRow]:
        """Who answers, by name. Raises `UnavailableError` where nobody does."""
        names = self._names()
        # With names, an answer of each ends the wait.
        inspect = self._app.control.inspect(names, timeout=self._timeout_s)
        stats = (inspect.stats() or {}) if names else {}
        if not stats:
            raise UnavailableError("no worker answers; is the stack up? (`vla status`)")
        queues, active = inspect.active_queues() or {}, inspect.active() or {}
        drained = self._client.hkeys(DRAINED_KEY)
        return [
            WorkerRow(
                name=name,
                state="drained" if name in drained and not queues.get(name) else "online",
                pid=int(found["pid"]),
                pool=str(found["pool"]["implementation"]).rpartition(":")[2],
                queues=tuple(sorted(_brief(one["name"] for one in queues.get(name) or ()))),
                active=tuple(sorted(task["name"] for task in active.get(name) or ())),
                done=sum(found["total"].values()),
            )
            for name, found in sorted(stats.items())
        ]

    def drain(self, name: str) -> list[str]:
        """Take no more tasks; returns the queues it leaves. Safe to repeat."""
        worker = self._find(name)
        found = self._app.control.inspect([worker], timeout=self._timeout_s).active_queues() or {}
        queues = [
            str(one["name"])
            for one in found.get(worker, ())
            # A control worker that leaves a tenant's queue takes it up again by itself.
            if not str(one["name"]).startswith(INGRESS_PREFIX)
        ]
        if queues:
            self._client.hset(DRAINED_KEY, worker, ",".join(queues))
        for one in queues:
            self._app.control.cancel_consumer(
                one, destination=[worker], reply=True, timeout=self._timeout_s
            )
        return queues

    def undrain(self, name: str) -> list[str]:
        """Take tasks again; returns its queues. Safe to repeat."""
        worker = self._find(name)
        queues = (self._client.hget(DRAINED_KEY, worker) or "").split(",")
        taken = [one for one in queues if one]
        for one in taken:
            known = queue(one)
            self._app.control.add_consumer(
                one, exchange=known.exchange.name, exchange_type="direct", routing_key=one,
                destination=[worker], reply=True, timeout=self._timeout_s,
            )  # fmt: skip
        self._client.hdel(DRAINED_KEY, worker)
        return taken

    def is_idle(self, name: str) -> bool:
        """Whether it answers and has no task."""
        worker = self._find(name)
        active = self._app.control.inspect([worker], timeout=self._timeout_s).active() or {}
        return worker in active and not active[worker]

    def forget(self, name: str) -> None:
        """A restarted worker takes its queues by itself."""
        for known in self._client.hkeys(DRAINED_KEY):
            if known.partition("@")[0] == name:
                self._client.hdel(DRAINED_KEY, known)

    def _names(self) -> list[str]:
        answers: Sequence[dict[str, Any]] = self._app.control.ping(timeout=self._timeout_s)
        return sorted(worker for answer in answers for worker in answer)

    def _find(self, name: str) -> str:
        """`gpu` for `gpu@host`. Raises `NotFoundError`."""
        names = [name] if "@" in name else self._names()
        found = [one for one in names if name in (one, one.partition("@")[0])]
        if len(found) != 1:
            raise NotFoundError(
                f"no worker {name[:80]!r} answers; there are {', '.join(names) or 'none'}",
                worker=name[:80],
            )
        return found[0]


def _brief(names: Any) -> set[str]:
    """Ingress queues of many tenants as one."""
    return {f"{INGRESS_PREFIX}*" if name.startswith(INGRESS_PREFIX) else name for name in names}
