"""What tenants decide about their checkpoints: pins, names, times to live, removal.

Tenants only read what the platform published, so the platform carries it out; what is in use by an
evaluation, as the beginning of a run or as its teacher stays whatever is asked (B66).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from vla_platform.control.evaluations import in_use
from vla_platform.control.services import Services
from vla_platform.errors import SpecError
from vla_platform.specs import Float, Int, Spec
from vla_platform.specs.base import Name
from vla_platform.specs.parsing import load_json, spec_error
from vla_storage.checkpoints import CheckpointRef
from vla_storage.leftovers import collect_leftovers
from vla_storage.retention import (
    Reason,
    RetentionPlan,
    RetentionRules,
    carry_out,
    plan_removal,
    plan_retention,
    set_alias,
    set_mark,
)

MOST_REMOVED = 20
"""Removals of one request, each of several objects: other tenants' requests wait for its thread."""
CheckpointId = Annotated[str, Field(min_length=5, max_length=256)]


class Mark(Spec):
    """Change what holds for one checkpoint; what is not named stays as it is."""

    what: Literal["mark"] = "mark"
    checkpoint: CheckpointId
    pinned: bool | None = None
    milestone: bool | None = None
    ttl_s: Float | None = Field(
        None, ge=-1.0, lt=10 * 366 * 86400, description="from now; negative: no time to live"
    )


class Alias(Spec):
    """Give a checkpoint a name, or take the name away."""

    what: Literal["alias"] = "alias"
    policy: Name
    alias: Name
    checkpoint: CheckpointId | None = None


class Prune(Spec):
    """Apply retention rules to a run's checkpoints."""

    what: Literal["prune"] = "prune"
    policy: Name
    run: Annotated[str, Field(min_length=1, max_length=128)]
    keep_last: Int = Field(ge=1, le=1000)
    keep_best: Int = Field(0, ge=0, le=1000)
    milestone_every: Int = Field(0, ge=0)
    dry_run: bool = True


class Removal(Spec):
    """Remove checkpoints of one run by id."""

    what: Literal["delete"] = "delete"
    checkpoints: tuple[CheckpointId, ...] = Field(min_length=1, max_length=1000)
    dry_run: bool = True


CheckpointChange = Annotated[Mark | Alias | Prune | Removal, Field(discriminator="what")]
_CHANGE: TypeAdapter[CheckpointChange] = TypeAdapter(CheckpointChange)


def change(services: Services, tenant: str, text: str) -> dict[str, Any]:
    """Carry out one change; returns the mark, or the plan with what stays and what goes, how many
    are `left` (at most `MOST_REMOVED` go by one request, which is asked again for the rest), and
    how many `leftovers` of uploads that died went with them.

    Raises `SpecError`, `InvalidKeyError`, `CheckpointNotFoundError` (the same for another
    tenant's).
    """
    document = load_json(text)
    try:
        wanted = _CHANGE.validate_json(json.dumps(document))
    except ValidationError as error:
        raise spec_error(error.errors(include_url=False)) from error
    store = services.checkpoints(tenant)
    if isinstance(wanted, Mark):
        given = wanted.model_dump(include={"pinned", "milestone"}, exclude_none=True)
        if wanted.ttl_s is not None:
            given["expires"] = None if wanted.ttl_s < 0 else time.time() + wanted.ttl_s
        return asdict(set_mark(store, wanted.checkpoint, **given))
    if isinstance(wanted, Alias):
        set_alias(store, wanted.alias, wanted.checkpoint, wanted.policy)
        return {"alias": wanted.alias, "checkpoint": wanted.checkpoint}
    protect = in_use(services.ledger.client, tenant)
    if isinstance(wanted, Prune):
        rules = RetentionRules(
            keep_last=wanted.keep_last,
            keep_best=wanted.keep_best,
            milestone_every=wanted.milestone_every,
        )
        plan = plan_retention(store, wanted.policy, rules, workload_id=wanted.run, protect=protect)
    else:
        refs = [CheckpointRef.parse(one) for one in wanted.checkpoints]
        if len({(ref.policy, ref.workload_id) for ref in refs}) > 1:
            raise SpecError("one request removes checkpoints of one run", problems=[])
        plan = plan_removal(store, refs[0].policy, wanted.checkpoints, protect=protect)
    now, collected = plan, 0
    if not wanted.dry_run:
        now = replace(plan, go=plan.go[:MOST_REMOVED])
        carry_out(store, now)
        if isinstance(wanted, Prune):
            collected = len(collect_leftovers(store, wanted.policy))
    return asdict(now) | {"left": len(plan.go) - len(now.go), "leftovers": collected}


def plan_of(raw: dict[str, Any]) -> RetentionPlan:
    """A plan as `change` returned it, after its way through JSON."""

    def pairs(found: list[list[str]]) -> tuple[tuple[str, Reason], ...]:
        return tuple((one, Reason(reason)) for one, reason in found)

    return RetentionPlan(policy=raw["policy"], stay=pairs(raw["stay"]), go=pairs(raw["go"]))
