"""Events to ClearML: one task per workload, in the tenant's project."""

from __future__ import annotations

from typing import Any

from clearml import Task

from vla_platform.metrics.events import Event
from vla_platform.metrics.sinks.base import OPERATORS_ONLY, Sink, numbers_of


class ClearmlSink(Sink):
    """`target`: the project above the tenants'. Servers and keys come from clearml's own
    configuration."""

    def __init__(self, target: str) -> None:
        self._project = target or "vla-platform"
        self._tasks: dict[tuple[str, str], Any] = {}

    def write(self, event: Event) -> None:
        numbers = numbers_of(event.values)
        if event.kind in OPERATORS_ONLY or not numbers:
            return
        logger = self._task(event).get_logger()
        for name, value in numbers.items():
            logger.report_scalar(event.kind, name, value, int(numbers.get("step", 0)))

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    def _task(self, event: Event) -> Any:
        key = (event.tenant, event.workload)
        if key not in self._tasks:
            self._tasks[key] = Task.create(
                project_name=f"{self._project}/{event.tenant}", task_name=event.workload
            )
        return self._tasks[key]
