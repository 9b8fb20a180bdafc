"""The ledger's server-side functions: one library, how it gets to a server and how it answers.

The sources are `lua/core.lua` and those beside it that `_FILES` names, with the state tables of
`states.py` in place; a server that was restarted without them, or has an older one, is given the
library anew.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import redis

from vla_platform.control.states import WaitReason, tables
from vla_platform.errors import (
    ConflictError,
    IllegalTransitionError,
    LeaseLostError,
    LedgerError,
    NotFoundError,
    QuotaError,
    UnavailableError,
)
from vla_storage.errors import CodedError

_ERRORS = {
    "VLA_CONFLICT": ConflictError,
    "VLA_NOT_FOUND": NotFoundError,
    "VLA_QUOTA": QuotaError,
    "VLA_LEASE_LOST": LeaseLostError,
    "VLA_ILLEGAL": IllegalTransitionError,
}
_FILES = ("core", "claims", "stages", "workloads", "jobs", "workers")
_OPERATIONS = (
    *("submit", "restore", "prepared", "admit", "pause", "resume"),
    *("checkpointed", "publish_version", "finish", "fail", "cancel"),
    *("reserve", "mark", "lease_stage", "renew", "drop", "unscored", "complete", "release"),
    *("lease_group", "heartbeat", "leave", "rewind", "fall_back", "expire", "pending", "review"),
    *("claim", "renew_claim", "release_claim"),
)
_FOR_A_WHILE = (
    redis.ConnectionError, redis.TimeoutError,
    redis.OutOfMemoryError, redis.ReadOnlyError, redis.BusyLoadingError,
)  # fmt: skip
"""Of a server that is away, full, failing over or starting."""
_WRITES_NOTHING = ("MISCONF", "NOREPLICAS", "MASTERDOWN")
"""Answers of a server whose disk is full, or that lacks its replicas."""
TEST_CLOCK_KEY = "vla:test:clock"


@functools.cache
def library_source(*, test_clock: bool = False) -> str:
    """The function library with the state tables in place.

    With `test_clock` the milliseconds under `TEST_CLOCK_KEY` are added to the server's time.
    """
    folder = resources.files("vla_platform.control").joinpath("lua")
    source = "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in _FILES)
    clock = f"tonumber(redis.call('GET', '{TEST_CLOCK_KEY}') or 0)" if test_clock else "0"
    waits: dict[str, Any] = {reason.name: str(reason) for reason in WaitReason}
    for marker, text in (("TABLES", _lua(tables())), ("WAITS", _lua(waits)), ("CLOCK", clock)):
        source = source.replace(f"@{marker}@", text)
    register = (f"redis.register_function('vla_{name}', {name})" for name in _OPERATIONS)
    return "\n".join(["#!lua name=vla", source, *register])


def _lua(value: dict[str, Any] | list[str] | str) -> str:
    """A Lua table constructor: the JSON library is not there yet when functions are loaded."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{json.dumps(k)}] = {_lua(v)}" for k, v in value.items()) + "}"
    return "{" + ", ".join(json.dumps(item) for item in value) + "}"


class LedgerFunctions:
    """The library on one server. `client` decodes its responses."""

    def __init__(self, client: Any, *, test_clock: bool = False) -> None:
        self._redis = client
        self._test_clock = test_clock

    def load(self) -> None:
        """Put the library on the server, replacing an older one."""
        self._redis.function_load(library_source(test_clock=self._test_clock), replace=True)

    def call(self, name: str, *args: Any) -> Any:
        """Raises the platform's own error for what the function refuses, and `UnavailableError`."""
        try:
            try:
                return self._redis.fcall(f"vla_{name}", 0, *args)
            except redis.ResponseError as error:
                if "Function not found" not in str(error):
                    raise
                self.load()
                return self._redis.fcall(f"vla_{name}", 0, *args)
        except redis.RedisError as error:
            code, _, text = str(error).partition(" ")
            if code in _ERRORS:
                raise _ERRORS[code](text, operation=name) from error
            raise _told(error) from error


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Plain commands, like functions, tell what the Redis says by the platform's own errors."""
    try:
        yield
    except redis.RedisError as error:
        raise _told(error) from error


def _told(error: redis.RedisError) -> CodedError:
    if isinstance(error, _FOR_A_WHILE) or str(error).startswith(_WRITES_NOTHING):
        return UnavailableError(f"the control Redis does not answer: {error}")
    return LedgerError(str(error))
