"""Which checkpoints go: a policy's retention.

First a plan, which is only read; then its removal. Right before anything is removed, the ids are
written into the policy's marks by compare-and-swap, so that a pin comes either before, and keeps
its checkpoint, or after, and is told that it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from vla_storage.checkpoints import MANIFEST, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointError, CheckpointNotFoundError
from vla_storage.folders import Kind, folders
from vla_storage.marks import Mark, Marks, change_marks, place_of, read_marks

MOST_READ = 50
"""Checkpoints without a whole seal that one plan reads, each by several requests: who plans has
other tenants' work to do."""


class Reason(StrEnum):
    """Why a checkpoint stays or goes."""

    NEWEST = "newest"
    BEST = "best"
    """Among the best by evaluation."""
    MILESTONE = "milestone"
    MARKED = "marked"
    """Pinned, named, or marked as a milestone."""
    IN_USE = "in use"
    DAMAGED = "damaged"
    """Newer than the oldest that is kept: evidence."""
    UNREAD = "unread"
    """Whether it is whole was not read, as `MOST_READ` others were."""
    ONLY = "only valid one"
    OLD = "old"
    """No rule keeps it."""
    EXPIRED = "expired"
    """Its time to live is over."""
    ASKED = "asked for"


@dataclass(frozen=True, kw_only=True)
class RetentionRules:
    """Of each workload; workloads are lineages of their own."""

    keep_last: int = 1  # newest valid ones; at least one, whatever else holds
    keep_best: int = 0  # highest scores
    milestone_every: int = 0  # steps that are multiples; 0: none

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {self.keep_last}")


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """What would stay and what would go, each with its reason. Ids as in `CheckpointRef.id`."""

    policy: str
    stay: tuple[tuple[str, Reason], ...]
    go: tuple[tuple[str, Reason], ...]


def plan_retention(
    store: CheckpointStore,
    policy: str,
    rules: RetentionRules,
    *,
    workload_id: str | None = None,
    protect: Collection[str] = (),
    now: float | None = None,
) -> RetentionPlan:
    """Apply the rules to what is there; removes nothing. Raises `CheckpointError` (marks damaged).

    Steps are compared as numbers and object times not at all (PF-21).
    """
    listed = _listed(store, policy, workload_id)
    lineages: dict[str, list[CheckpointRef]] = {}
    for ref in sorted(listed):
        lineages.setdefault(ref.workload_id, []).append(ref)
    marks = read_marks(store.objects, store.tenant_id, policy)
    at = time.time() if now is None else now
    wholeness = _Wholeness(store, listed)
    # Another lineage first each time, so that a later plan reads what this one cannot.
    names = list(lineages)
    first = int(at) % max(1, len(names))
    decisions = {
        name: _decide(wholeness, lineages[name], rules, marks, protect, at)
        for name in names[first:] + names[:first]
    }
    decided = [one for name in names for one in decisions[name]]
    goes = {Reason.OLD, Reason.EXPIRED}
    return RetentionPlan(
        policy=policy,
        stay=tuple(one for one in decided if one[1] not in goes),
        go=tuple(one for one in decided if one[1] in goes),
    )


def _decide(
    wholeness: _Wholeness,
    refs: list[CheckpointRef],
    rules: RetentionRules,
    marks: Marks,
    protect: Collection[str],
    now: float,
) -> list[tuple[str, Reason]]:
    """Oldest first."""
    scored = [(mark.score, ref) for ref in refs if (mark := marks.mark(ref)).score is not None]
    best = {ref for _, ref in sorted(scored, reverse=True)[: rules.keep_best]}
    decided: dict[CheckpointRef, Reason] = {}
    kept = 0
    for ref in reversed(refs):
        reason = _rule(ref, rules, marks, protect, best, now)
        if reason is not Reason.EXPIRED and kept < rules.keep_last:
            whole = wholeness.of(ref)
            kept += whole is True
            if reason is Reason.OLD:
                reason = _WHY[whole]
        decided[ref] = reason
    if not kept:
        # The last good one stays even where its time is over.
        for ref in decided:
            whole = wholeness.of(ref)
            if whole is not False:
                decided[ref] = Reason.ONLY if whole else Reason.UNREAD
            if whole:
                break
    return [(ref.id, decided[ref]) for ref in refs]


_WHY = {True: Reason.NEWEST, False: Reason.DAMAGED, None: Reason.UNREAD}


def _rule(
    ref: CheckpointRef,
    rules: RetentionRules,
    marks: Marks,
    protect: Collection[str],
    best: Collection[CheckpointRef],
    now: float,
) -> Reason:
    if ref.id in protect:
        return Reason.IN_USE
    if marks.is_kept(ref):
        return Reason.MARKED
    expires = marks.mark(ref).expires
    if expires is not None and expires <= now:
        return Reason.EXPIRED
    if ref in best:
        return Reason.BEST
    if rules.milestone_every > 0 and ref.step % rules.milestone_every == 0:
        return Reason.MILESTONE
    return Reason.OLD


def carry_out(store: CheckpointStore, plan: RetentionPlan) -> list[str]:
    """Remove what a plan says, less what was pinned or named since; returns the ids gone."""
    refs = [CheckpointRef.parse(one) for one, _ in plan.go]
    if not refs:
        return []

    def announce(marks: Marks) -> Marks:
        places = {place_of(ref) for ref in refs if not marks.is_kept(ref)}
        return replace(marks, removing=tuple(sorted({*marks.removing, *places})))

    marks = change_marks(store.objects, store.tenant_id, plan.policy, announce)
    gone = [ref for ref in refs if place_of(ref) in marks.removing]
    for ref in gone:
        store.delete(ref.id)
    change_marks(store.objects, store.tenant_id, plan.policy, lambda now: now.without(gone))
    return [ref.id for ref in gone]


def apply_retention(
    store: CheckpointStore,
    policy: str,
    *,
    keep_last: int,
    milestone_every: int = 0,
    keep_best: int = 0,
    workload_id: str | None = None,
    protect: Collection[str] = (),
) -> list[str]:
    """Plan and carry out; returns the ids that are gone.

    Of each workload (or the one named) stay: the newest `keep_last` valid ones (at least one), the
    `keep_best` best, milestones, marked ones, and the ids in `protect` (in use). Damaged
    checkpoints newer than the oldest kept one stay as evidence.
    """
    rules = RetentionRules(
        keep_last=keep_last, keep_best=keep_best, milestone_every=milestone_every
    )
    return carry_out(
        store, plan_retention(store, policy, rules, workload_id=workload_id, protect=protect)
    )


def plan_removal(
    store: CheckpointStore, policy: str, ids: Collection[str], *, protect: Collection[str] = ()
) -> RetentionPlan:
    """What of the named checkpoints may go: not what is marked or in use, and never the last valid
    one of a workload. Raises `CheckpointNotFoundError`."""
    marks = read_marks(store.objects, store.tenant_id, policy)
    wanted = {CheckpointRef.parse(one) for one in ids}
    workloads = sorted({ref.workload_id for ref in wanted})
    listed: dict[CheckpointRef, bool] = {}
    for workload in workloads:
        listed |= _listed(store, policy, workload)
    for ref in wanted - listed.keys():
        raise CheckpointNotFoundError(f"no checkpoint {ref.id}", checkpoint=ref.id)
    wholeness = _Wholeness(store, listed)
    decided: list[tuple[str, Reason]] = []
    for workload in workloads:
        newest_first = sorted((ref for ref in listed if ref.workload_id == workload), reverse=True)
        spare = any(wholeness.of(ref) for ref in newest_first if ref not in wanted)
        for ref in newest_first:
            if ref not in wanted:
                continue
            reason = Reason.ASKED
            if ref.id in protect:
                reason = Reason.IN_USE
            elif marks.is_kept(ref):
                reason = Reason.MARKED
            elif not spare and (whole := wholeness.of(ref)) is not False:
                reason = Reason.ONLY if whole else Reason.UNREAD
            spare = spare or reason not in (Reason.ASKED, Reason.UNREAD)
            decided.append((ref.id, reason))
    return RetentionPlan(
        policy=policy,
        stay=tuple(one for one in decided if one[1] is not Reason.ASKED),
        go=tuple(one for one in decided if one[1] is Reason.ASKED),
    )


def set_mark(store: CheckpointStore, checkpoint_id: str, **changes: object) -> Mark:
    """Change what holds for one checkpoint: `pinned`, `milestone`, `expires`, `score`.

    Raises `CheckpointNotFoundError`, also where its removal has begun.
    """
    ref = CheckpointRef.parse(checkpoint_id)
    store.manifest(ref.id)

    def change(marks: Marks) -> Marks:
        _refuse_removed(marks, ref)
        return marks.with_mark(ref, **changes)

    return change_marks(store.objects, store.tenant_id, ref.policy, change).mark(ref)


def set_alias(store: CheckpointStore, alias: str, checkpoint_id: str | None, policy: str) -> None:
    """Give a checkpoint a name of its policy, or take the name away (None)."""
    ref = None
    if checkpoint_id is not None:
        ref = CheckpointRef.parse(checkpoint_id)
        store.manifest(ref.id)

    def change(marks: Marks) -> Marks:
        if ref is not None:
            _refuse_removed(marks, ref)
        return marks.with_alias(alias, ref)

    change_marks(store.objects, store.tenant_id, policy, change)


def _refuse_removed(marks: Marks, ref: CheckpointRef) -> None:
    if place_of(ref) in marks.removing:
        raise CheckpointNotFoundError(
            f"checkpoint {ref.id} is being removed by retention", checkpoint=ref.id
        )


def _listed(
    store: CheckpointStore, policy: str, workload_id: str | None
) -> dict[CheckpointRef, bool]:
    """Every visible checkpoint, and whether it lists as its publisher sealed it."""
    found = {}
    prefix = store.policy_prefix(policy, workload_id)
    for folder in folders(store.objects.list(prefix), store.tenant_id):
        ref = folder.ref if folder.kind is Kind.CHECKPOINT else None
        if ref is not None and any(item.key == folder.prefix + MANIFEST for item in folder.items):
            found[ref] = folder.is_sealed(store.signing_key)
    return found


class _Wholeness:
    """Which checkpoints are whole: by their seals, the others by reading at most `MOST_READ`."""

    def __init__(self, store: CheckpointStore, sealed: Mapping[CheckpointRef, bool]) -> None:
        self._store = store
        self._known: dict[CheckpointRef, bool] = {ref: True for ref in sealed if sealed[ref]}
        self._num_read = 0

    def of(self, ref: CheckpointRef) -> bool | None:
        """None: too many others were read."""
        if ref not in self._known and self._num_read < MOST_READ:
            self._num_read += 1
            try:
                self._store.verify(ref.id, content=False)
                self._known[ref] = True
            except CheckpointError:
                self._known[ref] = False
        return self._known.get(ref)
