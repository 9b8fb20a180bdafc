"""The life of one training job, from its descriptor and its run's events: where its time went.

Needs no tracing: the ledger stamps what a job goes on to with its own clock. Where a stage was
computed more than once, the last time shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vla_platform.control.ledger import Ledger
from vla_platform.control.states import Stage
from vla_platform.errors import NotFoundError
from vla_platform.metrics.events import stream_of

MOST_EVENTS = 2000


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a job's life; seconds since the epoch, on the ledger's clock."""

    name: str
    begun_s: float
    ended_s: float | None  # None: it goes on
    where: str = ""
    note: str = ""


def of_job(ledger: Ledger, run: str, job_id: str) -> list[Phase]:
    """Raises `NotFoundError`, also for a job of another run."""
    descriptor = ledger.descriptor(job_id)
    if descriptor["workload"] != run:
        raise NotFoundError(f"no training job {job_id[:160]} of {run}", workload=run)
    return phases(descriptor, events_of_run(ledger, run))


def events_of_run(ledger: Ledger, run: str) -> list[dict[str, Any]]:
    """The newest of a run's events, oldest first. Raises `NotFoundError`."""
    stream = stream_of(ledger.workload(run)["tenant"], run)
    newest = ledger.client.xrevrange(stream, count=MOST_EVENTS)
    return [json.loads(fields["event"]) for _, fields in reversed(newest)]


def phases(descriptor: Mapping[str, str], events: Iterable[Mapping[str, Any]]) -> list[Phase]:
    """In the order of their beginnings. `events` are those of the run, oldest first."""

    def at(name: str) -> float | None:
        found = descriptor.get(name)
        return int(found) / 1000 if found else None

    created = at("created")
    assert created is not None
    ended, ready, leased = at("ended"), at("ready"), at("leased")
    producer = descriptor["producer_role"]
    found: list[Phase] = []

    def add(name: str, begun: float | None, *ends: float | None, **more: str) -> None:
        if begun is not None:
            end = next((one for one in (*ends, ended) if one is not None and one >= begun), None)
            found.append(Phase(name=name, begun_s=begun, ended_s=end, **more))

    stamps = {stage: (at(f"at:needs_{stage}"), at(f"at:computing_{stage}")) for stage in Stage}
    begins = sorted(one for pair in stamps.values() for one in pair if one is not None)

    def after(begun: float | None) -> float | None:
        return next((one for one in begins if begun is not None and one > begun), None)

    name = "rollout" if producer == "rollout" else "produce"
    add(name, created, after(created), ready, where=producer, note=_samples(descriptor))
    for stage, (waits, works) in sorted(stamps.items(), key=lambda item: item[1][0] or 0.0):
        add(f"waits for {stage}", waits, works)
        add(stage, works, after(works), ready)
    add("waits for training", ready, leased)
    if leased is not None and (ready is None or leased >= ready):
        add("training", leased, where=descriptor.get("lease_owner", ""), note=_attempt(descriptor))
    effect, saved = _events_of(descriptor["job_id"], events)
    if saved is not None and ended is not None:
        found.append(
            Phase(
                name="checkpoint", begun_s=ended, ended_s=max(ended, float(saved["at"])),
                where=str(saved["checkpoint"]), note=f"{saved['size_bytes']} bytes",
            )
        )  # fmt: skip
    return [_with_effect(one, effect) for one in found]


def _events_of(
    job_id: str, events: Iterable[Mapping[str, Any]]
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The event of the job's effect, and that of the checkpoint that holds it, if one was due."""
    effect = saved = None
    for event in events:
        if event.get("job_id") == job_id and event["kind"] in ("step", "update", "heldout"):
            effect = event
        elif effect is not None and event["kind"] == "checkpoint" and saved is None:
            saved = event if event["step"] == effect["step"] else None
    return effect, saved


def _with_effect(phase: Phase, effect: Mapping[str, Any] | None) -> Phase:
    if effect is None or phase.name != "training":
        return phase
    told = [f"step {effect['step']}"]
    if "loss" in effect:
        told.append(f"loss {effect['loss']:.4g}")
    if "group_size" in effect:
        told.append(f"{effect['group_size']} jobs in one forward of {effect['forward_ms']:.1f} ms")
    told.append(f"cost {effect['cost_s']:.3f} s")
    return Phase(**{**vars(phase), "note": ", ".join(told)})


def _samples(descriptor: Mapping[str, str]) -> str:
    count = descriptor.get("sample_count")
    return f"{count} samples" if count else ""


def _attempt(descriptor: Mapping[str, str]) -> str:
    if "ended" in descriptor:
        return f"{descriptor['state']} {descriptor.get('terminal_reason') or ''}".strip()
    return f"attempt {descriptor['attempt']}"
