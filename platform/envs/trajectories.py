"""Episodes as rows: what a rollout writes into the payload store.

A row is one observation, each stored once. Where the policy decided, the row has its chunk, what
was executed of it and what came of it; where an episode ended, or the rollout did, one more row
holds the true final observation (PF-33), so that every decision has a `next_row`.

Columns, leading B, with C cameras, P = image size, H = chunk:

    images (B, C, P, P, 3) uint8, state (B, S), prompt (B, L)
    is_transition (B,) bool     false: a final observation, only good for its value
    next_row (B,) int64         the row of the observation that followed; -1 for final ones
    actions (B, H, A)           as the policy drew them: log-probabilities belong to these
    executed_actions (B, H, A)  after clipping (B37)
    actions_is_pad (B, H) bool  true past what was executed
    rewards (B, H)              one per executed action
    terminated, truncated, success (B,) bool   how the episode ended with this decision
    value (B,), log_prob (B, H)                where the policy gives them
    latent (B, K, H, A)                        what was drawn, in normalised units
    feature, ragged (L, D)                     as the prediction computed it; empty where none did
    policy_version, episode, frame, env, group (B,) int64
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.datasets.frames import resize
from vla_platform.datasets.prompts import encode_prompts
from vla_platform.datasets.video import Pixels
from vla_platform.envs.base import Observation, matching_cameras
from vla_platform.envs.sessions import Outcome

Columns = dict[str, Any]
"""Dense columns are arrays with leading B, ragged ones lists of B arrays."""


class End(StrEnum):
    """How an episode ended."""

    TERMINATED = "terminated"
    """The task's own end, success or failure."""
    TRUNCATED = "truncated"
    """The time limit; no termination."""
    HORIZON = "horizon"
    """The rollout ended before the episode did."""
    INVALID_ACTION = "invalid_action"
    """The policy's action was no finite action of this environment (B36); rows are dropped."""
    FAILED = "failed"
    """The environment failed; rows are dropped."""


@dataclass(frozen=True)
class Seen:
    """An observation as the model takes it."""

    frames: tuple[Pixels, ...]  # resized, one per camera in the schema's order
    state: npt.NDArray[np.float32]  # Shape: (S,)
    task: str

    @classmethod
    def of(cls, observation: Observation, cameras: Sequence[str], image_size: int) -> Seen:
        names = matching_cameras(cameras, observation.images)
        frames = tuple(resize(observation.images[name], image_size) for name in names)
        return cls(frames, observation.state, observation.task)


@dataclass
class Decision:
    """One prediction and what came of it."""

    seen: Seen
    frame: int  # step of the episode
    actions: npt.NDArray[np.float32]  # Shape: (H, A)
    policy_version: int
    log_prob: npt.NDArray[Any] | None
    value: float | None
    outcome: Outcome | None = None
    latent: npt.NDArray[Any] | None = None  # (K, H, A)
    feature: npt.NDArray[Any] | None = None  # (L, D)


@dataclass(frozen=True)
class EpisodeSummary:
    """What a filter or an operator wants to know of an episode without its rows."""

    episode: int
    env: int
    group: int
    seed: int
    end: str
    success: bool
    total_reward: float
    num_steps: int


@dataclass
class Episode:
    """An episode while it is recorded."""

    number: int
    env: int
    group: int
    seed: int
    decisions: list[Decision] = field(default_factory=list)
    final: Seen | None = None
    final_value: float | None = None
    final_feature: npt.NDArray[Any] | None = None
    end: End = End.HORIZON

    @property
    def num_steps(self) -> int:
        return sum(one.outcome.num_steps for one in self.decisions if one.outcome is not None)

    def summary(self) -> EpisodeSummary:
        outcomes = [one.outcome for one in self.decisions if one.outcome is not None]
        return EpisodeSummary(
            episode=self.number,
            env=self.env,
            group=self.group,
            seed=self.seed,
            end=str(self.end),
            success=any(outcome.success for outcome in outcomes),
            total_reward=float(sum(outcome.rewards.sum() for outcome in outcomes)),
            num_steps=self.num_steps,
        )


def columns_of(episodes: Sequence[Episode], *, chunk: int) -> Columns:
    """The rows of complete episodes, one after the other. Each must have a final observation."""
    rows: list[tuple[Episode, Decision | None]] = []
    next_row: list[int] = []
    for episode in episodes:
        for decision in episode.decisions:
            rows.append((episode, decision))
            next_row.append(len(rows))
        rows.append((episode, None))
        next_row.append(-1)
    seen = [_seen(episode, decision) for episode, decision in rows]
    action_dim = episodes[0].decisions[0].actions.shape[1]
    columns: Columns = {
        "images": np.stack([np.stack(one.frames) for one in seen])
        if seen[0].frames
        else np.zeros((len(rows), 0, 1, 1, 3), np.uint8),
        "state": np.stack([one.state for one in seen]),
        "prompt": encode_prompts([one.task for one in seen]),
        "is_transition": np.array([decision is not None for _, decision in rows]),
        "next_row": np.array(next_row, np.int64),
    }
    for name in ("episode", "frame", "env", "group", "policy_version"):
        columns[name] = np.array([_numbers_of(*row)[name] for row in rows], np.int64)
    columns |= _actions(rows, chunk=chunk, action_dim=action_dim)
    return columns | _estimates(rows)


def _seen(episode: Episode, decision: Decision | None) -> Seen:
    if decision is not None:
        return decision.seen
    assert episode.final is not None
    return episode.final


def _numbers_of(episode: Episode, decision: Decision | None) -> dict[str, int]:
    last = episode.decisions[-1]
    return {
        "episode": episode.number,
        "frame": decision.frame if decision is not None else episode.num_steps,
        "env": episode.env,
        "group": episode.group,
        "policy_version": (decision or last).policy_version,
    }


def _actions(
    rows: Sequence[tuple[Episode, Decision | None]], *, chunk: int, action_dim: int
) -> Columns:
    num = len(rows)
    columns: Columns = {
        "actions": np.zeros((num, chunk, action_dim), np.float32),
        "executed_actions": np.zeros((num, chunk, action_dim), np.float32),
        "actions_is_pad": np.ones((num, chunk), np.bool_),
        "rewards": np.zeros((num, chunk), np.float32),
        "terminated": np.zeros(num, np.bool_),
        "truncated": np.zeros(num, np.bool_),
        "success": np.zeros(num, np.bool_),
    }
    for row, (_, decision) in enumerate(rows):
        if decision is None or decision.outcome is None:
            continue
        outcome, length = decision.outcome, decision.outcome.num_steps
        columns["actions"][row] = decision.actions
        columns["executed_actions"][row, :length] = outcome.actions
        columns["actions_is_pad"][row, :length] = False
        columns["rewards"][row, :length] = outcome.rewards
        for name in ("terminated", "truncated", "success"):
            columns[name][row] = getattr(outcome, name)
    return columns


def _estimates(rows: Sequence[tuple[Episode, Decision | None]]) -> Columns:
    """Values and log-probabilities, where the policy gave them; 0 where they mean nothing."""
    first = rows[0][1]
    assert first is not None
    columns: Columns = {}
    if first.value is not None:
        columns["value"] = np.array(
            [(one.value if one is not None else episode.final_value) or 0.0
             for episode, one in rows], np.float32
        )  # fmt: skip
    if first.log_prob is not None:
        empty = np.zeros_like(first.log_prob)
        columns["log_prob"] = np.stack(
            [one.log_prob if one is not None and one.log_prob is not None else empty
             for _, one in rows]
        ).astype(np.float32)  # fmt: skip
    if first.latent is not None:
        blank = np.zeros_like(first.latent, np.float32)
        columns["latent"] = np.stack(
            [one.latent if one is not None and one.latent is not None else blank for _, one in rows]
        ).astype(np.float32)
    decisions = [one for _, one in rows if one is not None]
    if all(one.feature is not None for one in decisions):
        width = np.shape(decisions[0].feature)[1]  # type: ignore[arg-type]
        nothing = np.zeros((0, width), np.float32)
        columns["feature"] = [
            feature if feature is not None else nothing
            for feature in (
                one.feature if one is not None else episode.final_feature for episode, one in rows
            )
        ]
    return columns


def renumbered(episodes: Sequence[Episode]) -> list[Episode]:
    """Episodes numbered from 0 in order of environment and time."""
    ordered = sorted(episodes, key=lambda one: (one.env, one.number))
    return [replace(one, number=number) for number, one in enumerate(ordered)]
