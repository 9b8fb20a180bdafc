"""A platform process whose ledger is on a real Valkey and whose objects are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vla_platform.control import dispatch
from vla_platform.control.evaluations import Outstanding, evaluations_key
from vla_platform.control.ledger import Ledger
from vla_platform.control.services import Services
from vla_platform.metrics.events import Event
from vla_platform.settings import Settings
from vla_storage.checkpoints import CheckpointStore
from vla_storage.objects import MemoryObjectStore
from vla_storage.payloads import MemoryPayloadStore


@dataclass
class Kept:
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)


@dataclass(frozen=True, kw_only=True)
class Process(Services):
    """What it emits is kept, and so are the evaluations that it sends."""

    emitter: Kept
    sent: list[dict[str, Any]]

    @property
    def store(self) -> CheckpointStore:
        """Of tenant `a`."""
        return self.checkpoints("a")

    def outstanding(self) -> list[Outstanding]:
        """Tenant `a`'s evaluations that are under way."""
        raw = self.ledger.client.hvals(evaluations_key("a"))
        return [Outstanding.from_json(one) for one in raw]


@pytest.fixture
def some(
    control_redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Process]:
    ledger = Ledger.connect(control_redis_url)
    ledger.load()
    (tmp_path / "key").write_bytes(b"key")
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(dispatch, "evaluate", lambda **given: sent.append(given) or True)
    yield Process(
        settings=Settings(
            redis_url=control_redis_url, payload_url="", signing_key_file=tmp_path / "key"
        ),
        ledger=ledger,
        objects=MemoryObjectStore(),
        payloads=MemoryPayloadStore(),
        payload_clients=(),
        emitter=Kept(),
        sent=sent,
    )
    ledger.close()
