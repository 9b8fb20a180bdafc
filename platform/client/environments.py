"""A tenant's environments, driven from Python: `platform.environment("tabletop/push")`.

The simulator runs on a host of the platform. Calls go over the payload Redis, as whole action
chunks where there are some: a round trip costs about as much as some steps of a fast simulator.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import redis

from vla_platform.client.connection import WAIT_S
from vla_platform.envs import wire
from vla_platform.envs.base import EnvironmentInfo, Observation
from vla_platform.envs.remote_protocol import OPEN_S, from_session, to_host
from vla_platform.envs.sessions import Outcome
from vla_platform.errors import UnavailableError
from vla_storage.closing import Closing
from vla_storage.errors import CodedError

KEEP_S = 20.0
"""How often a session that is not used is kept alive; hosts close those of dead clients."""


class RemoteEnvironment(Closing):
    """One session on a host. Thread-safe, one call at a time. Close it when done.

    Every call raises what the session raises (`DataError` for refused actions, `SimulatorError`
    for a failed simulator: reset it where `details["rebuilt"]` says so), `NotFoundError` once the
    session was closed or collected, and `UnavailableError` where the host does not answer.
    """

    def __init__(
        self, client: redis.Redis, *, tenant: str, host_id: str, session: str,
        timeout_s: float = 120.0,
        own_client: bool = False,
    ) -> None:  # fmt: skip
        self._redis: Any = client
        self._own_client = own_client  # closed with the session
        self._to = to_host(tenant, host_id)
        self._from = from_session(tenant, session)
        self._session = session
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._last_used = time.monotonic()
        self.info: EnvironmentInfo = self._wait(0, OPEN_S)
        self._keeper = threading.Thread(target=self._keep, name="keep-session", daemon=True)
        self._keeper.start()

    def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        """Start an episode; equal seeds and options start equal episodes."""
        first: Observation = self._call("reset", {"seed": seed, "options": options})
        return first

    def step(self, actions: npt.NDArray[np.float32], *, every_frame: bool = False) -> Outcome:
        """Execute one action (A,), or a chunk (n, A) that ends with the episode."""
        chunk = actions[None] if isinstance(actions, np.ndarray) and actions.ndim == 1 else actions
        outcome: Outcome = self._call("step", {"actions": chunk, "every_frame": every_frame})
        return outcome

    def snapshot(self) -> bytes:
        taken: bytes = self._call("snapshot", {})
        return taken

    def restore(self, snapshot: bytes) -> Observation:
        seen: Observation = self._call("restore", {"snapshot": snapshot})
        return seen

    def close(self) -> None:
        """Calling it twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._call("close", {})
        finally:
            if self._own_client:
                self._redis.close()

    def _call(self, op: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            return self._wait(self._send(op, arguments), self._timeout_s)

    def _send(self, op: str, arguments: dict[str, Any]) -> int:
        number = next(self._numbers)
        message = {"session": self._session, "call": number, "op": op, "arguments": arguments}
        try:
            self._redis.rpush(self._to, wire.encode(message))
        except redis.RedisError as error:
            raise UnavailableError(f"the platform does not answer: {error}") from error
        return number

    def _wait(self, number: int, timeout_s: float) -> Any:
        """The result of this call; answers to calls that were given up are left out."""
        end = time.monotonic() + timeout_s
        while (left_s := end - time.monotonic()) > 0:
            try:
                found = self._redis.blpop([self._from], timeout=min(left_s, WAIT_S))
            except redis.RedisError as error:
                raise UnavailableError(f"the platform does not answer: {error}") from error
            if found is None:
                continue
            reply = wire.decode(found[1])
            if reply["call"] == number:
                self._last_used = time.monotonic()
                if isinstance(reply.get("error"), CodedError):
                    raise reply["error"]
                return reply.get("result")
        raise UnavailableError(
            f"the host of session {self._session} gave no answer in {timeout_s} s"
        )

    def _keep(self) -> None:
        while not self._closed.wait(KEEP_S / 4):
            if time.monotonic() - self._last_used > KEEP_S:
                try:
                    self._call("keep", {})
                except CodedError:
                    return  # the next call says why


def batch_step(
    steps: Sequence[tuple[RemoteEnvironment, npt.NDArray[np.float32]]],
) -> list[Outcome | CodedError]:
    """Step several environments at once, each by a chunk (n, A); errors are one's own."""
    with contextlib.ExitStack() as stack:
        for env, _ in sorted(steps, key=lambda step: step[0]._session):
            stack.enter_context(env._lock)  # in one order everywhere, so that none waits in a ring
        numbers = [env._send("step", {"actions": chunk}) for env, chunk in steps]
        outcomes: list[Outcome | CodedError] = []
        for (env, _), number in zip(steps, numbers, strict=True):
            try:
                outcomes.append(env._wait(number, env._timeout_s))
            except CodedError as error:
                outcomes.append(error)
        return outcomes
