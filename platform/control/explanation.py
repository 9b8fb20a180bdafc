"""Why a run is where it is: what it waits for, its place in the line, and about how long."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vla_platform.control.ledger import Ledger
from vla_platform.control.states import WorkloadState, is_terminal


@dataclass(frozen=True, kw_only=True)
class Explanation:
    run: str
    state: str
    waits_for: str  # empty: it is being worked on
    position: int | None = None  # runs or jobs ahead of it in the line it waits in
    estimate_s: float | None = None  # from the mean cost of its tenant's jobs; None: unknown
    jobs: dict[str, int] | None = None  # its training jobs in flight, by state
    dropped: int = 0
    unscored: int = 0  # rollouts whose grader or teacher was late or failed


def explain(ledger: Ledger, run: str) -> Explanation:
    """Raises `NotFoundError`."""
    w = ledger.workload(run)
    state = w["state"]
    if is_terminal(state):
        reason = json.loads(w.get("reason") or "{}")
        return Explanation(run=run, state=state, waits_for=str(reason.get("message", "")))
    if state == WorkloadState.PAUSED:
        return Explanation(run=run, state=state, waits_for=f"`vla runs resume {run}`")
    if state == WorkloadState.PENDING:
        return _pending(ledger, run, w)
    return _running(ledger, run, w)


def _pending(ledger: Ledger, run: str, w: dict[str, str]) -> Explanation:
    why = w.get("waits") or "a control worker that admits it"
    line = [(-int(w["priority"]), int(w["created"]))]
    for other in ledger.client.smembers(f"vla:tenant:{w['tenant']}:pending"):
        found = ledger.client.hmget(f"vla:w:{other}", "priority", "created")
        if other != run and None not in found:
            line.append((-int(found[0]), int(found[1])))
    ahead = sorted(line).index((-int(w["priority"]), int(w["created"])))
    return Explanation(run=run, state=w["state"], waits_for=why, position=ahead)


def _running(ledger: Ledger, run: str, w: dict[str, str]) -> Explanation:
    jobs: dict[str, dict[str, Any]] = {}
    for job_id in ledger.client.zrange(f"vla:w:{run}:jobs", 0, -1):
        jobs[job_id] = ledger.client.hgetall(f"vla:j:{job_id}")
    states = Counter(job["state"] for job in jobs.values() if job)
    common: dict[str, Any] = {
        "run": run,
        "state": w["state"],
        "jobs": dict(states),
        "dropped": int(w.get("dropped", 0)),
        "unscored": int(w.get("unscored", 0)),
    }
    if states["leased"]:
        return Explanation(waits_for="", **common)
    ready = [name for name, job in jobs.items() if job and job["state"] == "ready"]
    if ready:
        ahead = ledger.ready_ahead(ready, w["base_model"])
        if ahead is not None:
            pace_s = ledger.seconds_per_job(w["tenant"])
            return Explanation(
                waits_for="a training worker",
                position=ahead,
                estimate_s=None if pace_s is None else round(ahead * pace_s, 3),
                **common,
            )
    busy = [state for state in states if state != "ready"]
    why = w.get("waits") or (", ".join(sorted(busy)) if busy else "its producer")
    return Explanation(waits_for=why, **common)
