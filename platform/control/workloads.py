"""Submit and cancel: what the control worker does with a tenant's request.

The spec goes to S3 before the ledger hears of it, so an id that was returned can always be rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import replace
from typing import Any

from vla_platform import work
from vla_platform.control import admission, dispatch, usage
from vla_platform.control.evaluations import checkpoint_of
from vla_platform.control.maintenance import refuse_in_maintenance
from vla_platform.control.outcomes import record_outcome
from vla_platform.control.services import Services
from vla_platform.control.states import JobState, Lifecycle, state_after
from vla_platform.control.tenant_records import read_tenant
from vla_platform.control.training_job import TrainingJob
from vla_platform.errors import ConflictError, LeaseLostError, NotFoundError, QuotaError, SpecError
from vla_platform.specs import (
    DistillationReward,
    EnvironmentReward,
    RLSpec,
    SFTSpec,
    WorkloadSpec,
    canonical_json,
    parse_spec_json,
)
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import ObjectExistsError, ObjectNotFoundError

_log = logging.getLogger(__name__)
BATCH_LEASE_S = 600.0
"""How long a tenant may take to make the samples of a batch that it has reserved."""


def workload_id(tenant: str, kind: str, key: str) -> str:
    """A run's id follows from its idempotency key: a retried submit cannot make a second run."""
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()
    return f"{kind}-{digest[:20]}"


def submit(services: Services, tenant: str, spec_json: str, key: str) -> str:
    """Validate again, derive the schema, write spec and ledger; returns the run's id.

    Raises `SpecError`, `DatasetError`, `ConflictError` (same key, other spec), `QuotaError`.
    """
    spec = parse_spec_json(spec_json)
    content = canonical_json(spec.model_dump(mode="json"))
    digest = hashlib.sha256(content).hexdigest()
    run = workload_id(tenant, spec.kind, key)
    with contextlib.suppress(NotFoundError):
        # An id that was returned once is returned again, whatever became of the data since.
        if services.ledger.workload(run)["spec_digest"] == digest:
            return run
    with work.on_run("submit", tenant, run):
        return _take(services, tenant, run, spec, content=content, key=key)


def _take(
    services: Services, tenant: str, run: str, spec: WorkloadSpec, *, content: bytes, key: str
) -> str:
    refuse_in_maintenance(services.ledger.client)
    usage.check_budget(services, read_tenant(services.objects, tenant))
    signature = admission.check(services, tenant, spec)
    is_mine = True
    try:
        services.objects.put(spec_key(tenant, run), content, if_absent=True)
    except ObjectExistsError as error:
        is_mine = False
        if services.objects.get(spec_key(tenant, run)) != content:
            raise ConflictError(
                f"idempotency key {key!r} was used for another spec; choose a new key",
                workload=run,
            ) from error
    fields = ledger_fields(
        tenant, spec, content=content, schema_signature=signature,
        teacher=teacher_checkpoint(services.checkpoints(tenant), spec),
    )  # fmt: skip
    most = services.settings.max_pending_per_tenant
    try:
        is_new = services.ledger.submit(run, fields, max_pending=most)
    except QuotaError:
        # A refused spec must not be recovered. One that was there before may have been accepted,
        # by a ledger that has lost it since.
        if is_mine:
            services.objects.delete(spec_key(tenant, run))
        raise
    if is_new:
        _log.info("action=submitted policy=%s kind=%s", spec.policy, spec.kind)
        dispatch.prepare(tenant, run)
    return run


def teacher_checkpoint(store: CheckpointStore, spec: WorkloadSpec) -> str:
    """Id of the checkpoint whose policy scores the run; empty where none does, or where that
    version was published without one."""
    if not (isinstance(spec, RLSpec) and isinstance(spec.reward, DistillationReward)):
        return ""
    teacher = spec.reward.teacher
    if isinstance(teacher.version, str):
        return teacher.version
    return checkpoint_of(store, teacher.policy, teacher.version)


def ledger_fields(
    tenant: str, spec: WorkloadSpec, *, content: bytes, schema_signature: str, teacher: str
) -> dict[str, Any]:
    """What the ledger keeps of a spec; `content` is its canonical JSON, `teacher` its
    `teacher_checkpoint`."""
    return {
        "tenant": tenant,
        "policy": spec.policy,
        "policy_key": f"{tenant}/{spec.policy}",
        "kind": spec.kind,
        **_path_of(spec),
        "base_model": spec.base_model,
        "schema_signature": schema_signature,
        "spec_digest": hashlib.sha256(content).hexdigest(),
        "init_from": spec.init_from or "",
        "teacher": teacher,
        "priority": spec.priority,
        "max_in_flight": spec.limits.max_in_flight,
        "max_seconds": spec.limits.max_seconds or 0,
        "display_name": spec.display_name or "",
    }


def _path_of(spec: WorkloadSpec) -> dict[str, Any]:
    """What the ledger does differently for fine-tuning and for reinforcement learning."""
    if isinstance(spec, SFTSpec):
        return {"lifecycle": str(Lifecycle.SFT), "target": "positions"}
    forward = spec.algorithm.actor_forward
    path = {
        "lifecycle": str(Lifecycle.RL_ACTOR_FORWARD if forward else Lifecycle.RL),
        "target": "steps",
        # No version acted in recorded data: they are never stale.
        "max_policy_staleness": -1 if spec.data else spec.max_policy_staleness,
        "max_dropped": spec.max_dropped,
        "harness": spec.environment.id.partition("/")[0] if spec.environment else "",
        "recorded": int(spec.data is not None),
    }
    if isinstance(spec.reward, EnvironmentReward):
        return path
    scored = Lifecycle.RL_SCORED_ACTOR_FORWARD if forward else Lifecycle.RL_SCORED
    teacher = spec.reward.teacher if isinstance(spec.reward, DistillationReward) else None
    return path | {
        "lifecycle": str(scored),
        "scored_by": (teacher.base_model or spec.base_model) if teacher else "",
        "score_within_ms": round(1000 * spec.reward.deadline_s),
        "on_unscored": spec.reward.on_failure,
    }


def cancel(services: Services, tenant: str, run: str) -> str:
    """Final and repeatable: what is on record before the answer is not run again by anybody."""
    check_owner(services, tenant, run)
    state = services.ledger.cancel(run, json.dumps({"code": "cancelled", "message": "by tenant"}))
    record_outcome(services, run)
    return state


def pause(services: Services, tenant: str, run: str) -> str:
    """Begin no further training job; what is in flight ends."""
    check_owner(services, tenant, run)
    services.ledger.pause(run)
    return services.ledger.workload(run)["state"]


def resume(services: Services, tenant: str, run: str) -> str:
    check_owner(services, tenant, run)
    services.ledger.resume(run)
    return services.ledger.workload(run)["state"]


def reserve_batch(services: Services, tenant: str, run: str, token: str) -> dict[str, Any]:
    """The next training job of a run whose samples the tenant gives itself; the same for the same
    `token`, for requests are sent again.

    Returns `job_id, partition_id, fence, position, policy_version`. Raises `QuotaError` with what
    it waits for: try again later.
    """
    check_owner(services, tenant, run)
    w = services.ledger.workload(run)
    if w["kind"] != "rl" or w.get("harness") or w.get("recorded") == "1":
        raise SpecError(
            f"{run} makes its own samples; `environment: null` takes yours", problems=[]
        )
    key = f"vla:batch:{run}:{token[:64]}"
    known = services.ledger.client.get(key)
    if known is not None:
        found: dict[str, Any] = json.loads(known)
        return found
    job = services.ledger.reserve(
        run, lease_s=BATCH_LEASE_S, limits=services.settings.reserve_limits()
    )
    if isinstance(job, str):
        raise QuotaError(f"{run} takes no batch now: {job}", workload=run, waits_for=job)
    found = {
        "job_id": job.job_id,
        "partition_id": job.partition_id,
        "fence": job.fence,
        "position": job.position,
        "policy_version": job.behavior_policy_version,
    }
    if services.ledger.client.set(key, json.dumps(found), ex=int(BATCH_LEASE_S), nx=True):
        return found
    services.ledger.release(job)  # the same request, twice at once: the other one has reserved
    return reserve_batch(services, tenant, run, token)


def release_batch(services: Services, tenant: str, run: str, job_id: str, fence: str) -> str:
    """Give a reserved batch back, which the next `reserve_batch` takes: its samples are not coming.
    Returns the job's state; what is no longer reserved goes on, and what was given back stays so.
    """
    held = _batch(services, tenant, run, job_id, fence)
    if held.state == JobState.RESERVED:
        with contextlib.suppress(LeaseLostError):  # sent again, or too late: handed to another
            services.ledger.release(held)
    return str(held.state)


def batch_state(services: Services, tenant: str, run: str, job_id: str) -> dict[str, str]:
    """What became of a batch: its job's `state` and `terminal_reason`."""
    check_owner(services, tenant, run)
    found = services.ledger.descriptor(job_id)
    if found["workload"] != run:
        raise NotFoundError(f"no training job {job_id[:160]} of {run}", workload=run)
    return {name: found.get(name, "") for name in ("state", "terminal_reason")}


def submit_batch(
    services: Services, tenant: str, run: str, job_id: str, fence: str, samples: str
) -> str:
    """The reserved job's samples are in its partition: train them."""
    held = _batch(services, tenant, run, job_id, fence)
    if not samples.isdecimal() or len(samples) > 12:
        raise SpecError(f"{samples[:20]!r} is no number of samples", problems=[])
    if held.state != JobState.RESERVED:
        return held.state  # sent again: it is on its way
    state = state_after(held.lifecycle, JobState.RESERVED)
    services.ledger.mark(held, state, sample_count=int(samples), episodes="[]")
    dispatch.go_on(held, state)
    return str(state)


def _batch(services: Services, tenant: str, run: str, job_id: str, fence: str) -> TrainingJob:
    """The training job as who reserved it holds it. Raises `NotFoundError`."""
    check_owner(services, tenant, run)
    job = TrainingJob.from_hash(services.ledger.descriptor(job_id))
    if job.workload != run or not fence.isdecimal() or len(fence) > 12:
        raise NotFoundError(f"no training job {job_id[:160]} of {run}", workload=run)
    return replace(job, fence=int(fence))


def check_owner(services: Services, tenant: str, run: str) -> None:
    """Another tenant's run is as unknown as one that never was. Raises `NotFoundError`."""
    if services.ledger.workload(run)["tenant"] != tenant:
        raise NotFoundError(f"no run {run}", workload=run)


def load_rl_spec(services: Services, tenant: str, run: str) -> RLSpec:
    spec = load_spec(services, tenant, run)
    if not isinstance(spec, RLSpec):
        raise SpecError(f"{run} is no reinforcement learning", problems=[])
    return spec


def load_spec(services: Services, tenant: str, run: str) -> WorkloadSpec:
    try:
        return parse_spec_json(services.objects.get(spec_key(tenant, run)))
    except ObjectNotFoundError as error:
        raise NotFoundError(f"no spec of {run} in storage", workload=run) from error


def spec_key(tenant: str, run: str) -> str:
    return f"{tenant}/workloads/{run}/spec.json"
