"""Build the ledger again from the object store, after the control Redis lost it or a part of it.

Specs say what was asked for, outcomes what has ended, manifests how far the rest is. Nothing that
the ledger still knows is overwritten, so running this at any time is safe.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from vla_platform.control.ledger import Ledger
from vla_platform.control.outcomes import outcome_key
from vla_platform.control.plan import Plan
from vla_platform.control.prepared import Prepared, prepared_key
from vla_platform.control.states import is_terminal
from vla_platform.control.tenant_records import list_tenants
from vla_platform.control.tenants import restore_acls
from vla_platform.control.workloads import ledger_fields, spec_key, teacher_checkpoint
from vla_platform.specs import RLSpec, WorkloadSpec, parse_spec_json
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import CodedError
from vla_storage.objects import ObjectStore

_log = logging.getLogger(__name__)
BEGUN_KEY = "vla:recovery"
GENERATION_KEY = "vla:generation"
"""The `run_id` of the Redis server whose ledger was last compared with the object store."""


class Stores(Protocol):
    """What recovery reads and writes."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def objects(self) -> ObjectStore: ...
    def checkpoints(self, tenant: str) -> CheckpointStore: ...


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What a recovery did. Workload ids."""

    restored: tuple[str, ...] = ()  # go on from their newest checkpoint, or from the start
    ended: tuple[str, ...] = ()  # known again as ended; nothing of them is redone
    corrected: tuple[str, ...] = ()  # the ledger had forgotten that they ended
    unreadable: tuple[str, ...] = ()  # a spec or manifest does not verify; left alone
    tenants: tuple[str, ...] = ()  # broker users that were applied again


def recover_if_lost(stores: Stores) -> Recovered | None:
    """`recover`, where the Redis server has been restarted or emptied since the last time."""
    run_id = stores.ledger.server_id()
    if stores.ledger.client.get(GENERATION_KEY) == run_id:
        return None
    stores.ledger.client.set(BEGUN_KEY, 1)
    found = recover(stores)
    # A server that was emptied meanwhile has lost this mark, and is compared again.
    if stores.ledger.client.get(BEGUN_KEY) is not None:
        stores.ledger.client.set(GENERATION_KEY, run_id)
    counts = " ".join(f"{name}={len(runs)}" for name, runs in asdict(found).items())
    _log.warning("action=ledger_recovered %s", counts)
    return found


def recover(stores: Stores) -> Recovered:
    """Compare every tenant's workloads in the object store with the ledger, and complete it."""
    done: dict[str, list[str]] = defaultdict(list)
    for tenant in [tenant.tenant_id for tenant in list_tenants(stores.objects)]:
        objects: dict[str, set[str]] = defaultdict(set)
        created: dict[str, float] = {}
        for info in stores.objects.list(f"{tenant}/workloads/"):
            run, _, name = info.key.removeprefix(f"{tenant}/workloads/").partition("/")
            objects[run].add(name)
            if name == "spec.json":
                created[run] = info.modified
        for run, names in objects.items():
            if "spec.json" not in names:
                continue
            try:
                what = _recover_one(stores, tenant, run, names, created[run])
            except (CodedError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, CodedError) and error.retryable:
                    raise
                _log.error("action=not_recovered workload=%s reason=%r", run, error)
                what = "unreadable"
            if what:
                done[what].append(run)
    tenants = restore_acls(stores.ledger.client, stores.objects)
    found = {name: tuple(sorted(runs)) for name, runs in done.items()}
    return Recovered(**found, tenants=tuple(tenants))


def _recover_one(
    stores: Stores, tenant: str, run: str, names: set[str], created_s: float
) -> str | None:
    state, owner = stores.ledger.client.hmget(f"vla:w:{run}", "state", "tenant")
    if owner not in (None, tenant):
        raise ValueError(f"{tenant} has a record of a run of {owner}")
    outcome: dict[str, Any] | None = None
    if "outcome.json" in names:
        outcome = json.loads(stores.objects.get(outcome_key(tenant, run)))
        if not is_terminal(outcome["state"]):
            raise ValueError(f"an outcome {outcome['state']!r} is no end")
    if state is not None:
        if outcome is None or state not in ("pending", "running", "paused"):
            return None
        return _end_again(stores, run, outcome)
    content = stores.objects.get(spec_key(tenant, run))
    spec = parse_spec_json(content)
    prepared = None
    if "prepared.json" in names:
        prepared = Prepared.from_json(stores.objects.get(prepared_key(tenant, run)))
    signature = prepared.schema.signature if prepared else ""
    checkpoints = stores.checkpoints(tenant)
    fields = ledger_fields(
        tenant, spec, content=content, schema_signature=signature,
        teacher=teacher_checkpoint(checkpoints, spec),
    ) | {
        "state": "pending", "created": int(created_s * 1000), "prepared": int(prepared is not None),
        "position": 0, "step": 0, "policy_version": 0, "published_version": 0,
    }  # fmt: skip
    if prepared is not None:
        fields |= _length(spec, prepared)
    if outcome is not None:
        fields |= {
            "state": outcome["state"],
            "reason": json.dumps(outcome["reason"]) if outcome["reason"] else "",
            "base_version": outcome["policy_version"] - outcome["step"],
            **{key: outcome[key] for key in ("step", "position", "policy_version", "checkpoint")},
            "published_version": outcome.get("published_version", 0),
        }
    else:
        fields |= _progress(checkpoints, run, policy=spec.policy)
        done = "step" if isinstance(spec, RLSpec) else "position"
        if prepared is not None and fields[done] >= fields[f"total_{done}s"]:
            fields["state"] = "succeeded"
    if not stores.ledger.restore(run, fields, recorded=outcome is not None):
        return None
    return "restored" if fields["state"] == "pending" else "ended"


def _length(spec: WorkloadSpec, prepared: Prepared) -> dict[str, int]:
    if isinstance(spec, RLSpec):
        return {"total_positions": 0, "total_steps": spec.updates}
    plan = Plan.of(spec, num_samples=prepared.num_samples, num_heldout=prepared.num_heldout)
    return {"total_positions": plan.positions, "total_steps": plan.steps}


def _progress(checkpoints: CheckpointStore, run: str, *, policy: str) -> dict[str, Any]:
    """Where the newest valid checkpoint of the workload lets it go on."""
    newest = checkpoints.latest(policy, run)
    if newest is None:
        return {}
    return {
        "position": newest.position,
        "step": newest.step,
        "policy_version": newest.policy_version,
        "published_version": newest.policy_version,
        "base_version": newest.policy_version - newest.step,
        "checkpoint": newest.checkpoint_id,
    }


def _end_again(stores: Stores, run: str, outcome: dict[str, Any]) -> str | None:
    """An end is final: a server that lost its last second must not run the workload again."""
    if outcome["state"] == "cancelled":
        stores.ledger.cancel(run, json.dumps(outcome["reason"]))
    elif outcome["state"] == "failed":
        stores.ledger.fail(run, outcome["reason"])
    else:
        return None  # the final checkpoint is there: its worker finds that nothing is left to do
    return "corrected"
