"""The policies in a training worker's slots: restored when they come, saved while they are here.

What is in a slot may be ahead of what is durable, never of what can be redone: a policy that comes
begins at its newest checkpoint, and the ledger is rewound to it.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Set

from vla_platform import work
from vla_platform.control import evaluations
from vla_platform.control.outcomes import finish_if_through
from vla_platform.control.prepared import Prepared, load_prepared
from vla_platform.control.services import Services
from vla_platform.control.training_job import Progress, TrainingJob
from vla_platform.control.workloads import load_spec
from vla_platform.gpu_workers.canary import CanaryProbe
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.publication import CheckpointPublisher, Mounted
from vla_platform.gpu_workers.slot_state import SlotConfig, SlotState
from vla_platform.gpu_workers.slots import Slot
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.gpu_workers.training_items import MISFITS
from vla_platform.specs import DEFAULT_EVERY_STEPS, RLSpec, SFTSpec, WorkloadSpec
from vla_storage.errors import CodedError

EVERYTHING = ("head", "state_encoder")
_log = logging.getLogger(__name__)


class MountedPolicies:
    """One per training runner; changed by one thread at a time."""

    def __init__(
        self, services: Services, service: TrainingModelService, turns: DeviceTurns, *, worker: str
    ) -> None:
        self._services = services
        self._service = service
        self._turns = turns
        self._worker = worker
        self._mounted: dict[str, Mounted] = {}
        self._distrusted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._publisher = CheckpointPublisher(services, self._distrusted.put)
        self._canary = CanaryProbe(service.backbone)

    def __len__(self) -> int:
        return len(self._mounted)

    def __getitem__(self, policy_key: str) -> Mounted:
        return self._mounted[policy_key]

    def hold(self, job: TrainingJob) -> bool:
        """Have the job's policy in its slot. False: the job will come again."""
        mounted = self._mounted.get(job.policy_key)
        fresh = mounted is None or mounted.workload != job.workload
        if (job.mount or fresh) and self._mount(job):
            return False
        self._mounted[job.policy_key].last_job = job
        return True

    def actor(self, job: TrainingJob) -> Slot:
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

    def sample_rate(self, policy_key: str, samples: int) -> float:
        """Samples per second since the policy's step before; the wait for data counts."""
        mounted, now = self._mounted[policy_key], time.monotonic()
        rate = samples / max(now - mounted.settled_at, 1e-6)
        mounted.settled_at = now
        return round(rate, 2)

    def save_if_due(self, job: TrainingJob, progress: Progress, *, is_step: bool) -> None:
        """After a job has taken effect."""
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

    def save_progress(self) -> None:
        """Stage what was trained since the last checkpoints."""
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

    def drop_distrusted(self) -> None:
        """Give back the slots whose checkpoint failed: they are restored from the one before."""
        while not self._distrusted.empty():
            policy_key = self._distrusted.get()
            self.forget(policy_key)
            self._services.ledger.leave(self._worker, policy_key)

    def keep_only(self, kept: Set[str]) -> None:
        """Free the slots of runs that have ended, and those that another worker took over."""
        for policy_key in self._mounted.keys() - kept:
            self.forget(policy_key)

    def forget(self, policy_key: str) -> None:
        """Its next lease restores the policy from its newest checkpoint."""
        self._mounted.pop(policy_key, None)
        self._service.unmount(policy_key)

    def close(self, timeout_s: float) -> None:
        """Publish what is staged."""
        self._publisher.close(timeout_s)

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
            self._service.mount(config, params=params, policy_version=job.base_version)
        self._mounted[job.policy_key] = Mounted(spec, prepared, job, parent=parent, saved_step=step)
        _log.info(
            "action=slot_mounted policy=%s step=%d worker=%s", job.policy_key, step, self._worker
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

    def _save(self, slot: Slot, mounted: Mounted, job: TrainingJob, *, position: int) -> None:
        with work.on_job("save", job):
            self._service.check_ranks(job.policy_key)  # what they differ in is not published
            canary = None
            try:
                with self._turns.training():
                    canary = self._canary.ask(slot.module)
            except MISFITS as error:  # the step has counted: it is saved without a canary
                self._service.check_device(error)
                _log.warning("action=canary_failed policy=%s reason=%r", job.policy_key, error)
            self._publisher.save(slot, mounted, job, position=position, canary=canary)
