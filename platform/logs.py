"""Log lines that say whose they are: time, level, tenant, workload, job.

`bound` names whom the work of this thread is for; every line that is logged meanwhile carries it.
`VLA_LOG_FORMAT=json` makes each line one JSON object, `text` a line for people. Either way a line
is one line: control characters of tenants' code are escaped, and secrets of URLs are left out.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

FORMATS = ("text", "json")
_ACTION = re.compile(r"action=([a-z0-9_]+)(?:\s|$)")
_PASSWORD = re.compile(r"(\w[\w+.-]*://[^\s/:@]*:)[^\s/@]+@")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_context: ContextVar[Mapping[str, str]] = ContextVar(
    "vla_log_context", default=MappingProxyType({})
)


@contextmanager
def bound(*, tenant: str = "", workload: str = "", job: str = "") -> Iterator[None]:
    """Whom this thread's work is for; within it, an inner `bound` adds or replaces."""
    given = {"tenant": tenant, "workload": workload, "job": job}
    token = _context.set({**_context.get(), **{k: v for k, v in given.items() if v}})
    try:
        yield
    finally:
        _context.reset(token)


def context() -> Mapping[str, str]:
    """What `bound` says now: `tenant`, `workload`, `job`, where known."""
    return _context.get()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC, milliseconds) first, then level, logger, process,
    action, tenant, workload, job, message, and whatever else the line was logged with."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = _without_secrets(record.getMessage())
        extra = _extra(record)
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
        }
        found = _ACTION.match(message)
        if found:
            line["action"] = found.group(1)
        line |= {**context(), **extra}
        line["message"] = message
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = _without_secrets("".join(traceback.format_exception(
                *record.exc_info
            )))  # fmt: skip
        return json.dumps(
            {name: value for name, value in line.items() if value != ""}, default=_shown
        )


class TextFormatter(logging.Formatter):
    """A line for people: what the context adds stands at its end."""

    def format(self, record: logging.LogRecord) -> str:
        message = _escaped(_without_secrets(record.getMessage()))
        rest = {**context(), **_extra(record)}
        told = "".join(
            f" {name}={_escaped(_shown(value))}"
            for name, value in rest.items()
            if f"{name}={value}" not in message
        )
        stamp = _time(record).replace("T", " ").replace(".", ",").removesuffix("Z")
        line = f"[{stamp}: {record.levelname}/{record.threadName}] {message}{told}"
        if record.exc_info and record.exc_info[0] is not None:
            told = _without_secrets("".join(traceback.format_exception(*record.exc_info)))
            # Indented and escaped: the text of an error may be anybody's, and look like a line.
            line += "".join(f"\n    {_escaped(part)}" for part in told.splitlines())
        return line


def formatter(kind: str, *, process: str = "") -> logging.Formatter:
    """`kind` is one of `FORMATS`."""
    return JsonFormatter(process) if kind == "json" else TextFormatter()


def configure(kind: str, *, process: str = "", level: int = logging.INFO) -> None:
    """Have this process's root logger write to standard error in one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(kind, process=process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    given = {k: v for k, v in vars(record).items() if k not in _STANDARD and k != "data"}
    return {
        name: _without_secrets(value) if isinstance(value, str) else value
        for name, value in given.items()
        if value is not None
    }


def _without_secrets(text: str) -> str:
    """Passwords of URLs, which errors of clients like to repeat."""
    return _PASSWORD.sub(r"\1***@", text)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def _shown(value: Any) -> str:
    return _without_secrets(str(value))
