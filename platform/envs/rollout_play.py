"""The state of one rollout: which episode each session is in, and what was recorded of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_platform.envs.base import Observation
from vla_platform.envs.failures import failure_of
from vla_platform.envs.groups import SessionGroup
from vla_platform.envs.policies import Policy, Prediction
from vla_platform.envs.rollout_messages import RolloutConfig
from vla_platform.envs.seeds import Use, derive_seed
from vla_platform.envs.sessions import Outcome
from vla_platform.envs.trajectories import Decision, End, Episode, Seen
from vla_platform.envs.videos import video_of
from vla_platform.errors import DataError, SimulatorError
from vla_storage.errors import CodedError


class RolloutPlay:
    """Plays decision by decision; `kept` are the episodes that are over."""

    def __init__(
        self,
        config: RolloutConfig,
        sessions: SessionGroup,
        policy: Policy,
        version: int | str | None,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._policy = policy
        self._version = version
        self.policy_version = -1
        self.active: list[int] = []
        self.kept: list[Episode] = []
        self.dropped: Counter[str] = Counter()
        self.num_clipped = 0
        self._episodes: dict[int, Episode] = {}  # under way, by session
        self._seen: dict[int, Observation] = {}  # the observation each session is at
        self._num_begun: Counter[int] = Counter()
        self._unvalued: list[tuple[Episode, Observation]] = []  # truncated: their end has a value
        self._films: dict[int, list[Observation]] = {}

    def begin(self, numbers: Sequence[int]) -> None:
        """Start the next episode of these sessions."""
        seeds = {number: self._next_seed(number) for number in numbers}
        waiting = list(numbers)
        while waiting:
            answers = self._sessions.reset(waiting, [seeds[number] for number in waiting])
            failed = []
            for number, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, CodedError):
                    self._note_failure(answer)
                    failed.append(number)  # again, with the same seed, in a rebuilt environment
                else:
                    self._start(number, seeds[number], answer)
            waiting = failed
        self.active = sorted({*self.active, *numbers})

    def decide(self, decision: int) -> None:
        """One prediction for all, and one chunk in each session."""
        config = self._config
        unvalued, self._unvalued = self._unvalued, []
        observations = [self._seen[number] for number in self.active]
        prediction = self._predict([*observations, *(seen for _, seen in unvalued)], decision)
        self._set_values(unvalued, prediction, first=len(observations))
        filmed = any(number in self._films for number in self.active)
        chunks = prediction.actions[: len(observations), : config.execute_steps]
        outcomes = self._sessions.step(
            self.active, [np.ascontiguousarray(chunk) for chunk in chunks], every_frame=filmed
        )
        over, again = [], []
        for row, (number, outcome) in enumerate(zip(self.active, outcomes, strict=True)):
            if isinstance(outcome, CodedError):
                self._drop(number, outcome)
                again.append(number)
            elif self._record(number, row, prediction, outcome):
                over.append(number)
        if config.whole_episodes:
            self.active = [number for number in self.active if number not in over]
            for number in again:  # the same start again: its group is not complete without it
                self._num_begun[number] -= 1
            self.begin(again)
        else:
            self.begin(sorted([*over, *again]))

    def finish(self, horizon: int) -> None:
        """Episodes that are still under way end here; they are neither terminated nor truncated."""
        for number in self.active:
            episode = self._episodes[number]
            if episode.decisions:
                self._keep(number, End.HORIZON)
                self._unvalued.append((episode, self._seen[number]))
        if self._unvalued and any(one.decisions[0].value is not None for one in self.kept):
            unvalued, self._unvalued = self._unvalued, []
            prediction = self._predict([seen for _, seen in unvalued], horizon)
            self._set_values(unvalued, prediction, first=0)

    def progress(self, decisions: int, horizon: int) -> dict[str, Any]:
        over = [one.summary() for one in self.kept]
        return {
            "decisions": decisions,
            "of": horizon,
            "episodes": len(over),
            "success_rate": float(np.mean([one.success for one in over])) if over else None,
            "mean_return": float(np.mean([one.total_reward for one in over])) if over else None,
            "dropped": sum(self.dropped.values()),
            "dropped_for": dict(self.dropped),
        }

    def films(self, fps: float) -> list[tuple[int, bytes]]:
        made = [(number, video_of(shown, fps=fps)) for number, shown in self._films.items()]
        return [(number, film) for number, film in made if film is not None]

    def _next_seed(self, number: int) -> int:
        config = self._config
        count = self._num_begun[number]
        self._num_begun[number] += 1
        group = number // config.group_size
        return derive_seed(Use.TRAINING, config.seed, config.position, group, count)

    def _start(self, number: int, seed: int, first: Observation) -> None:
        self._episodes[number] = Episode(
            number=self._num_begun[number],
            env=number,
            group=number // self._config.group_size,
            seed=seed,
        )
        self._seen[number] = first
        if number < self._config.num_videos and self._num_begun[number] == 1:
            self._films[number] = [first]

    def _predict(self, observations: Sequence[Observation], decision: int) -> Prediction:
        config = self._config
        prediction = self._policy.predict(
            observations,
            policy_key=config.policy_key,
            version=self._version,
            seed=derive_seed(Use.PREDICTION, config.seed, config.position, decision),
            timeout_s=config.predict_timeout_s,
        )
        expected = (len(observations), config.chunk)
        if prediction.actions.shape[:2] != expected:
            raise DataError(
                f"the policy gives actions {prediction.actions.shape}, not {(*expected, 'A')}",
                column="actions",
            )
        if isinstance(self._version, int) and prediction.policy_version != self._version:
            raise DataError(
                f"the policy acts with version {prediction.policy_version}, "
                f"{self._version} was asked for",
                column="policy_version",
            )
        self.policy_version = prediction.policy_version
        return prediction

    def _record(self, number: int, row: int, prediction: Prediction, outcome: Outcome) -> bool:
        """Whether the episode ended with this decision."""
        episode, config = self._episodes[number], self._config
        episode.decisions.append(
            Decision(
                seen=Seen.of(self._seen[number], config.cameras, config.image_size),
                frame=episode.num_steps,
                actions=np.array(prediction.actions[row], np.float32),
                policy_version=prediction.policy_version,
                log_prob=None if prediction.log_prob is None else prediction.log_prob[row],
                value=None if prediction.value is None else float(prediction.value[row]),
                latent=None if prediction.latent is None else prediction.latent[row],
                feature=None if prediction.features is None else prediction.features[row],
                outcome=outcome,
            )
        )
        self._seen[number] = outcome.observation
        self.num_clipped += outcome.num_clipped
        film = self._films.get(number)
        if film is not None and self._num_begun[number] == 1:
            film += outcome.frames
        if outcome.terminated:
            episode.final_value = 0.0
            self._keep(number, End.TERMINATED)
        elif outcome.truncated:
            self._keep(number, End.TRUNCATED)
            if prediction.value is not None:
                self._unvalued.append((episode, outcome.observation))
        return outcome.done

    def _keep(self, number: int, end: End) -> None:
        episode, config = self._episodes.pop(number), self._config
        episode.final = Seen.of(self._seen[number], config.cameras, config.image_size)
        episode.end = end
        self.kept.append(episode)

    def _drop(self, number: int, error: CodedError) -> None:
        del self._episodes[number]
        self._films.pop(number, None)
        if isinstance(error, SimulatorError):
            self._note_failure(error)
            return
        self.dropped[End.INVALID_ACTION] += 1
        if not isinstance(error, DataError) or self.dropped[End.INVALID_ACTION] > len(
            self._sessions
        ):
            raise error

    def _note_failure(self, error: CodedError) -> None:
        if not isinstance(error, SimulatorError) or not error.details.get("rebuilt"):
            raise error
        self.dropped[failure_of(error)] += 1

    def _set_values(
        self,
        unvalued: Sequence[tuple[Episode, Observation]],
        prediction: Prediction,
        *,
        first: int,
    ) -> None:
        if prediction.value is not None:
            for at, (episode, _) in enumerate(unvalued):
                episode.final_value = float(prediction.value[first + at])
                if prediction.features is not None:
                    episode.final_feature = prediction.features[first + at]
