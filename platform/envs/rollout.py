"""The rollout of one training job: sessions driven by a policy, rows into the payload store.

Vectorised over the job's sessions: one prediction for all, then one chunk in each. An episode that
ends is followed by the next one in the same session; its true last observation is kept (PF-33), and
what is left of its chunk is never played in the next (PF-35). Rows are published once, whole, at
the end: a rollout that dies leaves nothing, and done again it draws the same episodes (F53).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vla_platform.envs.groups import SessionGroup
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.policies import Policy, needs_expert
from vla_platform.envs.rollout_messages import RolloutConfig, RolloutReport
from vla_platform.envs.rollout_play import RolloutPlay
from vla_platform.envs.runner_pool import Isolation
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.envs.trajectories import columns_of, renumbered
from vla_platform.errors import DataError
from vla_storage.errors import PayloadFullError, StorageUnavailableError
from vla_storage.payloads import PayloadStore

Emit = Callable[[str, dict[str, Any]], None]
"""`emit(kind, values)`: one metric event."""


def rollout(
    config: RolloutConfig,
    job_id: str,
    num_envs: int,
    horizon: int,
    version: int | str | None,
    *,
    host: EnvironmentHost,
    policy: Policy,
    payloads: PayloadStore,
    keep_video: Callable[[str, bytes], str] | None = None,
    emit: Emit | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RolloutReport:
    """Play `horizon` decisions in each of `num_envs` sessions and publish the rows.

    `on_progress(decisions, of)` is called after each; raising from it (`LeaseLostError`) ends the
    rollout without a trace. `keep_video(name, mp4)` stores a video and returns where.

    Raises `SimulatorError` where a session cannot be rebuilt any more, `DataError` where the policy
    keeps giving invalid actions, what `policy.predict` raises, and `StorageUnavailableError` where
    the payload store stays full.
    """
    started = time.monotonic()
    request = EnvironmentRequest(
        env_id=config.env_id, options=config.env_options, expert=needs_expert(policy)
    )
    with SessionGroup(
        host, tenant=config.tenant, request=request, num_sessions=num_envs,
        isolation=Isolation(config.isolation),
    ) as sessions:  # fmt: skip
        play = RolloutPlay(config, sessions, policy, version)
        play.begin(range(num_envs))
        for decision in range(horizon):
            if not play.active:
                break
            play.decide(decision)
            if on_progress is not None:
                on_progress(decision + 1, horizon)
            if emit is not None:
                emit("rollout", play.progress(decision + 1, horizon))
        play.finish(horizon)
    episodes = renumbered(play.kept)
    if not episodes:
        raise DataError(f"{job_id}: no episode is left of {dict(play.dropped)}", job_id=job_id)
    columns = columns_of(episodes, chunk=config.chunk)
    videos = tuple(
        keep_video(f"{job_id}-{number:03d}.mp4", film)
        for number, film in play.films(sessions.info.fps)
        if keep_video is not None
    )
    _publish(config, payloads, columns)
    return RolloutReport(
        job_id=job_id,
        partition_id=config.partition_id,
        policy_version=play.policy_version,
        num_rows=len(columns["next_row"]),
        num_transitions=int(columns["is_transition"].sum()),
        num_env_steps=sum(one.num_steps for one in episodes),
        num_clipped=play.num_clipped,
        episodes=tuple(one.summary() for one in episodes),
        dropped=dict(play.dropped),
        columns={name: _shape(column) for name, column in columns.items()},
        videos=videos,
        seconds=time.monotonic() - started,
    )


def _shape(column: Any) -> tuple[int, ...]:
    """Of a ragged column the number of rows."""
    return tuple(column.shape) if isinstance(column, np.ndarray) else (len(column),)


def _publish(config: RolloutConfig, payloads: PayloadStore, columns: dict[str, Any]) -> None:
    """All columns or none. A full store is waited for: trainers drain it (F39)."""
    # What a rollout left that died after its write and before its report.
    end = time.monotonic() + config.publish_wait_s
    pause_s = 0.2
    while True:
        try:
            payloads.clear(config.partition_id, config.tenant)
            payloads.put(config.partition_id, config.tenant, columns, ttl_s=config.payload_ttl_s)
            return
        except (StorageUnavailableError, PayloadFullError):
            if time.monotonic() + pause_s > end:
                raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
