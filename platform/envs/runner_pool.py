"""Where a host's sessions run: threads of its own, child processes that some share, or one each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from vla_platform.envs.failures import Failure
from vla_platform.envs.processes import ChildProcess, ProcessRunner
from vla_platform.envs.runners import Runner, SessionThread

FATAL = 1.5
"""Times the memory limit: above, a process is not waited for."""


class Isolation(StrEnum):
    """Where the simulator of a session runs."""

    THREAD = "thread"
    """On a thread of the host: cheapest, for simulators that stay alive."""
    SHARED = "shared"
    """In one of the host's child processes, several sessions each: uses all cores."""
    PROCESS = "process"
    """In a child process of its own: for what is not trusted to stay alive."""

    def at_least(self, floor: Isolation) -> Isolation:
        """This one, or the floor where that separates more."""
        order = list(Isolation)
        return max(self, floor, key=order.index)


class RunnerPool:
    """At most `processes` children are shared. `in_use` tells the runners of all sessions."""

    def __init__(
        self,
        *,
        processes: int,
        memory_bytes: int,
        in_use: Callable[[], Iterable[Runner]],
        plugins: Sequence[str] = (),
    ) -> None:
        self._processes = processes
        self._memory_bytes = memory_bytes
        self._in_use = in_use
        self._plugins = tuple(plugins)
        self._shared: list[ChildProcess] = []

    def new(self, isolation: Isolation) -> Runner:
        if isolation is Isolation.THREAD:
            return SessionThread(secrets.token_hex(4))
        if isolation is Isolation.PROCESS:
            return ProcessRunner(ChildProcess(self._plugins), "0", alone=True)
        fit = [child for child in self._shared if child.alive and not child.worn]
        if len(fit) < self._processes:
            fit.append(ChildProcess(self._plugins))
            self._shared.append(fit[-1])
        child = min(fit, key=self._used().count)
        return ProcessRunner(child, secrets.token_hex(4), alone=False)

    def tidy(self) -> None:
        """End processes that grow without bounds. A shared one that is worn or too large gets no
        more sessions, and goes with its last one."""
        used = self._used()
        for child in used:
            if child not in self._shared and child.memory_bytes > FATAL * self._memory_bytes:
                child.kill(Failure.OUT_OF_MEMORY)
        for child in list(self._shared):
            size = child.memory_bytes
            child.worn = child.worn or size > self._memory_bytes
            if size > FATAL * self._memory_bytes:
                child.kill(Failure.OUT_OF_MEMORY)
            if (child.worn and child not in used) or not child.alive:
                child.kill()
                self._shared.remove(child)

    def kill(self) -> None:
        """The shared ones; the others go with their sessions."""
        for child in self._shared:
            child.kill()

    def _used(self) -> list[ChildProcess]:
        """The process of each session that has one."""
        return [runner.child for runner in self._in_use() if isinstance(runner, ProcessRunner)]
