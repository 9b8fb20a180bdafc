"""Usage per tenant: the shared forward is split by tokens; Flower sees one event set a batch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from vla_platform.gpu_workers.inference_metrics import TASK_NAME, InferenceMetrics
from vla_platform.gpu_workers.items import BatchReport
from vla_platform.metrics.events import Event


def report(**changes: Any) -> BatchReport:
    fields: dict[str, Any] = {
        "batch_id": 1,
        "requests": {"a": 1, "b": 2},
        "samples": {"a": 4, "b": 2},
        "tokens": {"a": 300, "b": 100},
        "waited_s": 0.002,
        "forward_s": 0.4,
        "decode_s": 0.1,
        "num_forwards": 1,
        "num_waiting": 5,
        "num_failed": 0,
    }
    return BatchReport(**(fields | changes))


def test_backbone_seconds_are_split_by_tokens_and_nothing_gets_lost():
    events: list[Event] = []
    metrics = InferenceMetrics(events.append, base_model="tiny", every_s=60.0)
    metrics(report())
    metrics(report(requests={"b": 1}, samples={"b": 1}, tokens={"b": 50}, forward_s=0.2))
    metrics.close()
    values = {event.tenant: event.values for event in events}
    assert {"a", "b"} == values.keys()
    assert pytest.approx(values["a"]["backbone_s"]) == 0.3
    assert pytest.approx(values["b"]["backbone_s"]) == 0.1 + 0.2
    assert (values["a"]["requests"], values["b"]["requests"]) == (1, 3)
    assert (values["a"]["samples"], values["b"]["samples"]) == (4, 3)
    assert values["a"]["tenants_per_batch"] == 2
    assert values["a"]["batch_size"] == 3.5
    assert {"inference"} == {event.kind for event in events}


def test_a_batch_is_one_event_set_and_shows_no_tenants_data():
    sent: list[tuple[str, dict[str, Any]]] = []
    metrics = InferenceMetrics(
        lambda event: None,
        base_model="tiny",
        dispatch=lambda kind, **fields: sent.append((kind, fields)),
    )
    metrics(report())
    metrics(report(num_failed=3))
    metrics.close()
    assert [
        *("task-received", "task-started", "task-succeeded"),
        *("task-received", "task-started", "task-failed"),
    ] == [kind for kind, _ in sent]
    assert sent[0][1]["name"] == TASK_NAME
    assert len({fields["uuid"] for _, fields in sent[:3]}) == 1
