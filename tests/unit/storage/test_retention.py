"""Retention: rules, marks, dry run, and the races with pins and saves (PF-21, PF-25, B66)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_storage import retention
from vla_storage.checkpoints import MANIFEST, Checkpoint, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointError, CheckpointNotFoundError
from vla_storage.marks import Mark, Marks, change_marks, marks_key, read_marks
from vla_storage.objects import MemoryObjectStore
from vla_storage.retention import (
    Reason,
    RetentionRules,
    apply_retention,
    carry_out,
    plan_removal,
    plan_retention,
    set_alias,
    set_mark,
)
from vla_storage.seals import is_seal

KEY = b"platform key of the tests"
Make = Callable[..., Checkpoint]


@pytest.fixture
def store() -> CheckpointStore:
    return CheckpointStore(objects=MemoryObjectStore(), tenant_id="a", signing_key=KEY)


@pytest.fixture
def saved(store: CheckpointStore, make_checkpoint: Make) -> CheckpointStore:
    for step in (1, 2, 3, 4, 5, 6):
        store.save(make_checkpoint(step))
    return store


def steps(store: CheckpointStore) -> list[int]:
    return [ref.step for ref in store.list("reach")]


def test_every_rule_keeps_what_it_says_and_a_plan_removes_nothing(saved: CheckpointStore) -> None:
    set_mark(saved, "reach/w1/1", pinned=True)
    set_mark(saved, "reach/w1/2", score=0.9)
    set_mark(saved, "reach/w1/4", score=0.5)
    plan = plan_retention(
        saved, "reach", RetentionRules(keep_last=1, keep_best=1, milestone_every=3)
    )
    assert dict(plan.stay) == {
        "reach/w1/1": Reason.MARKED,
        "reach/w1/2": Reason.BEST,
        "reach/w1/3": Reason.MILESTONE,
        "reach/w1/6": Reason.MILESTONE,
    }
    assert list(plan.go) == [("reach/w1/4", Reason.OLD), ("reach/w1/5", Reason.OLD)]
    assert steps(saved) == [1, 2, 3, 4, 5, 6]
    assert carry_out(saved, plan) == ["reach/w1/4", "reach/w1/5"]
    assert steps(saved) == [1, 2, 3, 6]
    assert "w1/4" not in read_marks(saved.objects, "a", "reach").of


def test_expired_ones_go_but_the_last_valid_one_stays(saved: CheckpointStore) -> None:
    for step in range(1, 7):
        set_mark(saved, f"reach/w1/{step}", expires=time.time() - 1)
    set_mark(saved, "reach/w1/2", pinned=True)
    assert len(apply_retention(saved, "reach", keep_last=6)) == 4 + 1
    assert steps(saved) == [2]
    set_mark(saved, "reach/w1/2", pinned=False)
    plan = plan_retention(saved, "reach", RetentionRules())
    assert plan.stay == (("reach/w1/2", Reason.ONLY),)
    assert plan.go == ()


def test_named_ones_stay_until_the_name_is_given_to_another(saved: CheckpointStore) -> None:
    set_alias(saved, "best", "reach/w1/2", "reach")
    apply_retention(saved, "reach", keep_last=1)
    assert steps(saved) == [2, 6]
    set_alias(saved, "best", "reach/w1/6", "reach")
    apply_retention(saved, "reach", keep_last=1)
    assert steps(saved) == [6]
    with pytest.raises(CheckpointNotFoundError):
        set_alias(saved, "best", "reach/w1/5", "reach")


def test_b66_what_is_in_use_or_the_last_is_not_removed(saved: CheckpointStore) -> None:
    every = [f"reach/w1/{step}" for step in range(1, 7)]
    set_mark(saved, "reach/w1/1", pinned=True)
    plan = plan_removal(saved, "reach", every, protect={"reach/w1/3"})
    assert dict(plan.stay) == {
        "reach/w1/1": Reason.MARKED,
        "reach/w1/3": Reason.IN_USE,
        "reach/w1/6": Reason.ONLY,
    }
    assert len(carry_out(saved, plan)) == 3
    with pytest.raises(CheckpointNotFoundError):
        plan_removal(saved, "reach", ["reach/w1/2"])


def test_a_pin_comes_before_or_after_a_removal_never_between(saved: CheckpointStore) -> None:
    plan = plan_retention(saved, "reach", RetentionRules())
    set_mark(saved, "reach/w1/3", pinned=True)  # after the plan, before its removal
    assert "reach/w1/3" not in carry_out(saved, plan)
    marks = read_marks(saved.objects, "a", "reach")
    change_marks(saved.objects, "a", "reach", lambda m: Marks(of=m.of, removing=("w1/6",)))
    with pytest.raises(CheckpointNotFoundError, match="being removed"):
        set_mark(saved, "reach/w1/6", pinned=True)
    assert Mark(pinned=True) == marks.mark(CheckpointRef.parse("reach/w1/3"))


def test_pf25_no_writer_loses_anothers_marks(store: CheckpointStore, make_checkpoint: Make) -> None:
    """A trainer saves, retention removes, two others mark: 200 rounds, nothing is lost."""
    for step in range(1, 201):
        store.save(make_checkpoint(step))

    def mark(residue: int, **changes: object) -> None:
        for step in range(1, 201):
            if step % 4 == residue:
                set_mark(store, f"reach/w1/{step}", **changes)

    def train() -> None:
        for step in range(201, 221):
            store.save(make_checkpoint(step))

    threads = [
        threading.Thread(target=mark, args=(0,), kwargs={"pinned": True}),
        threading.Thread(target=mark, args=(0,), kwargs={"score": 0.5}),
        threading.Thread(target=train),
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        apply_retention(store, "reach", keep_last=200)
    for thread in threads:
        thread.join()
    marks = read_marks(store.objects, "a", "reach")
    pinned = [step for step in range(1, 201) if step % 4 == 0]
    found = [s for s in pinned if marks.mark(CheckpointRef.parse(f"reach/w1/{s}")).pinned]
    scored = [s for s in pinned if marks.mark(CheckpointRef.parse(f"reach/w1/{s}")).score == 0.5]
    assert (pinned, pinned) == (found, scored)
    assert set(pinned) <= set(steps(store))
    assert steps(store)[-1] == 220


class Counting(MemoryObjectStore):
    reads = 0

    def get_with_etag(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, str]:
        self.reads += 1
        return super().get_with_etag(key, max_bytes=max_bytes)


def without_seals(store: CheckpointStore) -> None:
    for item in list(store.objects.list("a/")):
        if is_seal(item.key.rpartition("/")[2]):
            store.objects.delete(item.key)


def test_what_lists_as_it_was_sealed_is_not_read(make_checkpoint: Make) -> None:
    """Keeping many costs a listing, whoever asks and how often."""
    objects = Counting()
    store = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)
    for step in range(1, 41):
        store.save(make_checkpoint(step))
    objects.reads = 0
    plan = plan_retention(store, "reach", RetentionRules(keep_last=30))
    assert (len(plan.go), objects.reads) == (10, 1)  # the marks
    every = [ref for ref, _ in plan.go]
    assert len(plan_removal(store, "reach", every).go) == 10
    assert objects.reads == 2


def test_one_plan_reads_so_many_and_what_was_not_read_stays(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MOST_READ", 3)
    objects = Counting()
    store = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)
    for step in range(1, 9):
        store.save(make_checkpoint(step))
    without_seals(store)
    set_mark(store, "reach/w1/1", expires=0.0)
    objects.reads = 0
    plan = plan_retention(store, "reach", RetentionRules(keep_last=5))
    assert objects.reads == 1 + 3  # the marks and three manifests
    unread = dict.fromkeys((f"reach/w1/{step}" for step in range(2, 6)), Reason.UNREAD)
    newest = dict.fromkeys((f"reach/w1/{step}" for step in (6, 7, 8)), Reason.NEWEST)
    assert dict(plan.stay) == unread | newest
    assert plan.go == (("reach/w1/1", Reason.EXPIRED),)
    assert len(plan_retention(store, "reach", RetentionRules(keep_last=3)).go) == 5
    for step in (6, 7, 8):
        objects.delete(store.folder(CheckpointRef.parse(f"reach/w1/{step}")) + MANIFEST)
        objects.put(store.folder(CheckpointRef.parse(f"reach/w1/{step}")) + MANIFEST, b"{}")
    plan = plan_retention(store, "reach", RetentionRules(keep_last=1))
    damaged = dict.fromkeys(newest, Reason.DAMAGED)
    every = unread | damaged | {"reach/w1/1": Reason.UNREAD}
    assert (dict(plan.stay), plan.go) == (every, ())
    removal = plan_removal(store, "reach", [f"reach/w1/{step}" for step in range(1, 6)])
    assert (set(dict(removal.stay).values()), removal.go) == ({Reason.UNREAD}, ())


def test_damaged_marks_stop_retention(saved: CheckpointStore) -> None:
    saved.objects.put(marks_key("a", "reach"), b"{}")
    with pytest.raises(CheckpointError, match="marks"):
        apply_retention(saved, "reach", keep_last=1)
    assert len(steps(saved)) == 6


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a pure function
)
@given(
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 3),
    every=st.integers(0, 4),
    expired=st.sets(st.integers(1, 8)),
    pinned=st.sets(st.integers(1, 8)),
    broken=st.sets(st.integers(1, 8), max_size=7),
)
def test_a_valid_checkpoint_is_always_left(
    make_checkpoint: Make, keep_last: int, keep_best: int, every: int,
    expired: set[int], pinned: set[int], broken: set[int],
) -> None:  # fmt: skip
    objects = MemoryObjectStore()
    store = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)
    for step in range(1, 9):
        manifest = store.save(make_checkpoint(step))
        ref = f"reach/w1/{step}"
        if step in expired | pinned:
            set_mark(store, ref, expires=0.0 if step in expired else None, pinned=step in pinned)
        if step in broken:
            entry = manifest.object("state.json")
            objects.delete(store.folder(CheckpointRef.parse(ref)) + entry.relative_key)
    apply_retention(store, "reach", keep_last=keep_last, keep_best=keep_best, milestone_every=every)
    left = set(steps(store))
    assert left - broken
    assert pinned <= left


def test_marks_survive_their_wire_form() -> None:
    ref = CheckpointRef.parse("reach/w1/3")
    marks = Marks().with_mark(ref, pinned=True, expires=5.0).with_alias("best", ref)
    assert marks == Marks.from_json(marks.to_json())
    assert Marks() == marks.without([ref])
    assert Marks() == Marks().with_mark(ref, pinned=False)
