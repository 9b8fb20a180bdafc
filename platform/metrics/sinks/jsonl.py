"""Events as lines of JSON in one file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from vla_platform.metrics.events import Event
from vla_platform.metrics.sinks.base import Sink


class JsonLinesSink(Sink):
    """`target`: the file; it is opened anew for each event, so that it can be rotated away."""

    def __init__(self, target: str) -> None:
        self._path = Path(target)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: Event) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")
