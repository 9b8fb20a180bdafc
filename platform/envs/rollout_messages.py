"""What a rollout is asked for, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_platform.envs.runner_pool import Isolation
from vla_platform.envs.trajectories import End, EpisodeSummary


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What a rollout is asked for, beside its size and version."""

    tenant: str
    policy_key: str
    partition_id: str
    env_id: str
    cameras: tuple[str, ...]  # the schema's, in its order
    image_size: int  # the schema's, in pixels
    chunk: int  # the schema's H
    env_options: Mapping[str, Any] = field(default_factory=dict)
    isolation: str = Isolation.THREAD
    execute_steps: int | None = None  # of a chunk before the next prediction; None: all
    whole_episodes: bool = False  # one episode per session, for group-relative advantages
    group_size: int = 1  # sessions that share each initial state
    seed: int = 0
    position: int = 0  # place of the job in its workload's plan
    num_videos: int = 0  # of the first episode of the first sessions
    predict_timeout_s: float = 60.0
    payload_ttl_s: float = 3600.0
    publish_wait_s: float = 300.0  # how long a full payload store is waited for


@dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """What goes back beside the payload: metadata that filters and the ledger need."""

    job_id: str
    partition_id: str
    policy_version: int
    num_rows: int
    num_transitions: int
    num_env_steps: int
    num_clipped: int  # actions that the bounds changed (B37)
    episodes: tuple[EpisodeSummary, ...]  # as in the columns; dropped ones are not among them
    dropped: Mapping[str, int]  # failure or `invalid_action` to number of episodes
    columns: Mapping[str, tuple[int, ...]]  # name to shape
    videos: tuple[str, ...]  # object names
    seconds: float

    @property
    def success_rate(self) -> float:
        over = [one for one in self.episodes if one.end != End.HORIZON]
        return float(np.mean([one.success for one in over])) if over else 0.0
