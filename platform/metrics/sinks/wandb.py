"""Events to Weights & Biases: one run per workload, grouped by tenant."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import wandb

from vla_platform.metrics.events import Event
from vla_platform.metrics.sinks.base import OPERATORS_ONLY, Sink, numbers_of

MOST_RUNS = 64


class WandbSink(Sink):
    """`target`: the project. Key, host and mode come from wandb's own variables."""

    def __init__(self, target: str) -> None:
        self._project = target or "vla-platform"
        self._runs: OrderedDict[str, Any] = OrderedDict()

    def write(self, event: Event) -> None:
        numbers = numbers_of(event.values)
        if event.kind in OPERATORS_ONLY or not numbers:
            return
        self._run(event).log({f"{event.kind}/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        while self._runs:
            self._runs.popitem(last=False)[1].finish()

    def _run(self, event: Event) -> Any:
        name = f"{event.tenant}-{event.workload}"
        if name not in self._runs:
            if len(self._runs) >= MOST_RUNS:
                self._runs.popitem(last=False)[1].finish()
            self._runs[name] = wandb.init(
                project=self._project, id=name, name=name, group=event.tenant,
                resume="allow", reinit="create_new",
            )  # fmt: skip
        self._runs.move_to_end(name)
        return self._runs[name]
