"""How a workload ended, written beside its spec: what recovery must not run again."""

from __future__ import annotations

import contextlib
import json

from vla_platform.control.ledger import Ledger
from vla_platform.control.services import Services
from vla_platform.control.states import is_terminal
from vla_platform.errors import NotFoundError
from vla_platform.specs import canonical_json
from vla_storage.errors import ObjectExistsError


def outcome_key(tenant: str, run: str) -> str:
    return f"{tenant}/workloads/{run}/outcome.json"


def finish_if_through(ledger: Ledger, run: str) -> bool:
    """End a workload whose last position, or for RL whose last step, is durable."""
    w = ledger.workload(run)
    what = "step" if w.get("target") == "steps" else "position"
    if int(w[f"durable_{what}"]) < int(w[f"total_{what}s"]):
        return False
    if not is_terminal(w["state"]):
        ledger.finish(run)
    return True


def record_ended(services: Services, run: str) -> None:
    """Write what the ledger says has ended, and take it off its list."""
    with contextlib.suppress(NotFoundError):
        record_outcome(services, run)
    services.ledger.recorded(run)


def record_outcome(services: Services, run: str) -> None:
    """Once; a second writer finds the same outcome there, for an end is final."""
    w = services.ledger.workload(run)
    outcome = {
        "state": w["state"],
        "reason": json.loads(w.get("reason") or "{}"),
        "step": int(w["step"]),
        "position": int(w["position"]),
        "policy_version": int(w.get("base_version", 0)) + int(w["step"]),
        "published_version": int(w.get("base_version", 0)) + int(w["durable_step"]),
        "checkpoint": w.get("checkpoint", ""),
        "ended": int(w["updated"]),  # ms, on the ledger's clock
        "version": 1,
    }
    key = outcome_key(w["tenant"], run)
    with contextlib.suppress(ObjectExistsError):
        services.objects.put(key, canonical_json(outcome), if_absent=True)
