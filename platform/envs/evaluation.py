"""An evaluation: exactly the episodes of a suite, under one pinned version of a policy.

Every finished episode is kept at once; whoever goes on after a crash plays only what is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from vla_platform.envs.base import Observation
from vla_platform.envs.evaluation_records import (
    EpisodeRecord,
    EvaluationArchive,
    EvaluationRecord,
    record_of,
)
from vla_platform.envs.groups import SessionGroup
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.policies import Policy, needs_expert
from vla_platform.envs.rollout import Emit
from vla_platform.envs.runner_pool import Isolation
from vla_platform.envs.seeds import Use, derive_seed
from vla_platform.envs.sessions import EnvironmentRequest, Outcome
from vla_platform.envs.suites import Case, Suite
from vla_platform.envs.trajectories import End
from vla_platform.envs.videos import video_of
from vla_platform.errors import DataError, SimulatorError
from vla_storage.errors import CodedError
from vla_storage.objects import ObjectStore


def evaluate(
    suite: Suite,
    policy: Policy,
    *,
    evaluation_id: str,
    tenant: str,
    policy_key: str,
    version: int | None,
    host: EnvironmentHost,
    objects: ObjectStore,
    num_envs: int = 4,
    isolation: Isolation = Isolation.THREAD,
    execute_steps: int | None = None,
    num_videos: int = 0,
    predict_timeout_s: float = 60.0,
    emit: Emit | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationRecord:
    """Play what is missing of the suite and write the record; read-only for the policy.

    Finished before, it returns the record that is there. `version` None takes the policy's current
    one at the first prediction and then holds on to it. Raises `ConflictError` where the id belongs
    to another evaluation, `SimulatorError` where an environment keeps failing, `DataError` where
    the policy answers with another version, and what `policy.predict` and the store raise.
    """
    started = time.monotonic()
    archive = EvaluationArchive(objects, tenant, evaluation_id)
    version = archive.begin(suite, policy_key, version)
    record = archive.record()
    if record is not None:
        return record
    done = archive.episodes()
    failures: Counter[str] = Counter()
    missing = [case for case in suite.cases if case.index not in done]
    for env_id, group in groupby(sorted(missing, key=_place), key=lambda case: case.env_id):
        cases = list(group)
        request = EnvironmentRequest(
            env_id=env_id, options=suite.options, expert=needs_expert(policy)
        )
        with SessionGroup(
            host, tenant=tenant, request=request, num_sessions=min(num_envs, len(cases)),
            isolation=isolation,
        ) as sessions:  # fmt: skip
            play = _Play(
                sessions, policy, policy_key=policy_key, version=version, seed=suite.seed,
                execute_steps=execute_steps, timeout_s=predict_timeout_s,
                filmed=lambda case: case.index < num_videos,
            )  # fmt: skip
            for finished, film in play.run(cases):
                version = finished.policy_version
                archive.keep(finished, film)
                done[finished.index] = finished
                if emit is not None:
                    emit("evaluation", _progress(done, len(suite.cases)))
                if on_progress is not None:
                    on_progress(len(done), len(suite.cases))
            failures += play.failures
    return archive.finish(
        record_of(
            suite,
            [done[case.index] for case in suite.cases],
            evaluation_id=evaluation_id,
            tenant=tenant,
            policy_key=policy_key,
            failures=failures,
            seconds=time.monotonic() - started,
        )
    )


@dataclass
class _Running:
    """A case under way in a session."""

    case: Case
    seen: Observation
    film: list[Observation] | None
    rewards: float = 0.0
    num_steps: int = 0
    num_clipped: int = 0


class _Play:
    """Cases of one environment over a group of sessions; each session takes the next case."""

    def __init__(
        self,
        sessions: SessionGroup,
        policy: Policy,
        *,
        policy_key: str,
        version: int | None,
        seed: int,
        execute_steps: int | None,
        timeout_s: float,
        filmed: Callable[[Case], bool],
    ) -> None:
        self._sessions = sessions
        self._policy = policy
        self._policy_key = policy_key
        self._version = version
        self._seed = seed
        self._execute_steps = execute_steps
        self._timeout_s = timeout_s
        self._filmed = filmed
        self._running: dict[int, _Running] = {}
        self.failures: Counter[str] = Counter()

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[EpisodeRecord, bytes | None]]:
        """Every case once; records come in the order in which episodes end."""
        waiting = list(reversed(cases))
        free = list(range(len(self._sessions)))
        decision = 0
        while waiting or self._running:
            free = self._begin(free, waiting)
            if not self._running:
                continue
            numbers = sorted(self._running)
            outcomes, digest = self._decide(numbers, decision)
            decision += 1
            for number, outcome in zip(numbers, outcomes, strict=True):
                running = self._running[number]
                end = self._take(running, outcome, waiting)
                if end is not None or isinstance(outcome, SimulatorError):
                    del self._running[number]
                    free.append(number)
                if end is not None:
                    film = running.film and video_of(running.film, fps=self._sessions.info.fps)
                    yield self._finished(running, outcome, end, digest), film or None

    def _begin(self, free: list[int], waiting: list[Case]) -> list[int]:
        """Start cases in free sessions; returns the sessions that are still free."""
        pairs = [(number, waiting.pop()) for number in free[: len(waiting)]]
        answers = self._sessions.reset(
            [number for number, _ in pairs],
            [case.seed for _, case in pairs],
            [case.reset_options for _, case in pairs],
        )
        left = free[len(pairs) :]
        for (number, case), answer in zip(pairs, answers, strict=True):
            if isinstance(answer, CodedError):
                self._note(answer)
                waiting.append(case)
                left.append(number)
            else:
                film = [answer] if self._filmed(case) else None
                self._running[number] = _Running(case, answer, film)
        return left

    def _decide(
        self, numbers: Sequence[int], decision: int
    ) -> tuple[list[Outcome | CodedError], str]:
        prediction = self._policy.predict(
            [self._running[number].seen for number in numbers],
            policy_key=self._policy_key,
            version=self._version,
            seed=derive_seed(Use.PREDICTION, self._seed, decision),
            timeout_s=self._timeout_s,
        )
        if self._version is None:
            self._version = prediction.policy_version
        if prediction.policy_version != self._version:
            raise DataError(
                f"the policy acts with version {prediction.policy_version}; this evaluation is of "
                f"{self._version}",
                column="policy_version",
            )
        outcomes = self._sessions.step(
            numbers,
            [np.ascontiguousarray(chunk[: self._execute_steps]) for chunk in prediction.actions],
            every_frame=any(self._running[number].film is not None for number in numbers),
        )
        return outcomes, prediction.module_digest

    def _take(
        self, running: _Running, outcome: Outcome | CodedError, waiting: list[Case]
    ) -> End | None:
        """How the episode ended, if it did. A case whose environment failed is played again."""
        if isinstance(outcome, SimulatorError):
            self._note(outcome)
            waiting.append(running.case)
            return None
        if isinstance(outcome, CodedError):
            if not isinstance(outcome, DataError):
                raise outcome
            return End.INVALID_ACTION
        running.seen = outcome.observation
        running.rewards += float(outcome.rewards.sum())
        running.num_steps += outcome.num_steps
        running.num_clipped += outcome.num_clipped
        if running.film is not None:
            running.film += outcome.frames
        if outcome.terminated:
            return End.TERMINATED
        return End.TRUNCATED if outcome.truncated else None

    def _note(self, error: CodedError) -> None:
        if not isinstance(error, SimulatorError) or not error.details.get("rebuilt"):
            raise error
        self.failures[str(error.details["failure"])] += 1

    def _finished(
        self, running: _Running, outcome: Outcome | CodedError, end: End, digest: str
    ) -> EpisodeRecord:
        assert self._version is not None
        return EpisodeRecord(
            index=running.case.index,
            env_id=running.case.env_id,
            seed=running.case.seed,
            init_state=running.case.init_state,
            task=running.seen.task,
            success=isinstance(outcome, Outcome) and outcome.success,
            end=str(end),
            total_reward=running.rewards,
            num_steps=running.num_steps,
            num_clipped=running.num_clipped,
            policy_version=self._version,
            module_digest=digest,
        )


def _place(case: Case) -> tuple[str, int]:
    return case.env_id, case.index


def _progress(done: Mapping[int, EpisodeRecord], of: int) -> dict[str, Any]:
    rate = float(np.mean([one.success for one in done.values()]))
    return {"episodes": len(done), "of": of, "success_rate": rate}
