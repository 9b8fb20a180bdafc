"""Recorded episodes as rows of a rollout: what offline reinforcement learning samples from.

A decision is a chunk of actions that begins at every `stride`-th frame. Its targets are all actions
up to the episode's end; its rewards those of the frames until the next decision, so that each is
counted once. Log-probabilities are not among the columns: nobody recorded the policy that acted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vla_platform.datasets.demonstrations import Demonstrations
from vla_platform.datasets.lerobot import LeRobotDataset
from vla_platform.errors import DataError, DatasetError

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Outcome:
    """How a recorded episode went."""

    rewards: npt.NDArray[np.float64]  # (T,)
    success: bool

    @property
    def length(self) -> int:
        return len(self.rewards)


class Experience:
    """Episodes with rewards of one dataset. `demonstrations` has its samples and pictures.

    With a `reward_key` an action earns what that column says; otherwise the last action of an
    episode that succeeded earns 1. An episode succeeded where any frame's `success_key` is true;
    without that key, where it earned something. `on_bad_row` as in `Demonstrations`, for whole
    episodes: a return with a hole in it is none.
    """

    def __init__(
        self,
        dataset: LeRobotDataset,
        demonstrations: Demonstrations,
        *,
        reward_key: str | None,
        success_key: str | None,
        stride: int,
        on_bad_row: Literal["fail", "skip"] = "fail",
    ) -> None:
        self._dataset = dataset
        self._demonstrations = demonstrations
        self._stride = stride
        self._outcomes: dict[int, Outcome] = {}
        self.skipped: dict[int, str] = {}  # episodes that were left out, and why
        for key in filter(None, (reward_key, success_key)):
            _check_scalar(dataset, key)
        for episode in demonstrations.episodes:
            try:
                self._outcomes[episode] = self._outcome(episode, reward_key, success_key)
            except DataError as error:
                if on_bad_row == "fail":
                    raise
                self.skipped[episode] = error.message
        self.episodes = tuple(self._outcomes)
        if not self.episodes:
            raise DatasetError(
                f"{dataset.path}: no usable episode of {len(demonstrations.episodes)}",
                path=str(dataset.path),
                skipped=self.skipped,
            )

    def outcome(self, episode: int) -> Outcome:
        return self._outcomes[episode]

    def num_decisions(self, episode: int) -> int:
        return -(-self._outcomes[episode].length // self._stride)

    def columns(self, episodes: Sequence[int], *, first: int = 0) -> Columns:
        """Rows of whole episodes, numbered from `first`, as `vla_platform.envs.trajectories` writes
        them. The row of what was seen last repeats the last frame: datasets end with an action.
        """
        places: list[tuple[int, int]] = []
        numbers, next_row, decides = [], [], []
        for number, episode in enumerate(episodes, start=first):
            frames = range(0, self._outcomes[episode].length, self._stride)
            for frame in frames:
                places.append((episode, frame))
                next_row.append(len(places))
                decides.append(True)
            places.append((episode, self._outcomes[episode].length - 1))
            next_row.append(-1)
            decides.append(False)
            numbers += [number] * (len(frames) + 1)
        is_transition = np.array(decides)
        found = self._demonstrations.at(places).columns
        padded = found["actions_is_pad"] | ~is_transition[:, None]
        last = np.array([row < 0 for row in (*next_row[1:], 0)])  # an episode's last decision
        success = np.array([self._outcomes[episode].success for episode, _ in places])
        return {
            **found,
            "actions_is_pad": padded,
            "executed_actions": np.where(padded[..., None], 0, found["actions"]),
            "is_transition": is_transition,
            "next_row": np.array(next_row, np.int64),
            "episode": np.array(numbers, np.int64),
            "group": np.array(numbers, np.int64),
            "rewards": self._rewards(places, is_transition, padded.shape[1]),
            "terminated": last & is_transition & success,
            "truncated": last & is_transition & ~success,
            "success": last & is_transition & success,
        }

    def close(self) -> None:
        self._demonstrations.close()

    def _rewards(
        self, places: Sequence[tuple[int, int]], is_transition: npt.NDArray[np.bool_], chunk: int
    ) -> npt.NDArray[np.float32]:
        rewards = np.zeros((len(places), chunk), np.float32)
        for row, (episode, frame) in enumerate(places):
            if is_transition[row]:
                earned = self._outcomes[episode].rewards[frame : frame + self._stride]
                rewards[row, : len(earned)] = earned
        return rewards

    def _outcome(self, episode: int, reward_key: str | None, success_key: str | None) -> Outcome:
        table = self._dataset.frame_table(episode)
        length = len(table["index"])
        if self._demonstrations.num_samples_of(episode) != length:
            raise DataError(f"frames of episode {episode} were left out", episode=episode)
        success = success_key is not None and bool(table[success_key].reshape(-1).any())
        if reward_key is None:
            rewards = np.zeros(length)
            rewards[-1] = success
            return Outcome(rewards, success)
        rewards = table[reward_key].reshape(-1).astype(np.float64)
        if not np.isfinite(rewards).all():
            frame = int(np.argmax(~np.isfinite(rewards)))
            raise DataError(
                f"{reward_key} of episode {episode}, frame {frame} is not finite",
                episode=episode,
                frame=frame,
                column=reward_key,
            )
        return Outcome(rewards, success if success_key is not None else bool(rewards.sum() > 0))


def _check_scalar(dataset: LeRobotDataset, key: str) -> None:
    feature = dataset.feature(key)
    if feature.is_image or feature.shape != (1,) or feature.dtype == "string":
        raise DatasetError(
            f"{key} is {feature.dtype} of shape {feature.shape}; one number per frame is needed",
            feature=key,
        )
