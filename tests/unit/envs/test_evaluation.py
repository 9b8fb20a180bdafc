"""Evaluations: exactly the episodes of the suite, under one version, resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_platform.envs.evaluation import evaluate
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.intervals import wilson_interval
from vla_platform.envs.policies import ExpertPolicy, Predicted
from vla_platform.envs.suites import Suite, suite
from vla_platform.errors import ConflictError, DataError, SimulatorError
from vla_storage.objects.memory import MemoryObjectStore

MakeHost = Callable[..., EnvironmentHost]


def run(
    host: EnvironmentHost, objects: MemoryObjectStore, asked: Suite, policy: Any = None,
    *, version: int | None = None, **more: Any,
) -> EvaluationRecord:  # fmt: skip
    return evaluate(
        asked, policy or ExpertPolicy(), evaluation_id="e1", tenant="a", policy_key="a/p",
        version=version, host=host, objects=objects, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("episodes", "num_envs"), [(4, 3), (1, 4), (7, 2), (6, 6)])
def test_pf36_exactly_the_episodes_asked_for(
    make_host: MakeHost, episodes: int, num_envs: int
) -> None:
    objects = MemoryObjectStore()
    asked = suite("faulty/one", episodes=episodes)
    record = run(make_host(), objects, asked, num_envs=num_envs, num_videos=2)
    keys = [info.key for info in objects.list("a/evaluations/e1/")]
    assert episodes == record.num_episodes == len(record.episodes)
    assert list(range(episodes)) == [one.index for one in record.episodes]
    assert [case.seed for case in asked.cases] == [one.seed for one in record.episodes]
    assert episodes == sum("/episodes/" in key for key in keys)
    assert min(2, episodes) == sum("/videos/" in key for key in keys)
    assert "a/evaluations/e1/record.json" in keys


def test_the_record_says_how_sure_it_is(make_host: MakeHost) -> None:
    record = run(make_host(), MemoryObjectStore(), suite("tabletop/push", episodes=12))
    assert record.success_rate == 1.0
    assert wilson_interval(12, 12) == (record.interval_low, record.interval_high)
    assert record.by_environment == {"tabletop/push": {"episodes": 12, "success_rate": 1.0}}
    assert record == EvaluationRecord.from_json(record.to_json())


def test_an_evaluation_that_died_plays_only_what_is_missing(make_host: MakeHost) -> None:
    host, objects = make_host(), MemoryObjectStore()
    asked = suite("faulty/one", episodes=9)
    whole = run(host, MemoryObjectStore(), asked)

    class Dies(Exception):
        pass

    def die(done: int, of: int) -> None:
        if done == 4:
            raise Dies

    with pytest.raises(Dies):
        run(host, objects, asked, on_progress=die, num_envs=2)
    assert host.num_sessions == 0
    kept = {info.key: info.etag for info in objects.list("a/evaluations/e1/episodes/")}
    assert len(kept) == 4
    counted: list[int] = []
    record = run(host, objects, asked, on_progress=lambda done, of: counted.append(done))
    assert counted == [5, 6, 7, 8, 9]
    after = {info.key: info.etag for info in objects.list("a/evaluations/e1/episodes/")}
    assert kept.items() <= after.items()
    assert whole.episodes == record.episodes
    again = run(host, objects, asked, on_progress=lambda done, of: counted.append(done))
    assert (record, 5) == (again, len(counted))


def test_the_id_of_another_evaluation_is_refused(make_host: MakeHost) -> None:
    host, objects = make_host(), MemoryObjectStore()
    run(host, objects, suite("faulty/one", episodes=2))
    with pytest.raises(ConflictError):
        run(host, objects, suite("faulty/one", episodes=3))


class Versioned:
    """Moves to the next version after some predictions."""

    def __init__(self, *, change_at: int) -> None:
        self.change_at = change_at
        self.calls = 0

    def predict(self, observations: Any, *, version: int | None, **_: Any) -> Predicted:
        self.calls += 1
        current = 5 if self.calls < self.change_at else 6
        answer = current if version is None or self.change_at < 0 else version
        return Predicted(np.zeros((len(observations), 2, 1), np.float32), answer)


def test_one_version_is_pinned_at_the_first_prediction(make_host: MakeHost) -> None:
    record = run(
        make_host(), MemoryObjectStore(), suite("faulty/one", episodes=6), Versioned(change_at=3)
    )
    assert {5} == {one.policy_version for one in record.episodes}


def test_a_policy_that_does_not_keep_the_version_is_refused(make_host: MakeHost) -> None:
    with pytest.raises(DataError, match="version 6"):
        run(
            make_host(), MemoryObjectStore(), suite("faulty/one", episodes=6),
            Versioned(change_at=-1), version=5,
        )  # fmt: skip


def test_b36_an_invalid_action_is_an_unsuccessful_episode(make_host: MakeHost) -> None:
    class Invalid:
        def predict(self, observations: Any, **_: Any) -> Predicted:
            return Predicted(np.full((len(observations), 1, 1), np.nan, np.float32), 1)

    record = run(make_host(), MemoryObjectStore(), suite("faulty/one", episodes=3), Invalid())
    assert (record.num_invalid_actions, record.success_rate) == (3, 0.0)


def test_a_failed_environment_repeats_its_case_under_the_same_seed(
    make_host: MakeHost, tmp_path: Path
) -> None:
    asked = suite("faulty/one", episodes=5)
    whole = run(make_host(), MemoryObjectStore(), asked)
    options = {"fault": "exit", "at": 3, "once": str(tmp_path / "failed")}
    from vla_platform.envs.runner_pool import Isolation

    record = run(
        make_host(), MemoryObjectStore(), replace(asked, options=options),
        isolation=Isolation.PROCESS, num_envs=2,
    )  # fmt: skip
    assert record.failures == {"crashed": 1}
    assert whole.episodes == record.episodes


def test_an_environment_that_keeps_failing_ends_the_evaluation_by_name(
    make_host: MakeHost,
) -> None:
    asked = suite("faulty/one", episodes=3, options={"fault": "raise_reset"})
    objects = MemoryObjectStore()
    with pytest.raises(SimulatorError, match="no reset"):
        run(make_host(max_rebuilds=1), objects, asked)
    assert not [info for info in objects.list("") if info.key.endswith("record.json")]
