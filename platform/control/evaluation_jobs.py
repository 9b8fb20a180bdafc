"""Evaluations that a tenant asks for once."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from vla_platform.control.evaluations import Outstanding, asked_of, begin, evaluations_key, now
from vla_platform.control.requests import token_of
from vla_platform.control.schedule_firings import resolve
from vla_platform.control.schedules import check_evaluation
from vla_platform.control.services import Services
from vla_platform.errors import QuotaError
from vla_platform.specs.evaluation import EvaluationSpec
from vla_platform.specs.parsing import parse_as

MOST_OUTSTANDING = 64
"""Evaluations of a tenant, of whatever origin, above which it may ask for no more."""
_EVALUATION = TypeAdapter(EvaluationSpec)


def parse_evaluation(text: str | bytes) -> EvaluationSpec:
    """Raises `SpecError` naming every problem."""
    return parse_as(_EVALUATION, text)


def evaluate(services: Services, tenant: str, text: str, request_id: str) -> dict[str, Any]:
    """Begin it; the version is resolved here. Returns its `evaluation` id and `policy_version`; the
    same request again begins nothing and returns the same.

    Raises `SpecError`, `NotFoundError` (no such policy, or nothing published), `QuotaError`.
    """
    spec = parse_evaluation(text)
    check_evaluation(services, tenant, spec)
    version, checkpoint = resolve(services, tenant, spec)
    client, key = services.ledger.client, evaluations_key(tenant)
    evaluation_id = f"once-{token_of(tenant, request_id)}"
    known = Outstanding(
        evaluation_id=evaluation_id,
        policy=spec.policy,
        policy_version=version,
        suite=spec.suite,
        due=now(client),
        sent=0.0,
        checkpoint=checkpoint,
        asked=asked_of(spec),
    )
    if not client.hexists(key, evaluation_id) and client.hlen(key) >= MOST_OUTSTANDING:
        raise QuotaError(
            f"{MOST_OUTSTANDING} evaluations are under way; ask again when some have ended",
            tenant=tenant,
        )
    if client.hsetnx(key, evaluation_id, known.to_json()):
        begin(services, tenant, known)
    return {"evaluation": evaluation_id, "policy_version": version}
