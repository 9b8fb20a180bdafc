"""The advantage worker: what a rollout's actions were worth, written beside its rows.

It reads the few small columns that the arithmetic needs, judges groups on metadata, and drops jobs
that would teach nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.control import dispatch
from vla_platform.control.leases import given_back, kept_alive
from vla_platform.control.services import Services
from vla_platform.control.stage_work import compute_waiting
from vla_platform.control.states import DropReason, JobState, Stage
from vla_platform.control.training_job import MOST_EPISODES, SAMPLES_TTL_S, TrainingJob
from vla_platform.control.workloads import load_rl_spec
from vla_platform.errors import DataError, LeaseLostError
from vla_platform.rl.advantages import (
    Level,
    Rows,
    discounted_returns,
    generalized_advantages,
    group_relative,
    normalized,
    over_rows,
    returns_with_baseline,
)
from vla_platform.rl.groups import (
    SCORE_HOOKS,
    SHAPE_HOOKS,
    EpisodeMeta,
    find_hook,
    judge,
    without_zero_groups,
)
from vla_platform.rl.rewards import SCORE_COLUMNS, rescored
from vla_platform.specs import AWRSpec, GRPOSpec, PPOSpec, ReinforceSpec, RLSpec
from vla_storage.errors import CodedError, PayloadNotFoundError

ROW_COLUMNS = ("rewards", "actions_is_pad", "next_row", "is_transition", "terminated", "episode")
MISFITS = (ValueError, TypeError, KeyError, IndexError)
"""What columns of the wrong shape or kind raise, somewhere in numpy."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The late columns of a partition, or why it trains nothing."""

    columns: dict[str, npt.NDArray[Any]]
    drop: DropReason | None = None


def judge_rollout(
    spec: RLSpec, columns: dict[str, npt.NDArray[Any]], episodes: list[EpisodeMeta]
) -> Judged:
    """Advantages, returns and what is to be trained. Shapes: R rows, H chunk.

    columns: `ROW_COLUMNS`, for PPO and AWR the values: `actor_value` or `value`; where it was
    scored, one of `SCORE_COLUMNS`, which replaces the rewards.
    `advantages` (R, H) float32, `returns` (R,) float32, `trained` (R, H) bool.
    """
    if set(SCORE_COLUMNS) & set(columns):
        columns, episodes = rescored(columns, episodes)
    rows = Rows.of(columns)
    algorithm = spec.algorithm
    trained = rows.valid
    if isinstance(algorithm, PPOSpec):
        values = columns["actor_value" if "actor_value" in columns else "value"]
        found = generalized_advantages(
            rows,
            values.astype(np.float64),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            level=Level(algorithm.level),
        )
        advantages, returns = found.advantages, found.returns
    elif isinstance(algorithm, ReinforceSpec):
        found = returns_with_baseline(
            rows,
            gamma=algorithm.gamma,
            level=Level(algorithm.level),
            baseline=None if algorithm.baseline == "mean" else 0.0,
        )
        advantages, returns = found.advantages, found.returns
    elif isinstance(algorithm, AWRSpec):
        ahead = columns["actor_value"] if algorithm.baseline == "value" else None
        returns = discounted_returns(rows, gamma=algorithm.gamma, values=ahead)
        expected = returns[rows.is_transition].mean() if ahead is None else ahead
        advantages = np.where(rows.valid, (returns - expected)[:, None], 0.0)
    else:
        kept, of_episode, drop = _by_group(spec, algorithm, episodes)
        if drop is not None:
            return Judged(columns={}, drop=drop)
        advantages = over_rows(of_episode, columns["episode"], rows)
        trained = rows.valid & kept[columns["episode"]][:, None]
        returns = np.zeros(len(rows.next_row))
    if not isinstance(algorithm, GRPOSpec) and algorithm.normalize_advantages:
        advantages = normalized(advantages, trained)
    # Equal returns weigh equally: imitation teaches whatever the advantages are.
    teaches = trained if isinstance(algorithm, AWRSpec) else advantages[trained]
    if not np.any(teaches):
        return Judged(columns={}, drop=DropReason.ZERO_ADVANTAGE)
    judged = {"advantages": advantages.astype(np.float32), "trained": trained}
    if isinstance(algorithm, PPOSpec) or (
        isinstance(algorithm, AWRSpec) and algorithm.baseline == "value"
    ):
        judged["returns"] = returns.astype(np.float32)
    return Judged(columns=judged)


def _by_group(
    spec: RLSpec, algorithm: GRPOSpec, episodes: list[EpisodeMeta]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64], DropReason | None]:
    """Which episodes are trained, the advantage of each, and why there is none."""
    num = max(one.episode for one in episodes) + 1
    kept, advantage = np.zeros(num, np.bool_), np.zeros(num)
    lowest, highest = algorithm.pass_rates
    verdict = judge(episodes, lowest=lowest, highest=highest)
    if not verdict.kept:
        return kept, advantage, DropReason.REJECTED_BY_PASSRATE
    scored = list(verdict.kept)
    for hook in spec.score_hooks:
        scored = find_hook(hook.name, SCORE_HOOKS)(scored, hook.options)
    of = group_relative(
        np.array([one.score for one in scored]),
        np.array([one.group for one in scored]),
        scale=algorithm.scale,
    )
    for hook in spec.shape_hooks:
        of = find_hook(hook.name, SHAPE_HOOKS)(scored, of, hook.options)
    mask = np.ones(len(scored), np.bool_)
    if not algorithm.keep_zero_groups:
        mask, _ = without_zero_groups(scored, of)
    for one, value, is_kept in zip(scored, of, mask, strict=True):
        kept[one.episode], advantage[one.episode] = is_kept, value
    return kept, advantage, None if mask.any() else DropReason.ZERO_ADVANTAGE


def compute_ready(services: Services, worker: str) -> int:
    """Lease and compute what waits, for one slice; returns how many jobs that were."""
    return compute_waiting(services, Stage.ADVANTAGES, worker, _compute)


def _compute(services: Services, job: TrainingJob) -> None:
    ledger = services.ledger
    try:
        with given_back(ledger, job):
            with kept_alive(ledger, job, lease_s=services.settings.lease_s) as keeper:
                drop = _write_advantages(services, job)
                keeper.check()
            if drop is not None:
                ledger.drop(job, drop)
            elif ledger.mark(job, JobState.READY):
                dispatch.train(job)
    except LeaseLostError as error:
        _log.warning("action=advantages_refused job=%s reason=%s", job.job_id, error)
    except PayloadNotFoundError as error:
        _log.warning("action=samples_lost job=%s reason=%s", job.job_id, error)
        with contextlib.suppress(LeaseLostError):
            ledger.drop(job, DropReason.SAMPLES_LOST)
    except MISFITS as error:
        wrong = DataError(f"the rows of {job.job_id} cannot be judged: {error!r}")
        ledger.fail(job.workload, wrong.to_dict())
    except CodedError as error:
        if error.retryable:
            raise
        ledger.fail(job.workload, error.to_dict())


def _write_advantages(services: Services, job: TrainingJob) -> DropReason | None:
    """Why the rollout trains nothing; None: its advantages are there."""
    spec = load_rl_spec(services, job.tenant_id, job.workload)
    names = set(services.payloads.metadata(job.partition_id, job.tenant_id))
    if {"advantages", "trained"} <= names:  # a tenant's own algorithm
        return None
    missing = sorted(set(ROW_COLUMNS) - names)
    if missing and names:
        raise DataError(
            f"columns {', '.join(missing)} are missing, and so are `advantages`, `trained`",
            column=missing[0],
        )
    told = services.ledger.descriptor(job.job_id)
    wanted = [*ROW_COLUMNS, *(names & {"value", "actor_value", "group", "success"})]
    if "scored" in told:  # what a late grader wrote counts for nothing
        wanted += names & {*SCORE_COLUMNS, "log_prob", "actor_log_prob"}
    columns = services.payloads.arrays(job.partition_id, job.tenant_id, wanted)
    judged = judge_rollout(spec, columns, episodes_of(told, columns))
    if judged.drop is None:
        services.payloads.put(
            job.partition_id, job.tenant_id, judged.columns, ttl_s=SAMPLES_TTL_S, wait_s=5.0
        )
    return judged.drop


def columns_of_summaries(descriptor: dict[str, str], there: Collection[str]) -> set[str]:
    """What `episodes_of` reads of the rows, beside `episode` and `is_transition`: nothing where the
    job's descriptor tells of every episode."""
    if 0 < len(json.loads(descriptor["episodes"])) < MOST_EPISODES:
        return set()
    return {"actions_is_pad", "rewards", *({"group", "success"} & set(there))}


def episodes_of(
    descriptor: dict[str, str], columns: dict[str, npt.NDArray[Any]]
) -> list[EpisodeMeta]:
    """The summaries that a rollout left with its job; of a tenant's own rows, or of very many
    episodes, from the rows."""
    told = json.loads(descriptor["episodes"])
    if told and len(told) > int(columns["episode"].max()):
        return [
            EpisodeMeta(
                episode=one["episode"],
                group=one["group"],
                success=one["success"],
                score=one["total_reward"],
                num_steps=one["num_steps"],
            )
            for one in told
        ]
    executed = ~columns["actions_is_pad"].astype(bool) & columns["is_transition"][:, None]
    rewards = np.where(executed, columns["rewards"], 0.0).sum(axis=1)
    found = []
    for episode in np.unique(columns["episode"]):
        of = columns["episode"] == episode
        group = columns["group"][of][0] if "group" in columns else 0
        success = columns["success"][of].any() if "success" in columns else rewards[of].sum() > 0
        found.append(
            EpisodeMeta(
                episode=int(episode),
                group=int(group),
                success=bool(success),
                score=float(rewards[of].sum()),
                num_steps=int(executed[of].sum()),
            )
        )
    return found
