"""Where a training job's time went, from the ledger's stamps and the run's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_platform.client.timelines import draw_timeline
from vla_platform.control.timeline import Phase, phases

RL = {
    "job_id": "rl-1-0-0", "workload": "rl-1", "state": "completed", "producer_role": "rollout",
    "created": "1000", "at:needs_actor_forward": "3000", "at:computing_actor_forward": "3500",
    "at:needs_advantages": "4000", "at:computing_advantages": "4200", "at:ready": "4500",
    "ready": "4500", "leased": "5000", "ended": "6000", "lease_owner": "gpu-1", "attempt": "1",
    "sample_count": "64",
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"kind": "update", "job_id": "rl-1-9-0", "step": 9, "cost_s": 1.0},
    {"kind": "checkpoint", "step": 9, "at": 1.0, "checkpoint": "p/rl-1/9", "size_bytes": 1},
    {"kind": "update", "job_id": "rl-1-0-0", "step": 1, "loss": 0.5, "cost_s": 0.25, "at": 6.1},
    {"kind": "checkpoint", "step": 1, "at": 7.5, "checkpoint": "p/rl-1/1", "size_bytes": 100},
]


def brief(found: list[Phase]) -> list[tuple[str, float, float | None]]:
    return [(one.name, one.begun_s, one.ended_s) for one in found]


def test_every_stage_has_its_place() -> None:
    found = phases(RL, EVENTS)
    assert brief(found) == [
        ("rollout", 1.0, 3.0),
        ("waits for actor_forward", 3.0, 3.5),
        ("actor_forward", 3.5, 4.0),
        ("waits for advantages", 4.0, 4.2),
        ("advantages", 4.2, 4.5),
        ("waits for training", 4.5, 5.0),
        ("training", 5.0, 6.0),
        ("checkpoint", 6.0, 7.5),
    ]
    assert found[6].note == "step 1, loss 0.5, cost 0.250 s"
    assert (found[0].note, found[6].where, found[7].where) == ("64 samples", "gpu-1", "p/rl-1/1")


def test_a_graded_rollout_ends_where_its_grading_begins() -> None:
    graded = {**RL, "at:needs_scores": "2000", "at:computing_scores": "2250"}
    assert brief(phases(graded, []))[:4] == [
        ("rollout", 1.0, 2.0),
        ("waits for scores", 2.0, 2.25),
        ("scores", 2.25, 3.0),
        ("waits for actor_forward", 3.0, 3.5),
    ]


def test_a_job_that_goes_on_has_an_open_end() -> None:
    young = {name: RL[name] for name in ("job_id", "workload", "created", "producer_role")}
    assert brief(phases({**young, "state": "reserved"}, [])) == [("rollout", 1.0, None)]
    sft = {**young, "producer_role": "sft", "state": "leased", "ready": "2000", "leased": "2500"}
    found = phases({**sft, "attempt": "2", "lease_owner": "gpu-2"}, [])
    assert brief(found) == [
        ("produce", 1.0, 2.0), ("waits for training", 2.0, 2.5), ("training", 2.5, None),
    ]  # fmt: skip
    assert found[-1].note == "attempt 2"


def test_a_job_that_went_back_waits_again() -> None:
    """Its first lease was before it was ready anew: nobody trains it now."""
    back = {**RL, "state": "ready", "leased": "4400"}
    del back["ended"]
    assert brief(phases(back, []))[-1] == ("waits for training", 4.5, None)


def test_it_can_be_drawn(tmp_path: Path) -> None:
    drawn = [vars(one) for one in phases(RL, EVENTS)]
    for name in ("job.svg", "job.png"):
        assert draw_timeline(drawn, tmp_path / name, title="rl-1-0-0").stat().st_size > 1000
