"""What an evaluation leaves in the object store.

    <tenant>/evaluations/<id>/plan.json  episodes/<index>.json  videos/<index>.mp4  record.json

Each object is created once. The record, written last, makes the evaluation visible.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from vla_platform.envs.intervals import wilson_interval
from vla_platform.envs.suites import Suite
from vla_platform.envs.trajectories import End
from vla_platform.errors import ConflictError
from vla_platform.specs import canonical_json
from vla_storage.errors import ObjectExistsError, ObjectNotFoundError
from vla_storage.names import check_id, check_name
from vla_storage.objects import ObjectStore

EVALUATION_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One finished episode, as it lies in the object store."""

    index: int
    env_id: str
    seed: int
    init_state: int | None
    task: str
    success: bool
    end: str
    total_reward: float
    num_steps: int
    num_clipped: int
    policy_version: int
    module_digest: str
    video: str | None = None  # object key
    version: int = EVALUATION_VERSION


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The result of an evaluation."""

    evaluation_id: str
    tenant: str
    policy_key: str
    policy_version: int
    module_digest: str
    suite: str
    suite_digest: str
    num_episodes: int
    num_successes: int
    success_rate: float
    interval_low: float  # Wilson, 95 %
    interval_high: float
    mean_return: float
    mean_steps: float
    by_environment: Mapping[str, Mapping[str, float]]
    num_invalid_actions: int
    failures: Mapping[str, int]  # failures of environments, by name; their episodes were repeated
    episodes: tuple[EpisodeRecord, ...]
    seconds: float  # of the session that finished it
    finished: float = field(default_factory=time.time)  # seconds since the epoch
    version: int = EVALUATION_VERSION

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> EvaluationRecord:
        values = json.loads(raw)
        values["episodes"] = tuple(EpisodeRecord(**one) for one in values["episodes"])
        return cls(**values)


class EvaluationArchive:
    """The objects of one evaluation."""

    def __init__(self, objects: ObjectStore, tenant: str, evaluation_id: str) -> None:
        self._objects = objects
        check_name("tenant", tenant)
        self._prefix = f"{tenant}/evaluations/{check_id('evaluation', evaluation_id)}/"

    def begin(self, suite: Suite, policy_key: str, version: int | None) -> int | None:
        """Pin what is evaluated; returns the version of an earlier try, or the one asked for."""
        plan = {"suite": suite.digest, "policy_key": policy_key, "version": version}
        with contextlib.suppress(ObjectExistsError):
            self._objects.put(f"{self._prefix}plan.json", canonical_json(plan), if_absent=True)
            return version
        found = json.loads(self._objects.get(f"{self._prefix}plan.json"))
        if (found["suite"], found["policy_key"]) != (suite.digest, policy_key) or (
            None not in (version, found["version"]) and version != found["version"]
        ):
            raise ConflictError(
                f"{self._prefix.rstrip('/')} is another evaluation; use a new id",
                evaluation=self._prefix,
            )
        earlier = next(iter(self.episodes().values()), None)
        return earlier.policy_version if earlier is not None else found["version"] or version

    def record(self) -> EvaluationRecord | None:
        try:
            return EvaluationRecord.from_json(self._objects.get(f"{self._prefix}record.json"))
        except ObjectNotFoundError:
            return None

    def episodes(self) -> dict[int, EpisodeRecord]:
        found = {}
        for info in self._objects.list(f"{self._prefix}episodes/"):
            one = EpisodeRecord(**json.loads(self._objects.get(info.key)))
            found[one.index] = one
        return found

    def keep(self, episode: EpisodeRecord, film: bytes | None) -> None:
        """The first one to finish an episode keeps it."""
        values = asdict(episode)
        if film is not None:
            values["video"] = f"{self._prefix}videos/{episode.index:06d}.mp4"
            self._objects.put(values["video"], film)
        key = f"{self._prefix}episodes/{episode.index:06d}.json"
        with contextlib.suppress(ObjectExistsError):
            self._objects.put(key, json.dumps(values).encode(), if_absent=True)

    def finish(self, record: EvaluationRecord) -> EvaluationRecord:
        # From the store: videos are named there, and another worker may have been first.
        kept = self.episodes()
        final = EvaluationRecord(
            **{**vars(record), "episodes": tuple(kept[one.index] for one in record.episodes)}
        )
        try:
            self._objects.put(f"{self._prefix}record.json", final.to_json(), if_absent=True)
        except ObjectExistsError:
            return self.record() or final
        return final


def record_of(
    suite: Suite,
    episodes: Sequence[EpisodeRecord],
    *,
    evaluation_id: str,
    tenant: str,
    policy_key: str,
    failures: Mapping[str, int],
    seconds: float,
) -> EvaluationRecord:
    successes = sum(one.success for one in episodes)
    low, high = wilson_interval(successes, len(episodes))
    by_env: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for one in episodes:
        by_env[one.env_id].append(one)
    return EvaluationRecord(
        evaluation_id=evaluation_id,
        tenant=tenant,
        policy_key=policy_key,
        policy_version=episodes[0].policy_version,
        module_digest=episodes[0].module_digest,
        suite=suite.name,
        suite_digest=suite.digest,
        num_episodes=len(episodes),
        num_successes=successes,
        success_rate=successes / len(episodes),
        interval_low=low,
        interval_high=high,
        mean_return=float(np.mean([one.total_reward for one in episodes])),
        mean_steps=float(np.mean([one.num_steps for one in episodes])),
        by_environment={
            env_id: {
                "episodes": len(of_env),
                "success_rate": sum(one.success for one in of_env) / len(of_env),
            }
            for env_id, of_env in by_env.items()
        },
        num_invalid_actions=sum(one.end == End.INVALID_ACTION for one in episodes),
        failures=dict(failures),
        episodes=tuple(episodes),
        seconds=seconds,
    )
