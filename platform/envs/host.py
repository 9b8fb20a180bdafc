"""The environment host: sessions of many tenants in one process.

One asyncio loop keeps the books; simulators run on threads, one per session, or in child
processes. Whatever a simulator does, raise, hang, crash or leak, costs its own session only: the
environment is made anew at the next reset, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import EnvironmentInfo, Observation
from vla_platform.envs.batches import Batch, BlockingBatch
from vla_platform.envs.failures import Failure
from vla_platform.envs.harnesses import check_request
from vla_platform.envs.parking import Parking
from vla_platform.envs.processes import ProcessRunner, resident_bytes
from vla_platform.envs.runner_pool import Isolation, RunnerPool
from vla_platform.envs.runners import Call, Op, Runner
from vla_platform.envs.sessions import EnvironmentRequest, Outcome
from vla_platform.errors import NotFoundError, QuotaError, SimulatorError, UnavailableError
from vla_storage.errors import CodedError

T = TypeVar("T")
Actions = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """What a host gives to sessions and expects of them."""

    max_sessions: int = 64
    max_per_tenant: int = 32
    open_s: float = 180.0
    reset_s: float = 120.0
    step_s: float = 60.0  # for a whole chunk
    close_s: float = 10.0
    lease_s: float = 120.0  # a session without a call for so long is closed
    max_rebuilds: int = 3  # per session, after failures
    memory_bytes: int = 4 << 30  # of a child process, or of the host; recycled above
    processes: int = 2  # children for `shared`
    isolation: Isolation = Isolation.THREAD  # of every session at least
    parked_s: float = 60.0  # how long what was slow to make waits for its next use
    slow_s: float = 0.05  # to make: less is made anew each time


@dataclass
class _Hosted:
    """A session as the host keeps it."""

    id: str
    tenant: str
    request: EnvironmentRequest
    isolation: Isolation
    runner: Runner
    remote: bool = False  # the tenant drives it
    info: EnvironmentInfo | None = None
    made_in_s: float = 0.0
    rebuilds: int = 0
    recycled: int = 0
    broken: SimulatorError | None = None
    last_used: float = field(default_factory=time.monotonic)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class _Asked:
    """A call of a session that is about to be made."""

    session: _Hosted
    op: Op
    arguments: Mapping[str, Any]


class EnvironmentHost:
    """Thread-safe from outside through `call`; its coroutines belong to its own loop.

    Every call names the tenant; another tenant's session is not found, like an unknown one.
    """

    def __init__(self, limits: HostLimits | None = None, *, plugins: Sequence[str] = ()) -> None:
        self.limits = limits or HostLimits()
        self._sessions: dict[str, _Hosted] = {}
        self._parking: Parking[_Hosted] = Parking(self.limits.parked_s)
        self._runners = RunnerPool(
            processes=self.limits.processes, memory_bytes=self.limits.memory_bytes,
            in_use=self._in_use, plugins=plugins,
        )  # fmt: skip
        self._lost_threads = 0  # abandoned in a call that never returned
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="environment-host", daemon=True)
        self._thread.start()
        self._watcher = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of this host from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def remote_sessions(self) -> dict[str, int]:
        """How many sessions tenants drive themselves, by tenant: not those of rollouts."""
        return dict(Counter(one.tenant for one in list(self._sessions.values()) if one.remote))

    @property
    def worn_out(self) -> str | None:
        """Why this process should be replaced once its sessions have ended, if it should."""
        if self._lost_threads:
            return f"{self._lost_threads} threads hang in a simulator"
        if resident_bytes(os.getpid()) > self.limits.memory_bytes:
            return "the host is over its memory limit"
        return None

    async def open(
        self,
        tenant: str,
        request: EnvironmentRequest,
        *,
        isolation: Isolation = Isolation.THREAD,
        reuse: bool = False,
        remote: bool = False,
    ) -> tuple[str, EnvironmentInfo]:
        """A new session: its id, and what a policy must know. With `reuse`, of an environment that
        the tenant parked, where there is one. It is isolated as asked, or as all sessions here are
        where that is more.

        Raises `SpecError`, `QuotaError` (the tenant has as many as it may), `UnavailableError`
        (this host is full) or `SimulatorError`.
        """
        check_request(request)
        isolation = isolation.at_least(self.limits.isolation)
        mine = sum(one.tenant == tenant for one in self._sessions.values())
        if mine >= self.limits.max_per_tenant:
            raise QuotaError(
                f"{tenant} has {mine} sessions on this host, as many as it may; close one first",
                tenant=tenant,
                limit=self.limits.max_per_tenant,
            )
        if len(self._sessions) >= self.limits.max_sessions:
            raise UnavailableError(f"this host carries {len(self._sessions)} sessions; try again")
        parked = self._parking.take((tenant, request, isolation)) if reuse else None
        if parked is not None and parked.info is not None and parked.runner.usable:
            parked.id, parked.last_used = secrets.token_hex(8), time.monotonic()
            parked.remote = remote
            self._sessions[parked.id] = parked
            return parked.id, parked.info
        begun = time.monotonic()
        one = _Hosted(
            id=secrets.token_hex(8),
            tenant=tenant,
            request=request,
            isolation=isolation,
            runner=self._runners.new(isolation),
            remote=remote,
        )
        self._sessions[one.id] = one
        try:
            if len(self._sessions) + len(self._parking) > self.limits.max_sessions:
                parked = parked or self._parking.oldest()
            if parked is not None:  # it makes room, or cannot be used any more
                await self._end(parked)
            (info,) = await self._run_calls([_Asked(one, Op.OPEN, {"request": request})])
            if isinstance(info, CodedError):
                raise info
        except BaseException:
            self._sessions.pop(one.id, None)
            one.runner.abandon()
            raise
        one.info, one.made_in_s = info, time.monotonic() - begun
        return one.id, info

    async def reset(
        self, tenant: str, session: str, seed: int, options: Mapping[str, Any] | None = None
    ) -> Observation:
        (first,) = await self.batch_reset(tenant, [(session, seed, options)])
        if isinstance(first, CodedError):
            raise first
        return first

    async def step(
        self, tenant: str, session: str, actions: Actions, *, every_frame: bool = False
    ) -> Outcome:
        """Execute a chunk. Shape: (n, A). Raises `DataError`, `SimulatorError`."""
        (outcome,) = await self.batch_step(tenant, [(session, actions)], every_frame=every_frame)
        if isinstance(outcome, CodedError):
            raise outcome
        return outcome

    async def batch_reset(
        self, tenant: str, resets: Sequence[tuple[str, int, Mapping[str, Any] | None]]
    ) -> list[Observation | CodedError]:
        """Reset some sessions at once; the others stay where they are.

        An environment that failed or outgrew its memory is made anew first.
        """
        calls = [
            _Asked(self._of(tenant, session), Op.RESET, {"seed": seed, "options": options})
            for session, seed, options in resets
        ]
        await asyncio.gather(*(self._renew(call.session) for call in calls))
        seen: list[Observation | CodedError] = await self._run_calls(calls)
        return seen

    async def batch_step(
        self, tenant: str, steps: Sequence[tuple[str, Actions]], *, every_frame: bool = False
    ) -> list[Outcome | CodedError]:
        """Step some sessions at once, each on its own thread; an error is one session's own."""
        calls = [
            _Asked(
                self._of(tenant, session), Op.STEP, {"actions": actions, "every_frame": every_frame}
            )
            for session, actions in steps
        ]
        outcomes: list[Outcome | CodedError] = await self._run_calls(calls)
        return outcomes

    def step_now(
        self, tenant: str, steps: Sequence[tuple[str, Actions]], *, every_frame: bool = False
    ) -> list[Outcome | CodedError]:
        """`batch_step` for the thread that calls it, without the way through the loop.

        For sessions that nobody else calls meanwhile; not from the loop's own thread.
        """
        arguments = {"every_frame": every_frame}
        calls = [
            _Asked(self._of(tenant, session), Op.STEP, {"actions": actions, **arguments})
            for session, actions in steps
        ]
        ready = [call for call in calls if call.session.broken is None]
        batch = BlockingBatch(len(ready))
        self._submit(ready, batch)
        batch.wait(self.limits.step_s)
        return self._settled(calls, ready, batch)

    async def snapshot(self, tenant: str, session: str) -> bytes:
        taken: bytes = await self._one(tenant, session, Op.SNAPSHOT, {})
        return taken

    async def restore(self, tenant: str, session: str, snapshot: bytes) -> Observation:
        seen: Observation = await self._one(tenant, session, Op.RESTORE, {"snapshot": snapshot})
        return seen

    async def close(self, tenant: str, session: str) -> None:
        """Ends the session, also one that fails to close."""
        one = self._of(tenant, session)
        self._sessions.pop(session, None)
        await self._end(one)

    async def park(self, tenant: str, session: str) -> None:
        """Ends the session, but keeps an environment that was slow to make for the tenant's next
        one that asks for the same: `reset` begins as in a new one."""
        one = self._of(tenant, session)
        slow = one.made_in_s >= self.limits.slow_s and not one.request.env_id.startswith(
            "external/"
        )
        if one.broken is not None or not slow or one.runner.memory_bytes > self.limits.memory_bytes:
            await self.close(tenant, session)
            return
        self._sessions.pop(session, None)
        one.rebuilds = 0
        self._parking.put((tenant, one.request, one.isolation), one, time.monotonic())

    def keep(self, tenant: str, session: str) -> None:
        """Renew the lease: the client lives."""
        self._of(tenant, session).last_used = time.monotonic()

    def shut_down(self) -> None:
        """Close everything; returns when the children have ended. Calling it twice is fine."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        self._watcher.cancel()
        self.call(self._end_all()).result(3 * self.limits.close_s)
        self._runners.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _of(self, tenant: str, session: str) -> _Hosted:
        one = self._sessions.get(session)
        if one is None or one.tenant != tenant:
            raise NotFoundError(f"no session {session[:40]}", session=session[:40])
        return one

    async def _one(self, tenant: str, session: str, op: Op, arguments: dict[str, Any]) -> Any:
        (result,) = await self._run_calls([_Asked(self._of(tenant, session), op, arguments)])
        if isinstance(result, CodedError):
            raise result
        return result

    async def _run_calls(self, calls: Sequence[_Asked]) -> list[Any]:
        """Results or errors, in order. Calls of one session come one after the other."""
        if not calls:
            return []
        locks = sorted({call.session.id: call.session for call in calls}.items())
        if len(locks) != len(calls):
            raise NotFoundError("a batch names a session twice")
        for _, one in locks:
            await one.busy.acquire()
        try:
            ready = [call for call in calls if call.session.broken is None]
            batch = Batch(self._loop, len(ready))
            self._submit(ready, batch)
            await batch.wait(max(self._deadline_s(call.op) for call in calls))
            return self._settled(calls, ready, batch)
        finally:
            for _, one in locks:
                one.busy.release()

    def _submit(self, ready: Sequence[_Asked], batch: Batch | BlockingBatch) -> None:
        """Hand calls to the runners of their sessions."""
        now = time.monotonic()
        calls_of: dict[type[Runner], list[tuple[Any, Call]]] = {}
        for at, call in enumerate(ready):
            one = call.session
            one.last_used = now
            made = Call(call.op, call.arguments, batch.callback(at))
            calls_of.setdefault(type(one.runner), []).append((one.runner, made))
        for kind, made_calls in calls_of.items():
            kind.submit_all(made_calls)

    def _settled(
        self, calls: Sequence[_Asked], ready: Sequence[_Asked], batch: Batch | BlockingBatch
    ) -> list[Any]:
        """What each call led to, in order; one of a broken session gets its last failure."""
        found = {
            call.session.id: self._settle(call, *result)
            for call, result in zip(ready, batch.results, strict=True)
        }
        return [found.get(call.session.id, call.session.broken) for call in calls]

    def _settle(self, call: _Asked, result: Any, error: BaseException | None) -> Any:
        one = call.session
        one.last_used = time.monotonic()
        if error is None and result is not Batch.MISSING:
            return result
        if result is Batch.MISSING:
            self._give_up(one)
            error = SimulatorError(
                f"{one.request.env_id}: {call.op} did not return in {self._deadline_s(call.op)} s",
                failure=str(Failure.HUNG),
            )
        if isinstance(error, CodedError) and not isinstance(error, SimulatorError):
            return error  # the caller's fault: the environment was not touched
        if not isinstance(error, SimulatorError):
            error = SimulatorError(f"{error!r:.500}", failure=str(Failure.RAISED))
        details = {
            "env_id": one.request.env_id,
            "seed": call.arguments.get("seed"),
            **error.details,
            "rebuilt": call.op is not Op.OPEN and one.rebuilds < self.limits.max_rebuilds,
        }
        one.broken = SimulatorError(error.message, **details)
        return one.broken

    def _give_up(self, one: _Hosted) -> None:
        if isinstance(one.runner, ProcessRunner):
            if one.isolation is Isolation.PROCESS:
                one.runner.child.kill(Failure.HUNG)
            else:
                one.runner.child.worn = True
        else:
            self._lost_threads += 1
        one.runner.abandon()

    async def _renew(self, one: _Hosted) -> None:
        """Make the environment anew where it failed, or where its process outgrew the limit."""
        worn = one.runner.memory_bytes > self.limits.memory_bytes
        if one.broken is None and not worn:
            return
        if one.broken is not None:
            if one.rebuilds >= self.limits.max_rebuilds:
                return  # it stays broken: every call reports the last failure
            one.rebuilds += 1
        else:
            one.recycled += 1
        failure = one.broken.details["failure"] if one.broken is not None else None
        if worn or failure not in (Failure.RAISED, Failure.BAD_OUTPUT):
            one.runner.abandon()
            one.runner = self._runners.new(one.isolation)
        one.broken = None
        await self._run_calls([_Asked(one, Op.OPEN, {"request": one.request})])

    def _in_use(self) -> list[Runner]:
        return [one.runner for one in (*self._sessions.values(), *self._parking.things)]

    def _deadline_s(self, op: Op) -> float:
        limits = self.limits
        named = {Op.OPEN: limits.open_s, Op.RESET: limits.reset_s, Op.CLOSE: limits.close_s}
        return named.get(op, limits.step_s)

    async def _end(self, one: _Hosted) -> None:
        if one.broken is None:
            await self._run_calls([_Asked(one, Op.CLOSE, {})])
        one.runner.abandon()

    async def _end_all(self) -> None:
        ending, self._sessions = list(self._sessions.values()), {}
        ending += self._parking.clear()
        await asyncio.gather(*(self._end(one) for one in ending))

    async def _watch(self) -> None:
        """Close what nobody uses; end processes that grow without bounds within an episode."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.lease_s / 4))
            expired = self._parking.expired(time.monotonic())
            await asyncio.gather(*(self._end(one) for one in expired))
            end = time.monotonic() - self.limits.lease_s
            for one in list(self._sessions.values()):
                if one.last_used < end and not one.busy.locked():
                    self._sessions.pop(one.id, None)
                    await self._end(one)
            self._runners.tidy()
