"""What a GPU worker computes for rollouts before their advantages: scores, the actor's forward."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from vla_platform import work
from vla_platform.control import dispatch
from vla_platform.control.leases import given_back, kept_alive
from vla_platform.control.prepared import load_prepared
from vla_platform.control.services import Services
from vla_platform.control.states import JobState, Stage, state_after
from vla_platform.control.training_job import TrainingJob
from vla_platform.control.workloads import load_rl_spec
from vla_platform.errors import LedgerError, UnsoundWorkerError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.gpu_workers.mounted_policies import MountedPolicies
from vla_platform.gpu_workers.rollout_training import RolloutTraining
from vla_platform.specs import DistillationReward
from vla_storage.errors import CodedError

STAGES = (Stage.SCORES, Stage.ACTOR_FORWARD)
_log = logging.getLogger(__name__)


class RolloutStages:
    """Computes leased stages. `fail(job, error)` ends the run of a job that cannot be computed."""

    def __init__(
        self,
        services: Services,
        rollouts: RolloutTraining,
        policies: MountedPolicies,
        fail: Callable[[TrainingJob, CodedError], None],
    ) -> None:
        self._services = services
        self._rollouts = rollouts
        self._policies = policies
        self._fail = fail

    def compute(self, stage: Stage, job: TrainingJob) -> bool:
        """Write the stage's columns and settle it. False: a service is down, it was postponed."""
        ledger = self._services.ledger
        more = {"scored": 1} if stage is Stage.SCORES else {}
        try:
            with work.on_job(str(stage), job), given_back(ledger, job):
                with kept_alive(ledger, job, lease_s=self._services.settings.lease_s):
                    if stage is Stage.SCORES:
                        self._score(job)
                    else:
                        self._rollouts.forward_actor(job, lambda: self._policies.actor(job))
                reach(Failpoint.COLUMNS_WRITTEN)
                state = state_after(job.lifecycle, JobState(job.state))
                if ledger.mark(job, state, **more):
                    dispatch.go_on(job, state)
        except LedgerError as error:
            _log.warning("action=%s_refused job=%s reason=%s", stage, job.job_id, error)
        except UnsoundWorkerError:
            raise
        except CodedError as error:
            if error.retryable:
                return False
            with contextlib.suppress(LedgerError):
                if stage is Stage.SCORES:
                    _log.warning("action=teacher_failed job=%s reason=%s", job.job_id, error)
                    ledger.unscored(job, str(error))
                else:
                    self._fail(job, error)
        return True

    def _score(self, job: TrainingJob) -> None:
        reward = load_rl_spec(self._services, job.tenant_id, job.workload).reward
        assert isinstance(reward, DistillationReward)  # graders have a queue of their own
        student = load_prepared(self._services, job.tenant_id, job.workload)
        self._rollouts.score(job, reward.teacher, student)
