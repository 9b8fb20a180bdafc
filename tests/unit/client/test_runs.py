"""What a run's events come to, and what a batch that is none leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vla_platform.client.runs import Run, metrics_of
from vla_storage.errors import PayloadError, PayloadFullError


def test_of_a_rollout_the_last_event_stays_and_what_was_redone_counts_once() -> None:
    events = [
        {"kind": "state", "state": "running"},
        {"kind": "rollout", "position": 0, "decisions": 1, "success_rate": None},
        {"kind": "rollout", "position": 0, "decisions": 2, "success_rate": 0.5},
        {"kind": "update", "step": 1, "loss": 0.1},
        {"kind": "rollout", "position": 1, "decisions": 1, "success_rate": 0.7},
        {"kind": "update", "step": 1, "loss": 0.2},
        {"kind": "heldout", "step": 0, "heldout_loss": 1.0},
        {"kind": "checkpoint", "step": 1},
    ]
    found = metrics_of(events)
    assert [(event["kind"], event["step"]) for event in found] == [
        ("heldout", 0), ("rollout", 1), ("update", 1), ("rollout", 2),
    ]  # fmt: skip
    assert [event["success_rate"] for event in found if event["kind"] == "rollout"] == [0.5, 0.7]
    assert [event["loss"] for event in found if event["kind"] == "update"] == [0.2]


class Calls:
    """A connection that grants every reservation, to a payload store that is full."""

    tenant = "a"

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.payloads = self

    def call(self, task: str, **arguments: Any) -> Any:
        self.made.append((task, arguments))
        return {"job_id": "j", "partition_id": "p-j", "fence": 3, "position": 0}

    def put(self, *_: Any, **__: Any) -> None:
        raise PayloadFullError("full")


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"is_transition": np.ones(2, bool), "latent": np.ones((3, 1))},
        {"is_transition": np.ones(2, bool), "prompt": ["reach", "reach"]},
        {"latent": np.ones((3, 1))},
    ],
)
def test_columns_that_cannot_be_sent_reserve_nothing(columns: dict[str, Any]) -> None:
    calls = Calls()
    with pytest.raises(PayloadError):
        Run(calls, "r").train_batch(columns)  # type: ignore[arg-type]
    assert calls.made == []


def test_a_reservation_is_given_back_where_its_samples_could_not_be_put() -> None:
    calls = Calls()
    with pytest.raises(PayloadFullError):
        Run(calls, "r").train_batch({"is_transition": np.ones(2, bool)})  # type: ignore[arg-type]
    assert [task for task, _ in calls.made] == ["ingress.reserve_batch", "ingress.release_batch"]
    assert calls.made[1][1].items() >= {"run": "r", "job_id": "j", "fence": "3"}.items()
