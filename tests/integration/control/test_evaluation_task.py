"""The evaluation task on a real Valkey: one player at a time, charged once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.conftest import Process
from vla_platform.broker import DELIVERY
from vla_platform.control import usage
from vla_platform.control.evaluations import Outstanding, evaluations_key
from vla_platform.envs import worker
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.tasks import evaluation

pytestmark = pytest.mark.services
ASKED: dict[str, Any] = {
    "evaluation_id": "e1", "tenant": "a", "policy_key": "a/reach", "version": 4,
    "policy": "inference", "suite_name": "tabletop/reach", "episodes": 2,
}  # fmt: skip
RECORD = EvaluationRecord(
    evaluation_id="e1", tenant="a", policy_key="a/reach", policy_version=4, module_digest="",
    suite="tabletop/reach", suite_digest="", num_episodes=2, num_successes=1, success_rate=0.5,
    interval_low=0.0, interval_high=1.0, mean_return=0.0, mean_steps=0.0, by_environment={},
    num_invalid_actions=0, failures={}, episodes=(), seconds=3.0,
)  # fmt: skip


@pytest.fixture
def some(some: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    found = replace(some, settings=some.settings.model_copy(update={"lease_s": 0.2}))
    known = Outstanding(
        evaluation_id="e1", policy="reach", policy_version=4, suite="s", due=0.0, sent=0.0
    )
    found.ledger.client.hset(evaluations_key("a"), "e1", known.to_json())
    monkeypatch.setattr(evaluation, "services", lambda: found)
    monkeypatch.setattr(worker, "host", lambda: None)
    monkeypatch.setattr(worker, "policy_for", lambda *_: None)
    return found


def simulator_s(some: Process) -> float:
    client = some.ledger.client
    return float(usage.statement(client, "a", usage.today(client)).totals.get("simulator_s", 0.0))


def test_a_message_that_comes_after_the_end_charges_nothing(
    some: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again by the reconciler while the first was still waiting for a host."""
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: RECORD)
    for _ in range(2):
        evaluation.run.apply(kwargs=ASKED, throw=True)
    assert simulator_s(some) == 3.0
    assert [event.kind for event in some.emitter.events] == ["evaluated"]


def test_who_lost_its_claim_stops_after_the_episode_and_comes_again(
    some: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def play(*_: Any, emit: Callable[[str, dict[str, Any]], None], **__: Any) -> EvaluationRecord:
        played.append("begun")
        if len(played) == 1:
            some.ledger.client.delete("vla:producing:a/evaluations/e1")
            end = time.monotonic() + 5
            while time.monotonic() < end:  # an episode after another
                emit("evaluation", {"episodes": 1, "of": 2})
        return RECORD

    monkeypatch.setattr(evaluation, "evaluate", play)
    evaluation.run.apply(kwargs=ASKED)
    assert played == ["begun", "begun"]
    assert simulator_s(some) == 3.0
    assert "failed" not in [event.values.get("state") for event in some.emitter.events]


@pytest.mark.parametrize("lease_s", [0.2, 10.0, 600.0])
def test_what_is_tried_again_later_waits_for_less_than_the_brokers_patience_pf01(
    lease_s: float,
) -> None:
    assert evaluation.pause_s(lease_s) == min(lease_s, 15.0) < DELIVERY["visibility_timeout"]
