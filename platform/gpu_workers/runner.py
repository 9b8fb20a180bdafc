"""A training worker's loop: lease a group from the ledger, train it, record what took effect.

Between ledger, payload store, Training Model Service and checkpoints; each of them knows no other.
Everything here may die at any line: what was not yet durable is restored and redone (`_mount`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

from vla_platform import tracing, work
from vla_platform.control import dispatch, evaluations
from vla_platform.control.leases import kept_alive
from vla_platform.control.outcomes import finish_if_through
from vla_platform.control.plan import Domain
from vla_platform.control.prepared import Prepared, load_prepared
from vla_platform.control.services import Services
from vla_platform.control.states import JobState, Stage, state_after
from vla_platform.control.training_job import Progress, TrainingJob
from vla_platform.control.workloads import load_rl_spec, load_spec
from vla_platform.errors import LedgerError, UnsoundWorkerError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.gpu_workers.canary import CanaryProbe
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.publication import CheckpointPublisher, Mounted
from vla_platform.gpu_workers.rollout_training import MISFITS, RolloutTraining, misfit
from vla_platform.gpu_workers.slots import Slot, SlotConfig, SlotState
from vla_platform.gpu_workers.training import (
    PolicyResult,
    TrainingModelService,
    TrainItem,
    TrainResult,
)
from vla_platform.metrics.events import Event
from vla_platform.specs import (
    DEFAULT_EVERY_STEPS,
    AlgorithmSpec,
    DistillationReward,
    RLSpec,
    SFTSpec,
    WorkloadSpec,
)
from vla_storage.errors import CodedError, PayloadError

EVERYTHING = ("head", "state_encoder")
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
        self._mounted: dict[str, Mounted] = {}
        self._leased: tuple[str, ...] = ()
        self._slots_kept: set[str] | None = None  # as the ledger saw it at the last heartbeat
        self._distrusted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._group = ""
        self._stopping = threading.Event()  # take no further group
        self._closed = threading.Event()
        self._training = threading.Lock()  # held while a slice trains
        self._publisher = CheckpointPublisher(services, self._distrusted.put)
        self._canary = CanaryProbe(service.backbone)
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    @property
    def num_slots(self) -> int:
        return len(self._mounted)

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
            self._end_process(error.code, error)

    def _end_process(self, why: str, reason: object) -> NoReturn:
        _log.critical("action=%s reason=%s", why, reason)
        os._exit(os.EX_SOFTWARE)

    def _drain(self) -> dict[str, Any]:
        done = groups = 0
        end = time.monotonic() + self._services.settings.slice_s
        ledger, settings = self._services.ledger, self._services.settings
        try:
            while time.monotonic() < end and not self._stopping.is_set():
                self._drop_distrusted()
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
                elif not ledger.wait_for_ready(self._base_model, timeout_s=0.2) and groups == 0:
                    break
        finally:
            ledger.draining_ends(self._base_model)
        return {"jobs": done, "groups": groups, "worker": self.worker}

    def train(self, jobs: list[TrainingJob]) -> int:
        """One group. Returns how many jobs took effect.

        Whatever breaks off in the middle leaves slots ahead of the ledger: they are forgotten, so
        that the next lease restores them from their checkpoints.
        """
        self._leased = tuple(job.job_id for job in jobs)
        self._group = uuid.uuid4().hex[:12]
        try:
            return self._train(jobs)
        except BaseException:
            for job in jobs:
                self._forget(job.policy_key)
            raise
        finally:
            self._leased = ()

    def _train(self, jobs: list[TrainingJob]) -> int:
        ready: list[tuple[TrainingJob, TrainItem]] = []
        rollouts: list[tuple[TrainingJob, dict[str, Any]]] = []
        leased_s = time.time()
        for job in jobs:
            work.over("queue_wait", job, leased_s - job.queue_wait_ms / 1000, leased_s)
            with work.on_job("fetch", job):
                found = self._prepare(job)
            if isinstance(found, TrainItem):
                ready.append((job, found))
            elif found is not None:
                rollouts.append((job, found))
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

    def _prepare(self, job: TrainingJob) -> TrainItem | dict[str, Any] | None:
        """A leased job's policy in its slot, and its data: an item of a group, or the columns of a
        rollout. None: it is dropped, failed or postponed, and that is on record."""
        try:
            if not self._hold(job):
                return None
            if job.task_type == "rl":
                return self._rollouts.fetch(job, self._algorithm(job))
            return self._fetch(job)
        except LedgerError as error:
            _log.warning("action=job_dropped job=%s reason=%s", job.job_id, error)
            self._forget(job.policy_key)
        except MISFITS as error:
            self._service.check_device(error)
            self._fail(job, misfit(job, error))
        except CodedError as error:
            if error.retryable:
                self._postpone(job, error)
            else:
                self._fail(job, error)
        return None

    def close(self, timeout_s: float = 30.0) -> None:
        """Warm shutdown: what was trained since the last checkpoint is saved, slots go back.

        The running group ends first; another worker goes on where this one stops.
        """
        self._stopping.set()
        with self._training:
            self._save_progress()
        self._publisher.close(timeout_s)
        self._rollouts.close()
        self._closed.set()
        self._heart.join(5)
        self._services.ledger.leave(self.worker)

    def _save_progress(self) -> None:
        for policy_key, mounted in list(self._mounted.items()):
            try:
                run = self._services.ledger.workload(mounted.last_job.workload)
            except CodedError as error:
                _log.warning("action=progress_not_saved policy=%s reason=%s", policy_key, error)
                continue
            slot = self._service.slot(policy_key)
            if (
                run["state"] in ("running", "paused")
                and int(run["step"]) == slot.step > mounted.saved_step
            ):
                self._save(slot, mounted, mounted.last_job, position=int(run["position"]))

    def _hold(self, job: TrainingJob) -> bool:
        """Have the job's policy in its slot. False: the job will come again."""
        mounted = self._mounted.get(job.policy_key)
        fresh = mounted is None or mounted.workload != job.workload
        if (job.mount or fresh) and self._mount(job):
            return False
        self._mounted[job.policy_key].last_job = job
        return True

    def _algorithm(self, job: TrainingJob) -> AlgorithmSpec:
        spec = self._mounted[job.policy_key].spec
        assert isinstance(spec, RLSpec)
        return spec.algorithm

    def compute_stages(self) -> int:
        """What jobs of this base model need before their advantages: a teacher's scores, the
        actor's forward. Returns how many were done."""
        done = 0
        end = time.monotonic() + self._services.settings.slice_s
        with self._training, self._sound():
            for stage in (Stage.SCORES, Stage.ACTOR_FORWARD):
                while time.monotonic() < end and not self._stopping.is_set():
                    job = self._services.ledger.lease_stage(
                        stage,
                        self.worker,
                        lease_s=self._services.settings.lease_s,
                        base_model=self._base_model,
                    )
                    if job is None:
                        break
                    if not self._compute_stage(stage, job):
                        return done  # a service is down: others' training goes on meanwhile
                    done += 1
        return done

    def _compute_stage(self, stage: Stage, job: TrainingJob) -> bool:
        """False: it was postponed."""
        ledger = self._services.ledger
        more = {"scored": 1} if stage is Stage.SCORES else {}
        try:
            with (
                work.on_job(str(stage), job),
                kept_alive(ledger, job, lease_s=self._services.settings.lease_s),
            ):
                if stage is Stage.SCORES:
                    self._score(job)
                else:
                    self._rollouts.forward_actor(job, lambda: self._actor(job))
            reach(Failpoint.COLUMNS_WRITTEN)
            state = state_after(job.lifecycle, JobState(job.state))
            if ledger.mark(job, state, **more):
                dispatch.go_on(job, state)
        except LedgerError as error:
            _log.warning("action=%s_refused job=%s reason=%s", stage, job.job_id, error)
        except UnsoundWorkerError:
            raise
        except CodedError as error:
            with contextlib.suppress(LedgerError):
                if error.retryable:
                    ledger.release(job)
                    return False
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

    def _actor(self, job: TrainingJob) -> Slot:
        """The policy as it was published last; its slot may be another worker's."""
        mounted = self._mounted.get(job.policy_key)
        if mounted is not None and mounted.workload == job.workload:
            return self._service.slot(job.policy_key)
        spec = load_spec(self._services, job.tenant_id, job.workload)
        prepared = load_prepared(self._services, job.tenant_id, job.workload)
        store = self._publisher.store(job.tenant_id)
        found = store.restore(spec.policy, job.workload)
        params = found.module if found else store.load(spec.init_from or "").module
        return self._service.build(self._config(job, spec, prepared), params=params)

    def _fetch(self, job: TrainingJob) -> TrainItem | None:
        mounted = self._mounted[job.policy_key]
        try:
            columns = self._services.payloads.arrays(job.partition_id, job.tenant_id)
        except PayloadError as error:
            _log.warning("action=samples_lost job=%s reason=%s", job.job_id, error)
            slot = self._service.slot(job.policy_key)
            self._services.ledger.rewind(
                job, position=job.position, step=slot.step, samples_lost=True
            )
            return None
        assert isinstance(mounted.spec, SFTSpec)
        return TrainItem(job.policy_key, columns, mounted.spec.gradient_accumulation)

    def _mount(self, job: TrainingJob) -> bool:
        """Restore the newest checkpoint into a slot. True: work is redone, drop the job."""
        tenant = job.tenant_id
        spec = load_spec(self._services, tenant, job.workload)
        prepared = load_prepared(self._services, tenant, job.workload)
        store = self._publisher.store(tenant)
        found = store.restore(spec.policy, job.workload)
        config = self._config(job, spec, prepared)
        position = step = 0
        parent = spec.init_from
        if found is not None:
            state = SlotState(found.module, found.optimizer, found.state)
            self._service.mount(config, state=state)
            position, step = found.manifest.position, found.manifest.step
            parent = found.manifest.checkpoint_id
            self._services.ledger.checkpointed(
                job.workload, position=position, checkpoint=parent, step=step
            )
            evaluations.begin_if_due(self._services, tenant, job.workload, spec, found.manifest)
        else:
            params = store.load(spec.init_from).module if spec.init_from else None
            slot = self._service.mount(config, params=params)
            slot.policy_version = job.base_version
        self._mounted[job.policy_key] = Mounted(spec, prepared, job, parent=parent, saved_step=step)
        _log.info(
            "action=slot_mounted policy=%s step=%d worker=%s", job.policy_key, step, self.worker
        )
        rewound = self._services.ledger.rewind(job, position=position, step=step)
        if rewound:
            finish_if_through(self._services.ledger, job.workload)
        return rewound

    def _config(self, job: TrainingJob, spec: WorkloadSpec, prepared: Prepared) -> SlotConfig:
        return SlotConfig(
            policy_key=job.policy_key,
            schema=prepared.schema,
            action_module=prepared.action_module,
            optimizer=spec.optimizer,
            total_steps=int(self._services.ledger.workload(job.workload)["total_steps"]),
            seed=spec.seed,
            trainable=spec.trainable if isinstance(spec, SFTSpec) else EVERYTHING,
            statistics=prepared.statistics,
            normalization=prepared.normalization,
            algorithm=spec.algorithm if isinstance(spec, RLSpec) else None,
        )

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
            self._fail(job, outcome)
            return 0
        values = outcome if isinstance(outcome, dict) else asdict(outcome)
        values = {**values, "job_id": job.job_id, "position": job.position, "fence": job.fence}
        values["group"] = self._group
        values["queue_wait_ms"] = job.queue_wait_ms
        if isinstance(outcome, PolicyResult):
            # The versions between the one that acted in the rollout and the one that is updated.
            values["staleness"] = outcome.policy_version - 1 - job.behavior_policy_version
        if isinstance(outcome, TrainResult):
            values["samples_per_s"] = self._rate(job.policy_key, outcome.samples)
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
            self._forget(job.policy_key)
            return 0
        reach(Failpoint.AFTER_STEPLOG)
        self._services.emitter.emit(
            Event(tenant=job.tenant_id, workload=job.workload, kind=kind, values=values)
        )
        self._save_if_due(job, progress, is_step=kind != "heldout")
        return 1

    def _rate(self, policy_key: str, samples: int) -> float:
        """Samples per second since the policy's step before; the wait for data counts."""
        mounted, now = self._mounted[policy_key], time.monotonic()
        rate = samples / max(now - mounted.settled_at, 1e-6)
        mounted.settled_at = now
        return round(rate, 2)

    def _save_if_due(self, job: TrainingJob, progress: Progress, *, is_step: bool) -> None:
        mounted = self._mounted[job.policy_key]
        slot = self._service.slot(job.policy_key)
        every = mounted.spec.checkpoint.every_steps or DEFAULT_EVERY_STEPS
        # The last step's checkpoint is the one that is taken when the plan is through.
        own = mounted.spec.evaluation
        due = is_step and slot.step < slot.config.total_steps
        due = due and (
            slot.step % every == 0 or (own is not None and slot.step % own.every_updates == 0)
        )
        if progress.through:
            self._service.backbone.verify()  # frozen means frozen: nothing of a drift is published
        if progress.through or due:
            self._save(slot, mounted, job, position=job.position + 1)

    def _save(self, slot: Slot, mounted: Mounted, job: TrainingJob, *, position: int) -> None:
        with work.on_job("save", job):
            canary = None
            try:
                with self._turns.training():
                    canary = self._canary.ask(slot.module)
            except MISFITS as error:  # the step has counted: it is saved without a canary
                self._service.check_device(error)
                _log.warning("action=canary_failed policy=%s reason=%r", job.policy_key, error)
            self._publisher.save(slot, mounted, job, position=position, canary=canary)

    def _drop_distrusted(self) -> None:
        """Give back the slots whose checkpoint failed: they are restored from the one before."""
        while not self._distrusted.empty():
            policy_key = self._distrusted.get()
            self._forget(policy_key)
            self._services.ledger.leave(self.worker, policy_key)
        # Runs that have ended, and slots that another worker took over: their memory is free again.
        kept, self._slots_kept = self._slots_kept, None
        if kept is not None:
            for policy_key in self._mounted.keys() - kept:
                self._forget(policy_key)

    def _fail(self, job: TrainingJob, error: CodedError) -> None:
        """One tenant's fault ends one tenant's run."""
        if not self._services.ledger.knows(job.workload):
            self._forget(job.policy_key)  # lost with the ledger; it comes back by itself
            return
        _log.warning("action=run_failed workload=%s reason=%s", job.workload, error)
        self._services.ledger.fail(job.workload, error.to_dict())
        self._forget(job.policy_key)

    def _postpone(self, job: TrainingJob, error: CodedError) -> None:
        """A service is down: that is nobody's fault, so the job goes back, uncounted."""
        _log.warning("action=job_postponed job=%s reason=%s", job.job_id, error)
        self._forget(job.policy_key)
        with contextlib.suppress(LedgerError):
            self._services.ledger.release(job)
        self._stopping.wait(1.0)

    def _forget(self, policy_key: str) -> None:
        self._mounted.pop(policy_key, None)
        self._service.unmount(policy_key)

    def _beat(self) -> None:
        lease_s = self._services.settings.lease_s
        most_s = self._services.settings.training_watchdog_s
        while not self._closed.wait(lease_s / 4):
            if (part_s := self._turns.training_part_s) > most_s:
                # The lease would be renewed for ever.
                self._end_process("training_hangs", f"{part_s:.0f} s in one step")
            try:
                if self._training.acquire(blocking=False):
                    try:
                        self._drop_distrusted()
                    finally:
                        self._training.release()
                # Again and again: a control Redis that was emptied must learn it anew.
                self._services.ledger.register_base_model(
                    self._base_model, self._service.backbone.facts()
                )
                self._services.ledger.heartbeat(self.worker, lease_s=lease_s, jobs=self._leased)
                self._slots_kept = self._services.ledger.slots_of(self.worker)
            except CodedError as error:
                _log.warning("action=heartbeat_failed reason=%s", error)
