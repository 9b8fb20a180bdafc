"""The harness `external`: a simulator that a tenant runs elsewhere, over one WebSocket.

One connection is one environment. Every message is a msgpack map; arrays are extension type 1 (see
`wire`). The platform sends

    {"version": 1, "call": n, "op": "open",  "arguments": {"name", "token"}}
    {"call": n, "op": "reset", "arguments": {"seed", "options"}}
    {"call": n, "op": "step",  "arguments": {"action", "render"}}
    {"call": n, "op": "close", "arguments": {}}

and takes `{"call": n, "result": ...}` or `{"call": n, "error": {"code", "message"}}`. The result of
`open` is a map with type `info`, that of `reset` one with type `observation`, that of `step` a map
`{"observation", "reward", "terminated", "truncated", "info"}`. `examples/external_simulator.py` is
a complete server. What it sends is checked like any simulator's output.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from vla_platform.envs import wire
from vla_platform.envs.base import Environment, EnvironmentInfo, Observation, Step
from vla_platform.envs.failures import Failure, printable
from vla_platform.envs.options import ExternalOptions
from vla_platform.errors import ConfigurationError, DataError, SimulatorError
from vla_platform.settings import external_hosts

T = TypeVar("T")


class ExternalEnvironment(Environment):
    """Raises `SimulatorError` where the other end is silent, gone, or reports an error."""

    computes_here = False

    def __init__(self, name: str, options: ExternalOptions) -> None:
        self._env_id = f"external/{name}"
        self._timeout_s = options.timeout_s
        self._numbers = itertools.count(1)
        place = urlsplit(options.url).netloc
        if place not in external_hosts():
            raise ConfigurationError(
                f"{place} is not among the hosts that external environments may connect to; "
                "the operator lists them in VLA_EXTERNAL_HOSTS"
            )
        self._open = contextlib.ExitStack()
        try:
            # No proxy: the operator's list is of where the connection really goes.
            connecting = connect(
                options.url, open_timeout=options.timeout_s, max_size=wire.MAX_BYTES, proxy=None
            )
            self._socket = self._open.enter_context(connecting)
        except (OSError, WebSocketException, TimeoutError) as error:
            raise self._failed(Failure.NOT_BUILT, error) from error
        opened = {"name": name, "token": options.token}
        try:
            self._info = self._expect(EnvironmentInfo, self._call("open", opened, version=1))
        except BaseException:
            self._open.close()
            raise

    @property
    def info(self) -> EnvironmentInfo:
        return self._info

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        given = {"seed": seed, "options": dict(options or {})}
        return self._expect(Observation, self._call("reset", given))

    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        raw: dict[str, Any] = self._expect(
            dict, self._call("step", {"action": action, "render": render})
        )
        try:
            return Step(
                observation=raw["observation"],
                reward=raw["reward"],
                terminated=raw["terminated"],
                truncated=raw["truncated"],
                action=action,
                info=raw.get("info", {}),
            )
        except KeyError as error:
            raise ValueError(f"a step without {error}") from error

    def close(self) -> None:
        self._open.close()

    def _call(self, op: str, arguments: dict[str, Any], **more: Any) -> Any:
        number = next(self._numbers)
        message = {**more, "call": number, "op": op, "arguments": arguments}
        try:
            self._socket.send(wire.encode(message))
            raw = self._socket.recv(timeout=self._timeout_s)
        except TimeoutError as error:
            self._open.close()
            raise self._failed(Failure.HUNG, error) from error
        except (OSError, WebSocketException) as error:
            raise self._failed(Failure.CRASHED, error) from error
        try:
            reply = wire.decode(raw if isinstance(raw, bytes) else b"")
        except DataError as error:
            raise self._failed(Failure.BAD_OUTPUT, error) from error
        if reply.get("call") != number:
            raise self._failed(Failure.BAD_OUTPUT, "an answer to another call")
        problem = reply.get("error")
        if problem is not None:
            text = problem.get("message", problem) if isinstance(problem, dict) else problem
            raise self._failed(Failure.RAISED, printable(text))
        return reply.get("result")

    def _expect(self, kind: type[T], result: Any) -> T:
        if not isinstance(result, kind):
            raise self._failed(Failure.BAD_OUTPUT, f"{type(result).__name__} for {kind.__name__}")
        return result

    def _failed(self, failure: Failure, reason: object) -> SimulatorError:
        return SimulatorError(
            f"{self._env_id}: {failure}: {printable(reason)}",
            env_id=self._env_id,
            failure=str(failure),
        )


def make(name: str, options: ExternalOptions) -> Environment:
    return ExternalEnvironment(name, options)
