"""The harnesses: which environments there are, what options they take, how they are made.

A harness's own module imports the simulator, so it is imported only where sessions run, and one
process imports exactly one simulator code base.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vla_platform.envs import catalog, options
from vla_platform.envs.base import Environment
from vla_platform.envs.failures import Failure, printable
from vla_platform.envs.sessions import EnvironmentRequest, Session
from vla_platform.errors import ConfigurationError, SimulatorError, SpecError
from vla_platform.specs import Spec, nearest
from vla_storage.errors import CodedError


@dataclass(frozen=True, kw_only=True)
class Harness:
    """One simulator code base. `module` has `make(name, options) -> Environment`."""

    name: str
    module: str
    options: type[Spec]
    known: tuple[str, ...] = ()  # environment names; empty: `pattern` decides
    pattern: Any = None  # a compiled regular expression
    exclusive: bool = True  # its code base shares a process with no other

    def check_name(self, name: str) -> None:
        """Raises `SpecError` with the nearest known names (B18)."""
        if name in self.known or (self.pattern is not None and self.pattern.fullmatch(name)):
            return
        hint = nearest(name, self.known) if self.known else "see docs/environments.md"
        raise _problem("env_id", f"{self.name}/{name}"[:200], "no such environment", hint)


_BUILT_IN = (
    Harness(
        name="tabletop",
        module="vla_platform.envs.builtin",
        options=options.TabletopOptions,
        known=catalog.TABLETOP,
        exclusive=False,
    ),
    Harness(
        name="maniskill",
        module="vla_platform.envs.maniskill",
        options=options.ManiSkillOptions,
        known=catalog.MANISKILL,
    ),
    Harness(
        name="libero",
        module="vla_platform.envs.libero",
        options=options.LiberoOptions,
        known=catalog.LIBERO,
    ),
    Harness(
        name="gymnasium",
        module="vla_platform.envs.gymnasium",
        options=options.GymnasiumOptions,
        pattern=catalog.GYMNASIUM_NAME,
    ),
    Harness(
        name="external",
        module="vla_platform.envs.external",
        options=options.ExternalOptions,
        pattern=catalog.EXTERNAL_NAME,
        exclusive=False,
    ),
)
HARNESSES: dict[str, Harness] = {harness.name: harness for harness in _BUILT_IN}

_serving: list[str] = []
_lock = threading.Lock()


def load_plugins(plugins: Sequence[str]) -> None:
    """Add an operator's own harnesses: each `module:ATTRIBUTE` holds a `Harness`."""
    for plugin in plugins:
        module, _, attribute = plugin.partition(":")
        harness = getattr(importlib.import_module(module), attribute)
        HARNESSES[harness.name] = harness


def split_id(env_id: str) -> tuple[Harness, str]:
    """Harness and environment name. Raises `SpecError`."""
    name, slash, rest = env_id.partition("/")
    harness = HARNESSES.get(name)
    if harness is None or not slash:
        hint = nearest(name, HARNESSES) or f"one of {', '.join(HARNESSES)}"
        raise _problem("env_id", env_id[:200], "an environment is named harness/name", hint)
    harness.check_name(rest)
    return harness, rest


def check_request(request: EnvironmentRequest) -> tuple[Harness, str, Spec]:
    """The parts of a valid request, without importing a simulator. Raises `SpecError`."""
    harness, name = split_id(request.env_id)
    try:
        checked = harness.options.model_validate_json(_as_json(request.options))
    except ValidationError as error:
        problems = [
            {
                "field": ".".join(str(part) for part in ("options", *item["loc"])),
                "value": printable(repr(item.get("input")))[:80],
                "problem": item["msg"],
                "hint": nearest(str(item["loc"][-1]), harness.options.model_fields)
                if item["loc"]
                else "",
            }
            for item in error.errors(include_url=False)
        ]
        shown = "; ".join(f"{one['field']}: {one['problem']}" for one in problems)
        raise SpecError(f"{request.env_id}: {shown}", problems=problems) from error
    return harness, name, checked


def make_environment(request: EnvironmentRequest) -> Environment:
    """Make the environment in the calling thread, which has to make all further calls.

    Raises `SpecError`, `ConfigurationError` where this process serves another simulator, or
    `SimulatorError` with the failure `not_built`.
    """
    harness, name, checked = check_request(request)
    if harness.exclusive:
        with _lock:
            if _serving and _serving != [harness.name]:
                raise ConfigurationError(
                    f"this process serves {_serving[0]}; {harness.name} needs another"
                )
            _serving[:] = [harness.name]
    try:
        env: Environment = importlib.import_module(harness.module).make(name, checked)
        return env
    except CodedError:
        raise
    except (Exception, SystemExit) as error:
        raise SimulatorError(
            f"{request.env_id} cannot be made: {type(error).__name__}: {printable(error)}",
            env_id=request.env_id,
            failure=str(Failure.NOT_BUILT),
        ) from error


def open_session(request: EnvironmentRequest) -> Session:
    """A session on an environment of its own; see `make_environment`."""
    return Session(make_environment(request), request)


def _as_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"options hold plain data only: {error}", problems=[]) from error


def _problem(field: str, value: str, problem: str, hint: str) -> SpecError:
    shown = f"{field}: {problem}, got {value!r}" + (f" ({hint})" if hint else "")
    return SpecError(
        shown, problems=[{"field": field, "value": value, "problem": problem, "hint": hint}]
    )
