"""What a run's events come to."""

from __future__ import annotations

from vla_platform.client.runs import metrics_of


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
