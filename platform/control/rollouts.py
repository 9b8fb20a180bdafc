"""The producer of RL training jobs: a reservation becomes a rollout, and its rows a partition."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict

from vla_platform import work
from vla_platform.control import dispatch
from vla_platform.control.leases import given_back, kept_alive
from vla_platform.control.prepared import load_prepared
from vla_platform.control.services import Services
from vla_platform.control.states import PASSING_WAITS, JobState, state_after
from vla_platform.control.training_job import MOST_EPISODES, TrainingJob
from vla_platform.control.workloads import load_rl_spec
from vla_platform.envs.rollout_messages import RolloutConfig, RolloutReport
from vla_platform.errors import LeaseLostError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.schema import Schema
from vla_platform.specs import RLSpec
from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.errors import CodedError

Play = Callable[["Rollout", Callable[[int, int], None]], RolloutReport]
"""`play(rollout, on_progress)`: steps the environments and writes the partition."""


class Rollout:
    """What one reservation asks for."""

    def __init__(self, spec: RLSpec, schema: Schema, job: TrainingJob) -> None:
        assert spec.environment is not None  # nothing else is sent to an environment host
        self.job = job
        self.spec = spec
        self.num_envs = spec.rollout.num_envs
        self.horizon = spec.rollout.horizon
        # Before the first update the policy acts as the checkpoint it begins from.
        fresh = job.behavior_policy_version == job.base_version
        self.version: int | str = spec.init_from if fresh else job.behavior_policy_version
        policy = CheckpointRef.parse(spec.init_from).policy if fresh else spec.policy
        self.config = RolloutConfig(
            tenant=job.tenant_id,
            policy_key=f"{job.tenant_id}/{policy}",
            partition_id=job.partition_id,
            env_id=spec.environment.id,
            cameras=schema.cameras,
            image_size=schema.image_size,
            chunk=schema.chunk,
            env_options=spec.environment.options,
            isolation=spec.environment.isolation,
            execute_steps=spec.rollout.execute_steps,
            whole_episodes=spec.rollout.whole_episodes,
            group_size=spec.rollout.group_size,
            seed=spec.seed,
            position=job.position,
            num_videos=spec.rollout.num_videos,
        )


def produce(services: Services, tenant: str, run: str, play: Play) -> int:
    """Roll out what may be reserved, for one slice; returns how many jobs went on.

    One at a time for each run: a rollout that outlasts the broker's patience has its message come
    again, and whoever gets it would wait, and send itself on, for as long as the run lasts.
    """
    produced, by = 0, secrets.token_hex(8)
    settings, ledger = services.settings, services.ledger
    end = time.monotonic() + settings.slice_s
    try:
        while time.monotonic() < end:
            if not ledger.claim(run, for_s=settings.lease_s, by=by):
                return produced
            asked_s = time.time()
            job = ledger.reserve(run, lease_s=settings.lease_s, limits=settings.reserve_limits())
            if isinstance(job, TrainingJob):
                work.over("reserve", job, asked_s, time.time())
                with work.on_job("rollout", job), given_back(ledger, job):
                    _roll_out(services, job, play, by)
                produced += 1
            elif job in PASSING_WAITS:
                ledger.wait_for_room(run, timeout_s=0.5)
            else:
                return produced
        ledger.release_claim(run, by=by)  # before whoever comes next looks
        dispatch.produce(ledger.workload(run))
    except LeaseLostError:
        pass  # cancelled, sent back or taken over: the ledger knows who goes on
    except CodedError as error:
        if error.retryable or not ledger.knows(run):
            raise  # the reconciler sends this again
        ledger.fail(run, error.to_dict())
    finally:
        ledger.release_claim(run, by=by)
    return produced


def _roll_out(services: Services, job: TrainingJob, play: Play, by: str) -> None:
    spec = load_rl_spec(services, job.tenant_id, job.workload)
    schema = load_prepared(services, job.tenant_id, job.workload).schema
    lease_s = services.settings.lease_s
    with kept_alive(services.ledger, job, lease_s=lease_s, producing=True, by=by) as keeper:
        report = play(
            Rollout(spec, schema, job), lambda done, of: keeper.check(f"{done} of {of} decisions")
        )
        keeper.check()
    reach(Failpoint.PAYLOAD_WRITTEN)
    state = state_after(job.lifecycle, JobState.RESERVED)
    episodes = [asdict(one) for one in report.episodes[:MOST_EPISODES]]
    hint_is_due = services.ledger.mark(
        job,
        state,
        sample_count=report.num_transitions,
        success_rate=report.success_rate,
        episodes=json.dumps(episodes, separators=(",", ":")),
    )
    reach(Failpoint.META_PUBLISHED)
    if hint_is_due:
        with contextlib.suppress(LeaseLostError):
            dispatch.go_on(job, state)
