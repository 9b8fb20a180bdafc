"""What a sink is, how sinks are named, and one in memory for tests."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from vla_platform.errors import ConfigurationError
from vla_platform.metrics.events import Event

OPERATORS_ONLY = frozenset({"inference"})
"""Kinds that tell of the shared device; learning signals are all the others."""


class Sink(ABC):
    """Takes events one by one, from one thread. What it raises is logged, and the event is lost to
    it: metrics hold up nothing."""

    @abstractmethod
    def write(self, event: Event) -> None: ...

    def close(self) -> None:
        """Send what waits."""
        return None


class MemorySink(Sink):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among an event's values; trackers take nothing else."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


_KINDS = {
    "jsonl": ("vla_platform.metrics.sinks.jsonl", "JsonLinesSink"),
    "wandb": ("vla_platform.metrics.sinks.wandb", "WandbSink"),
    "mlflow": ("vla_platform.metrics.sinks.mlflow", "MlflowSink"),
    "clearml": ("vla_platform.metrics.sinks.clearml", "ClearmlSink"),
}


def open_sinks(text: str) -> list[Sink]:
    """`kind=target` by comma; what a target means says the kind's class.

    Raises `ConfigurationError` for an unknown kind, or one whose package is not installed.
    """
    found = []
    for part in filter(None, text.split(",")):
        kind, _, target = part.partition("=")
        if kind not in _KINDS:
            raise ConfigurationError(f"no metrics sink {kind!r}; there are {', '.join(_KINDS)}")
        module, name = _KINDS[kind]
        try:
            make: Callable[[str], Sink] = getattr(importlib.import_module(module), name)
            found.append(make(target))
        except ImportError as error:
            raise ConfigurationError(
                f"the metrics sink {kind} needs its package: pip install {kind}"
            ) from error
    return found
