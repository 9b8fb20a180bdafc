"""What a schedule does when it is looked at: a pure function of its state and the time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vla_platform.specs.cron import missed_firings, next_firing
from vla_platform.specs.evaluation import MOST_QUEUED, Missed, Overlap

LATE_S = 90.0
"""A firing served within it is on time."""
CLAIM_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ScheduleState:
    """One schedule, as the control Redis has it. Times in seconds since the epoch."""

    name: str
    cron: str
    timezone: str
    overlap: Overlap
    missed: Missed
    next_due: float
    enabled: bool = True
    reason: str = ""  # why it is not enabled
    last_due: float | None = None
    last_evaluation: str = ""
    running: Mapping[str, float] = field(default_factory=dict)  # evaluation id -> its firing
    queued: tuple[float, ...] = ()
    claimed: Mapping[str, float] = field(default_factory=dict)  # firing -> when it was handed out
    num_fired: int = 0
    num_skipped: int = 0
    num_missed: int = 0
    num_failed: int = 0
    last_error: str = ""
    version: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ScheduleState:
        """Raises `ValueError` for anything else than a state."""
        try:
            raw: dict[str, Any] = json.loads(text)
            state = cls(
                **raw
                | {
                    "overlap": Overlap(raw["overlap"]),
                    "missed": Missed(raw["missed"]),
                    "queued": tuple(float(at) for at in raw["queued"]),
                    "running": {str(k): float(v) for k, v in raw["running"].items()},
                    "claimed": {str(k): float(v) for k, v in raw["claimed"].items()},
                    "next_due": float(raw["next_due"]),
                }
            )
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"no schedule: {error!r}") from error
        return state


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The state after a look, and the firings that are to run now, oldest first."""

    state: ScheduleState
    fire: tuple[float, ...] = ()


def look(state: ScheduleState, now: float) -> Looked:
    """Serve what is due. A second look at the same time does nothing more.

    A firing that was handed out and not begun within `CLAIM_S` is handed out again: whoever took
    it died.
    """
    if not state.enabled:
        return Looked(state=state)
    lost = tuple(float(at) for at, since in state.claimed.items() if now - since > CLAIM_S)
    if state.next_due > now:
        return _claimed(state, lost, now)
    due = [
        state.next_due,
        *missed_firings(state.cron, state.timezone, after=state.next_due, until=now),
    ]
    late = [at for at in due if now - at > LATE_S]
    on_time = due[len(late) :]
    wanted = list(on_time)
    missed = len(late)
    if late and not on_time and state.missed is Missed.RUN_ONCE:
        wanted = [late[-1]]
        missed -= 1
    state = replace(
        state,
        next_due=next_firing(state.cron, state.timezone, after=max(due[-1], now - LATE_S)),
        last_due=due[-1],
        num_missed=state.num_missed + missed,
    )
    if state.next_due <= now:
        # More were missed than are counted one by one.
        state = replace(state, next_due=next_firing(state.cron, state.timezone, after=now))
    fire: list[float] = []
    for at in wanted:
        busy = bool(state.running) or bool(fire)
        if not busy or state.overlap is Overlap.ALLOW:
            fire.append(at)
        elif state.overlap is Overlap.QUEUE and len(state.queued) < MOST_QUEUED:
            state = replace(state, queued=(*state.queued, at))
        else:
            state = replace(state, num_skipped=state.num_skipped + 1)
    return _claimed(state, (*lost, *fire), now)


def _claimed(state: ScheduleState, fire: tuple[float, ...], now: float) -> Looked:
    claimed = {**state.claimed, **{repr(at): now for at in fire}}
    return Looked(state=replace(state, claimed=claimed), fire=fire)


def begun(state: ScheduleState, evaluation_id: str, at: float) -> ScheduleState:
    return replace(
        state,
        running={**state.running, evaluation_id: at},
        claimed=_without(state.claimed, repr(at)),
        last_evaluation=evaluation_id,
        num_fired=state.num_fired + 1,
    )


def failed(state: ScheduleState, at: float, error: str) -> ScheduleState:
    """A firing that could not begin."""
    return replace(
        state,
        claimed=_without(state.claimed, repr(at)),
        num_failed=state.num_failed + 1,
        last_error=error,
    )


def _without(values: Mapping[str, float], name: str) -> dict[str, float]:
    return {key: value for key, value in values.items() if key != name}


def ended(state: ScheduleState, evaluation_id: str, error: str = "", *, now: float = 0.0) -> Looked:
    """An evaluation is over; one that waited for it may begin. Safe to repeat."""
    if evaluation_id not in state.running:
        return Looked(state=state)
    running = _without(state.running, evaluation_id)
    state = replace(
        state,
        running=running,
        num_failed=state.num_failed + bool(error),
        last_error=error or state.last_error,
    )
    if running or not state.queued or not state.enabled:
        return Looked(state=state)
    first, *rest = state.queued
    return _claimed(replace(state, queued=tuple(rest)), (first,), now)


def moved(state: ScheduleState, now: float, *, enabled: bool, reason: str = "") -> ScheduleState:
    """Paused, resumed or set aside. Resuming does not make up what fell into the pause."""
    if enabled == state.enabled:
        return state
    next_due = next_firing(state.cron, state.timezone, after=now) if enabled else state.next_due
    queued = state.queued if enabled else ()
    return replace(state, enabled=enabled, reason=reason, next_due=next_due, queued=queued)
