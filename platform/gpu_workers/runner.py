"""A training worker's loop: lease a group from the ledger, train it, record what took effect.

Between ledger, payload store, Training Model Service and checkpoints; each of them knows no other.
Everything here may die at any line: what was not yet durable is restored and redone
(`mounted_policies`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from vla_platform import tracing, work
from vla_platform.control.plan import Domain
from vla_platform.control.services import Services
from vla_platform.control.training_job import TrainingJob
from vla_platform.errors import LedgerError, UnsoundWorkerError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.gpu_workers.batch_rows import fetch_batch
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.mounted_policies import MountedPolicies
from vla_platform.gpu_workers.rollout_stages import STAGES, RolloutStages
from vla_platform.gpu_workers.rollout_training import RolloutTraining, misfit
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.gpu_workers.training_items import MISFITS, PolicyResult, TrainItem, TrainResult
from vla_platform.metrics.events import Event
from vla_platform.specs import AlgorithmSpec, RLSpec, SFTSpec
from vla_platform.vital import end_process, vital_thread
from vla_storage.errors import CodedError, PayloadError

_log = logging.getLogger(__name__)


class TrainingRunner:
    """One per GPU worker and base model. `drain` is called by one thread at a time."""

    def __init__(
        self,
        services: Services,
        service: TrainingModelService,
        *,
        base_model: str,
        turns: DeviceTurns | None = None,
    ) -> None:
        self._turns = turns or DeviceTurns()
        self._services = services
        self._service = service
        self._base_model = base_model
        self._rollouts = RolloutTraining(services, service, self._turns)
        self.worker = f"gpu-{uuid.uuid4().hex[:12]}"
        self._policies = MountedPolicies(services, service, self._turns, worker=self.worker)
        self._stages = RolloutStages(services, self._rollouts, self._policies, self._fail)
        self._leased: tuple[str, ...] = ()
        self._slots_kept: set[str] | None = None  # as the ledger saw it at the last heartbeat
        self._group = ""
        self._stopping = threading.Event()  # take no further group
        self._closed = threading.Event()
        self._training = threading.Lock()  # held while a slice trains
        self._heart = vital_thread(self._beat, name="heartbeat")
        self._heart.start()
        self._tidier = vital_thread(self._tidy_when_idle, name="tidier")
        self._tidier.start()

    @property
    def num_slots(self) -> int:
        return len(self._policies)

    def drain(self) -> dict[str, Any]:
        """Train what is ready, for one slice. Returns counts for whoever watches."""
        with self._training, self._sound():
            return self._drain()

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """An unsound process ends, and is started anew."""
        try:
            yield
        except UnsoundWorkerError as error:
            end_process(error.code, error)

    def _drain(self) -> dict[str, Any]:
        done = groups = 0
        end = time.monotonic() + self._services.settings.slice_s
        ledger, settings = self._services.ledger, self._services.settings
        try:
            while time.monotonic() < end and not self._stopping.is_set():
                self._tidy_slots()
                jobs = ledger.lease_group(
                    self.worker,
                    self._base_model,
                    max_jobs=settings.max_group,
                    lease_s=settings.lease_s,
                )
                if jobs:
                    reach(Failpoint.AFTER_LEDGER_CLAIM)
                    done += self.train(jobs)
                    groups += 1
                elif self._compute_stages(end):
                    continue  # what its advantages make ready is waited for
                elif not ledger.wait_for_ready(self._base_model, timeout_s=0.2) and groups == 0:
                    break
        finally:
            ledger.draining_ends(self._base_model)
        return {"jobs": done, "groups": groups, "worker": self.worker}

    def train(self, jobs: list[TrainingJob]) -> int:
        """One group. Returns how many jobs took effect.

        Whatever breaks off in the middle leaves slots ahead of the ledger: they are forgotten, so
        that the next lease restores them from their checkpoints. An unsound process just ends.
        """
        self._leased = tuple(job.job_id for job in jobs)
        self._group = uuid.uuid4().hex[:12]
        try:
            return self._train(jobs)
        except UnsoundWorkerError:
            raise  # other ranks would be waited for
        except BaseException:
            for job in jobs:
                self._policies.forget(job.policy_key)
            raise
        finally:
            self._leased = ()

    def _train(self, jobs: list[TrainingJob]) -> int:
        ready: list[tuple[TrainingJob, TrainItem]] = []
        rollouts: list[tuple[TrainingJob, TrainItem]] = []
        leased_s = time.time()
        for job in jobs:
            work.over("queue_wait", job, leased_s - job.queue_wait_ms / 1000, leased_s)
            with work.on_job("fetch", job):
                found = self._prepare(job)
            if found is not None:
                (rollouts if job.task_type == "rl" else ready).append((job, found))
        train = [pair for pair in ready if pair[0].domain == Domain.TRAIN]
        begun_s = time.time()
        with self._turns.training():
            reach(Failpoint.BEFORE_STEP)
            outcomes = self._service.train_group([item for _, item in train])
        for job, _ in train:
            work.over("train", job, begun_s, time.time(), group=self._group, group_size=len(train))
        reach(Failpoint.AFTER_STEP)
        done = 0
        for job, rollout in rollouts:  # ready updates of RL go first; each costs no shared forward
            with work.on_job("update", job):
                updated = self._rollouts.update(job, rollout)
            done += self._settle(job, updated, kind="update")
        for (job, _), outcome in zip(train, outcomes, strict=True):
            done += self._settle(job, outcome, kind="step")
        for job, item in ready:
            if job.domain == Domain.HELDOUT:
                done += self._settle(job, self._heldout(item), kind="heldout")
        return done

    def _prepare(self, job: TrainingJob) -> TrainItem | None:
        """A leased job's policy in its slot, and its data. None: it is dropped, failed or
        postponed, and that is on record."""
        try:
            if not self._policies.hold(job):
                return None
            if job.task_type == "rl":
                return self._rollouts.fetch(job, self._algorithm(job))
            return self._fetch(job)
        except LedgerError as error:
            _log.warning("action=job_dropped job=%s reason=%s", job.job_id, error)
            self._policies.forget(job.policy_key)
        except MISFITS as error:
            self._service.check_device(error)
            self._fail(job, misfit(job, error))
        except UnsoundWorkerError:
            raise
        except CodedError as error:
            self._refuse(job, error)
        return None

    def _refuse(self, job: TrainingJob, error: CodedError) -> None:
        """What a job was not trained for, on whatever rank."""
        if isinstance(error, PayloadError):
            self._lost(job, error)
        elif error.retryable:
            self._postpone(job, error)
        else:
            self._fail(job, error)

    def _lost(self, job: TrainingJob, error: PayloadError) -> None:
        """The samples are gone: they are produced again."""
        try:
            if job.task_type == "rl":
                self._rollouts.lost(job, error)
                return
            _log.warning("action=samples_lost job=%s reason=%s", job.job_id, error)
            slot = self._service.slot(job.policy_key)
            self._services.ledger.rewind(
                job, position=job.position, step=slot.step, samples_lost=True
            )
        except LedgerError as refused:
            _log.warning("action=job_dropped job=%s reason=%s", job.job_id, refused)
            self._policies.forget(job.policy_key)

    def close(self, timeout_s: float = 30.0) -> None:
        """Warm shutdown: what was trained since the last checkpoint is saved, slots go back.

        The running group ends first; another worker goes on where this one stops.
        """
        self._stopping.set()
        with self._training, self._sound():
            self._policies.save_progress()
        self._policies.close(timeout_s)
        self._rollouts.close()
        self._closed.set()
        self._heart.join(5)
        self._tidier.join(5)
        self._services.ledger.leave(self.worker)

    def compute_stages(self) -> int:
        """What jobs of this base model need before their advantages: a teacher's scores, the
        actor's forward. Returns how many were done."""
        with self._training, self._sound():
            return self._compute_stages(time.monotonic() + self._services.settings.slice_s)

    def _compute_stages(self, end: float) -> int:
        done = 0
        for stage in STAGES:
            while time.monotonic() < end and not self._stopping.is_set():
                job = self._services.ledger.lease_stage(
                    stage,
                    self.worker,
                    lease_s=self._services.settings.lease_s,
                    base_model=self._base_model,
                )
                if job is None:
                    break
                if not self._stages.compute(stage, job):
                    self._stopping.wait(1.0)  # a service is down: others' training goes on
                    return done
                done += 1
        return done

    def _algorithm(self, job: TrainingJob) -> AlgorithmSpec:
        spec = self._policies[job.policy_key].spec
        assert isinstance(spec, RLSpec)
        return spec.algorithm

    def _fetch(self, job: TrainingJob) -> TrainItem:
        spec = self._policies[job.policy_key].spec
        assert isinstance(spec, SFTSpec)
        # Held-out losses change nothing: rank 0 computes them alone.
        num_ranks = self._service.ranks.num_ranks if job.domain == Domain.TRAIN else 1
        columns, source = fetch_batch(
            self._services.payloads, job.partition_id, job.tenant_id, num_ranks=num_ranks
        )
        return TrainItem(job.policy_key, columns, spec.gradient_accumulation, source)

    def _heldout(self, item: TrainItem) -> dict[str, Any] | CodedError:
        begun = time.monotonic()
        try:
            with self._turns.training():
                loss = self._service.heldout_loss(item.policy_key, item.columns)
        except CodedError as error:
            return error
        cost_s = time.monotonic() - begun
        step = self._service.slot(item.policy_key).step
        return {"heldout_loss": loss, "step": step, "cost_s": cost_s}

    def _settle(
        self,
        job: TrainingJob,
        outcome: TrainResult | PolicyResult | dict[str, Any] | CodedError,
        *,
        kind: str,
    ) -> int:
        with work.on_job("settle", job):
            done = self._record(job, outcome, kind=kind)
        if done and tracing.is_on():
            with contextlib.suppress(CodedError):  # the step has counted, with its trace or without
                created_ms = int(self._services.ledger.descriptor(job.job_id)["created"])
                tracing.root(
                    job.job_id, created_ms / 1000, time.time(), kind=kind, **work.attributes_of(job)
                )
        return done

    def _record(
        self,
        job: TrainingJob,
        outcome: TrainResult | PolicyResult | dict[str, Any] | CodedError,
        *,
        kind: str,
    ) -> int:
        if isinstance(outcome, CodedError):
            self._refuse(job, outcome)
            return 0
        values = outcome if isinstance(outcome, dict) else asdict(outcome)
        values = {**values, "job_id": job.job_id, "position": job.position, "fence": job.fence}
        values["group"] = self._group
        values["queue_wait_ms"] = job.queue_wait_ms
        if isinstance(outcome, PolicyResult):
            # The versions between the one that acted in the rollout and the one that is updated.
            values["staleness"] = outcome.policy_version - 1 - job.behavior_policy_version
        if isinstance(outcome, TrainResult):
            values["samples_per_s"] = self._policies.sample_rate(job.policy_key, outcome.samples)
        try:
            progress = self._services.ledger.complete(
                job,
                step=values["step"],
                result=values,
                cost_s=values["cost_s"],
                samples=job.sample_count,
            )
        except LedgerError as error:
            _log.warning("action=effect_refused job=%s reason=%s", job.job_id, error)
            self._policies.forget(job.policy_key)
            return 0
        reach(Failpoint.AFTER_STEPLOG)
        self._services.emitter.emit(
            Event(tenant=job.tenant_id, workload=job.workload, kind=kind, values=values)
        )
        self._policies.save_if_due(job, progress, is_step=kind != "heldout")
        return 1

    def _tidy_slots(self) -> None:
        self._policies.drop_distrusted()
        kept, self._slots_kept = self._slots_kept, None
        if kept is not None:
            self._policies.keep_only(kept)

    def _tidy_when_idle(self) -> None:
        """While nothing trains. Apart from the heartbeat, which must not wait for other ranks."""
        while not self._closed.wait(self._services.settings.lease_s / 4):
            if not self._training.acquire(blocking=False):
                continue
            try:
                with self._sound():
                    self._tidy_slots()
            except CodedError as error:
                _log.warning("action=tidying_failed reason=%s", error)
            finally:
                self._training.release()

    def _fail(self, job: TrainingJob, error: CodedError) -> None:
        """One tenant's fault ends one tenant's run."""
        if not self._services.ledger.knows(job.workload):
            self._policies.forget(job.policy_key)  # lost with the ledger; it comes back by itself
            return
        _log.warning("action=run_failed workload=%s reason=%s", job.workload, error)
        self._services.ledger.fail(job.workload, error.to_dict())
        self._policies.forget(job.policy_key)

    def _postpone(self, job: TrainingJob, error: CodedError) -> None:
        """A service is down: that is nobody's fault, so the job goes back, uncounted."""
        _log.warning("action=job_postponed job=%s reason=%s", job.job_id, error)
        self._policies.forget(job.policy_key)
        with contextlib.suppress(LedgerError):
            self._services.ledger.release(job, backs_off=True)

    def _beat(self) -> None:
        lease_s = self._services.settings.lease_s
        most_s = self._services.settings.training_watchdog_s
        while not self._closed.wait(lease_s / 4):
            if (part_s := self._turns.training_part_s) > most_s:
                # The lease would be renewed for ever.
                end_process("training_hangs", f"{part_s:.0f} s in one step")
            try:
                # Again and again: a control Redis that was emptied must learn it anew.
                self._services.ledger.register_base_model(
                    self._base_model, self._service.backbone.facts()
                )
                self._services.ledger.heartbeat(self.worker, lease_s=lease_s, jobs=self._leased)
                self._slots_kept = self._services.ledger.slots_of(self.worker)
            except CodedError as error:
                _log.warning("action=heartbeat_failed reason=%s", error)
