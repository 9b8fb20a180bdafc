"""From a mounted slot to a visible checkpoint: staged, uploaded, published, told to the ledger."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch

from vla_platform import work
from vla_platform.control import evaluations
from vla_platform.control.outcomes import finish_if_through
from vla_platform.control.prepared import Prepared
from vla_platform.control.services import Services
from vla_platform.control.training_job import TrainingJob
from vla_platform.errors import LeaseLostError
from vla_platform.failpoints import Failpoint, reach, reach_in_storage
from vla_platform.gpu_workers.slots import Slot
from vla_platform.metrics.events import Event
from vla_platform.specs import WorkloadSpec
from vla_storage.canary import Canary
from vla_storage.checkpoint_types import Checkpoint, CheckpointHeader
from vla_storage.checkpoints import CheckpointStore
from vla_storage.manifests import Lineage, Manifest
from vla_storage.retention import apply_retention
from vla_storage.staging import CheckpointWriter

_log = logging.getLogger(__name__)


class Mounted:
    """What a worker remembers of the workload whose policy is in a slot."""

    def __init__(
        self,
        spec: WorkloadSpec,
        prepared: Prepared,
        job: TrainingJob,
        *,
        parent: str | None,
        saved_step: int,
    ) -> None:
        self.spec = spec
        self.prepared = prepared
        self.workload = job.workload
        self.last_job = job
        self.parent = parent  # the checkpoint that the next one follows
        self.saved_step = saved_step  # newest step that was staged; a failed one is distrusted
        self.settled_at = time.monotonic()


class CheckpointPublisher:
    """Saves slots off the training path.

    `distrust(policy_key)` is called, from the writer's thread, for a policy whose checkpoint failed
    for good: the ledger would wait for it for ever.
    """

    def __init__(self, services: Services, distrust: Callable[[str], None]) -> None:
        self._services = services
        self._distrust = distrust
        self._specs: dict[str, WorkloadSpec] = {}  # by workload
        self._writer = CheckpointWriter(
            services.settings.var / "staging", on_published=self._on_published
        )

    def store(self, tenant: str) -> CheckpointStore:
        return replace(self._services.checkpoints(tenant), failpoint=reach_in_storage)

    def save(
        self,
        slot: Slot,
        mounted: Mounted,
        job: TrainingJob,
        *,
        position: int,
        canary: Canary | None,
    ) -> None:
        """Stage the slot as it is now; returns before anything is uploaded."""
        state = slot.state()
        prepared = mounted.prepared
        header = CheckpointHeader(
            policy=mounted.spec.policy,
            workload_id=job.workload,
            step=slot.step,
            policy_version=slot.policy_version,
            position=position,
            lineage=Lineage(
                spec_digest=self._services.ledger.workload(job.workload)["spec_digest"],
                dataset_digest=prepared.dataset_digest,
                base_digest=prepared.schema.base_digest,
                schema_signature=prepared.schema.signature,
                parent=mounted.parent,
                versions={
                    "torch": torch.__version__,
                    "vla-platform": importlib.metadata.version("vla-platform"),
                },
            ),
            canary=canary,
        )
        checkpoint = Checkpoint(
            header=header, module=state.module, optimizer=state.optimizer, state=state.scalars
        )
        self._specs[job.workload] = mounted.spec
        saving = self._writer.save(
            self.store(job.tenant_id), checkpoint, guard=lambda: self._still_ours(job)
        )
        reach(Failpoint.STAGE_DONE)
        saving.add_done_callback(functools.partial(self._saved, job, time.time()))
        mounted.saved_step = slot.step
        mounted.parent = f"{header.policy}/{header.workload_id}/{header.step}"

    def close(self, timeout_s: float) -> None:
        """Publish what is staged."""
        self._writer.close(timeout_s)

    def _still_ours(self, job: TrainingJob) -> None:
        """Right before a manifest: a cancelled run or a lost slot publishes nothing."""
        if not self._services.ledger.owns_slot(job):
            raise LeaseLostError(f"{job.workload} is not ours any more: nothing is published")

    def _saved(self, job: TrainingJob, staged_s: float, saving: Future[Manifest]) -> None:
        work.over("publish", job, staged_s, time.time())
        error = saving.exception()
        if error is not None and not isinstance(error, LeaseLostError):
            _log.error("action=checkpoint_failed workload=%s reason=%s", job.workload, error)
            self._distrust(job.policy_key)

    def _on_published(self, store: CheckpointStore, manifest: Manifest) -> None:
        run, ledger = manifest.workload_id, self._services.ledger
        ledger.checkpointed(
            run,
            position=manifest.position,
            checkpoint=manifest.checkpoint_id,
            step=manifest.step,
        )
        # Inference serves the newest checkpoint that anybody can verify.
        ledger.publish_version(
            f"{store.tenant_id}/{manifest.policy}",
            manifest.policy_version,
            base_model=ledger.workload(run)["base_model"],
        )
        values = {
            "step": manifest.step,
            "checkpoint": manifest.checkpoint_id,
            "policy_version": manifest.policy_version,
            "size_bytes": manifest.size_bytes,
        }
        self._services.emitter.emit(
            Event(tenant=store.tenant_id, workload=run, kind="checkpoint", values=values)
        )
        spec = self._specs[run]
        evaluations.begin_if_due(self._services, store.tenant_id, run, spec, manifest)
        rules = spec.checkpoint
        apply_retention(
            store,
            manifest.policy,
            keep_last=rules.keep_last,
            keep_best=rules.keep_best,
            milestone_every=rules.milestone_every or 0,
            workload_id=run,
            protect=evaluations.in_use(ledger.client, store.tenant_id),
        )
        if finish_if_through(ledger, run):
            del self._specs[run]
