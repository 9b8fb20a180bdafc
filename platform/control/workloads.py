"""Submit and cancel: what the control worker does with a tenant's request.

The spec goes to S3 before the ledger hears of it, so an id that was returned can always be rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vla_platform.control import dispatch
from vla_platform.control.ledger import workload_id
from vla_platform.control.outcomes import record_outcome
from vla_platform.control.services import Services
from vla_platform.control.states import Lifecycle
from vla_platform.datasets import LeRobotDataset, Statistics, open_dataset
from vla_platform.datasets.locations import locate
from vla_platform.errors import ConflictError, NotFoundError, SpecError, UnavailableError
from vla_platform.schema import Schema
from vla_platform.specs import (
    SFTSpec,
    WorkloadSpec,
    canonical_json,
    nearest,
    parse_spec_json,
)
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import ObjectExistsError, ObjectNotFoundError


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was found out about a workload's data before its first step; kept in S3."""

    schema: Schema
    dataset_digest: str
    train_episodes: tuple[int, ...]
    heldout_episodes: tuple[int, ...]
    num_samples: int
    num_heldout: int
    statistics: dict[str, Statistics]
    num_skipped: int = 0
    version: int = 1

    def to_json(self) -> bytes:
        return canonical_json(
            {
                **self.__dict__,
                "schema": self.schema.to_dict(),
                "statistics": {key: value.to_dict() for key, value in self.statistics.items()},
            }
        )

    @classmethod
    def from_json(cls, text: bytes) -> Prepared:
        raw: dict[str, Any] = json.loads(text)
        raw["schema"] = Schema.from_dict(raw["schema"])
        raw["statistics"] = {
            key: Statistics.from_dict(value, key=key, width=len(value["min"]))
            for key, value in raw["statistics"].items()
        }
        for name in ("train_episodes", "heldout_episodes"):
            raw[name] = tuple(raw[name])
        return cls(**raw)


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
    dataset = open_for(services, tenant, spec)
    schema = derive_schema(services, spec, dataset)
    split_episodes(spec, dataset)
    if spec.init_from is not None:
        check_init(services, tenant, spec.init_from, schema)
    try:
        services.objects.put(spec_key(tenant, run), content, if_absent=True)
    except ObjectExistsError as error:
        if services.objects.get(spec_key(tenant, run)) != content:
            raise ConflictError(
                f"idempotency key {key!r} was used for another spec; choose a new key",
                workload=run,
            ) from error
    fields = ledger_fields(tenant, spec, content=content, schema_signature=schema.signature)
    if services.ledger.submit(run, fields, max_pending=services.settings.max_pending_per_tenant):
        dispatch.prepare(tenant, run)
    return run


def ledger_fields(
    tenant: str, spec: WorkloadSpec, *, content: bytes, schema_signature: str
) -> dict[str, Any]:
    """What the ledger keeps of a spec; `content` is its canonical JSON."""
    return {
        "tenant": tenant,
        "policy": spec.policy,
        "policy_key": f"{tenant}/{spec.policy}",
        "kind": spec.kind,
        "lifecycle": str(Lifecycle.SFT),
        "target": "positions",
        "base_model": spec.base_model,
        "schema_signature": schema_signature,
        "spec_digest": hashlib.sha256(content).hexdigest(),
        "priority": spec.priority,
        "max_in_flight": spec.limits.max_in_flight,
        "max_seconds": spec.limits.max_seconds or 0,
        "display_name": spec.display_name or "",
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


def check_owner(services: Services, tenant: str, run: str) -> None:
    """Another tenant's run is as unknown as one that never was. Raises `NotFoundError`."""
    if services.ledger.workload(run)["tenant"] != tenant:
        raise NotFoundError(f"no run {run}", workload=run)


def open_for(services: Services, tenant: str, spec: SFTSpec) -> LeRobotDataset:
    settings = services.settings
    folder: Path = locate(
        spec.dataset.path,
        tenant=tenant,
        roots=settings.roots(),
        objects=services.objects,
        cache=settings.var / "cache" / "datasets",
    )
    return open_dataset(folder)


def derive_schema(services: Services, spec: SFTSpec, dataset: LeRobotDataset) -> Schema:
    """The interface that spec, dataset and base model have in common."""
    bases = services.ledger.base_models()
    base = bases.get(spec.base_model)
    if base is None:
        if not bases:
            raise UnavailableError("no GPU worker has registered a base model yet; try again")
        hint = nearest(spec.base_model, bases)
        raise SpecError(
            f"base_model {spec.base_model!r} is not served; "
            f"{hint or 'served are ' + ', '.join(sorted(bases))}",
            problems=[{"field": "base_model", "value": spec.base_model, "problem": "not served"}],
        )
    asked = spec.dataset
    cameras = asked.cameras or tuple(sorted(dataset.cameras))
    for camera in cameras:
        dataset.feature(camera)
    if not cameras:
        raise SpecError("the dataset has no camera; a policy needs at least one", problems=[])
    uses_state = asked.state is not None and spec.action_module.state != "none"
    return Schema(
        base_model=spec.base_model,
        base_digest=str(base["digest"]),
        cameras=cameras,
        image_size=int(base["image_size"]),
        state_dim=prod(dataset.feature(asked.state).shape) if uses_state and asked.state else 0,
        action_dim=prod(dataset.feature(asked.action).shape),
        chunk=spec.action_module.chunk,
        action_module=spec.action_module.kind,
        state_input=spec.action_module.state if uses_state else "none",
    )


def check_init(services: Services, tenant: str, checkpoint_id: str, schema: Schema) -> None:
    """A run starts only from a checkpoint of its own tenant and interface (B20, B21).

    Raises `CheckpointNotFoundError`, the same for another tenant's id as for one that never was.
    """
    store = CheckpointStore(
        objects=services.objects, tenant_id=tenant, signing_key=services.signing_key
    )
    found = store.manifest(checkpoint_id).lineage.schema_signature
    if found != schema.signature:
        raise SpecError(
            f"init_from {checkpoint_id}: its schema is {found[:12]}, "
            f"this run's is {schema.signature[:12]}: other cameras, sizes, chunk or base",
            problems=[{"field": "init_from", "value": checkpoint_id, "problem": "other schema"}],
        )


def split_episodes(spec: SFTSpec, dataset: LeRobotDataset) -> tuple[list[int], list[int]]:
    """Training and held-out episodes; by default the last episode is held out."""
    every = [episode.index for episode in dataset.episodes]
    heldout = list(spec.dataset.heldout_episodes)
    if not heldout and spec.dataset.heldout_samples and len(every) > 1:
        free = [index for index in every if index not in (spec.dataset.episodes or ())]
        heldout = free[-1:]
    train = list(spec.dataset.episodes or [index for index in every if index not in heldout])
    for index in (*train, *heldout):
        dataset.episode(index)
    if not train:
        raise SpecError("no episode is left to train on", problems=[])
    return train, heldout


def load_spec(services: Services, tenant: str, run: str) -> WorkloadSpec:
    try:
        return parse_spec_json(services.objects.get(spec_key(tenant, run)))
    except ObjectNotFoundError as error:
        raise NotFoundError(f"no spec of {run} in storage", workload=run) from error


def load_prepared(services: Services, tenant: str, run: str) -> Prepared:
    return Prepared.from_json(services.objects.get(prepared_key(tenant, run)))


def spec_key(tenant: str, run: str) -> str:
    return f"{tenant}/workloads/{run}/spec.json"


def prepared_key(tenant: str, run: str) -> str:
    return f"{tenant}/workloads/{run}/prepared.json"
