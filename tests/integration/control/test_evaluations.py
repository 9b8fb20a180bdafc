"""Evaluations of a run by itself, and what they keep from being removed (B20, B66), on a real
Valkey."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Process
from vla_platform.client.checkpoints import CheckpointShelf
from vla_platform.control import (
    checkpoint_changes,
    dispatch,
    evaluations,
    schedule_firings,
    settlement,
    usage,
)
from vla_platform.control.checkpoint_changes import change, plan_of
from vla_platform.control.evaluations import Outstanding, begin_if_due, evaluations_key, in_use
from vla_platform.control.ledger import Ledger
from vla_platform.control.trends import read_trend
from vla_platform.control.workloads import ledger_fields, teacher_checkpoint
from vla_platform.envs.evaluation_records import EvaluationRecord
from vla_platform.errors import SpecError, UnavailableError
from vla_platform.specs import parse_spec
from vla_storage.checkpoints import Checkpoint, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointNotFoundError, StorageUnavailableError
from vla_storage.marks import read_marks
from vla_storage.objects import MemoryObjectStore
from vla_storage.retention import RetentionPlan, apply_retention

pytestmark = pytest.mark.services
RUN = "sft-0123456789abcdef0123"
SPEC = parse_spec(
    {
        "kind": "sft", "policy": "reach", "steps": 100, "dataset": {"path": "x"},
        "evaluation": {"every_updates": 10, "suite": "tabletop/reach", "episodes": 3, "videos": 1},
    }
)  # fmt: skip
REF = CheckpointRef.parse(f"reach/{RUN}/10")
Make = Callable[..., Checkpoint]


def record_of(evaluation_id: str, rate: float) -> EvaluationRecord:
    return EvaluationRecord(
        evaluation_id=evaluation_id, tenant="a", policy_key="a/reach", policy_version=10,
        module_digest="", suite="tabletop/reach", suite_digest="", num_episodes=4,
        num_successes=round(4 * rate), success_rate=rate, interval_low=0.0, interval_high=1.0,
        mean_return=0.0, mean_steps=0.0, by_environment={}, num_invalid_actions=0, failures={},
        episodes=(), seconds=1.0,
    )  # fmt: skip


def begun(some: Process, make_checkpoint: Make, step: int) -> str | None:
    manifest = some.store.save(make_checkpoint(step, workload=RUN))
    return begin_if_due(some, "a", RUN, SPEC, manifest)


def test_every_so_many_updates_the_published_version_is_evaluated(
    some: Process, make_checkpoint: Make
) -> None:
    assert begun(some, make_checkpoint, 5) is None
    assert f"{RUN}-10" == begun(some, make_checkpoint, 10)
    (sent,) = some.sent
    assert tuple(
        sent[name] for name in ("policy_key", "version", "suite_name", "episodes", "num_videos")
    ) == ("a/reach", 10, "tabletop/reach", 3, 1)
    (known,) = some.outstanding()
    assert (RUN, f"reach/{RUN}/10", "") == (known.run, known.checkpoint, known.schedule)
    assert known.sent > 0


def test_a_version_is_evaluated_once_whoever_comes_back_to_it(
    some: Process, make_checkpoint: Make
) -> None:
    """Published again after a crash, mounted by another worker, settled by the reconciler."""
    manifest = some.store.save(make_checkpoint(10, workload=RUN))
    found: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(begin_if_due(some, "a", RUN, SPEC, manifest)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"{RUN}-10"] == [one for one in found if one is not None]
    schedule_firings.finished(some, "a", f"{RUN}-10")
    assert begin_if_due(some, "a", RUN, SPEC, manifest) is None
    assert (len(some.sent), some.outstanding()) == (1, [])


def test_a_lost_control_redis_does_not_evaluate_anew(some: Process, make_checkpoint: Make) -> None:
    manifest = some.store.save(make_checkpoint(10, workload=RUN))
    record = record_of(f"{RUN}-10", 0.5)
    some.objects.put(f"a/evaluations/{RUN}-10/record.json", record.to_json())
    assert begin_if_due(some, "a", RUN, SPEC, manifest) is None


def test_what_could_not_be_sent_is_sent_by_the_reconciler(
    some: Process, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(**_: Any) -> bool:
        return False

    with monkeypatch.context() as broken:
        broken.setattr(dispatch, "evaluate", down)
        assert f"{RUN}-10" == begun(some, make_checkpoint, 10)
    assert some.sent == []
    assert settlement.resend_lost(some, "a") == 1
    assert (len(some.sent), some.outstanding()[0].num_sends) == (1, 2)
    assert settlement.resend_lost(some, "a") == 0


def test_what_ended_meanwhile_is_not_noted_again(some: Process, make_checkpoint: Make) -> None:
    """An evaluation ends between a reader's look and its write."""
    begun(some, make_checkpoint, 10)
    looks: list[int] = []

    def ends(known: Outstanding) -> Outstanding:
        looks.append(known.num_sends)
        some.ledger.client.hdel(evaluations_key("a"), known.evaluation_id)
        return replace(known, num_sends=known.num_sends + 1)

    assert evaluations.changed(some.ledger.client, "a", f"{RUN}-10", ends) is None
    assert (looks, some.outstanding()) == ([1], [])
    evaluations.heard(some, "a", f"{RUN}-10")
    assert some.outstanding() == []


def test_how_often_it_was_sent_survives_what_is_heard_meanwhile(
    some: Process, make_checkpoint: Make
) -> None:
    begun(some, make_checkpoint, 10)
    (before,) = some.outstanding()
    looks: list[int] = []

    def heard_meanwhile(known: Outstanding) -> Outstanding:
        if not looks:
            evaluations.heard(some, "a", f"{RUN}-10")
        looks.append(known.num_sends)
        return replace(known, num_sends=known.num_sends + 1)

    evaluations.changed(some.ledger.client, "a", f"{RUN}-10", heard_meanwhile)
    (known,) = some.outstanding()
    assert (looks, known.num_sends) == ([1, 1], 2)
    assert known.sent > before.sent


def test_one_that_fails_for_good_is_told_in_its_runs_events(
    some: Process, make_checkpoint: Make
) -> None:
    begun(some, make_checkpoint, 10)
    schedule_firings.finished(some, "a", f"{RUN}-10", error="the simulator keeps failing")
    (event,) = some.emitter.events
    assert (event.workload, event.values["state"]) == (RUN, "failed")
    assert some.outstanding() == []


def test_an_outage_is_for_whoever_publishes_to_try_again(
    some: Process, make_checkpoint: Make, tmp_path: Path
) -> None:
    down = Ledger.connect(f"unix://{tmp_path}/nobody")
    manifest = some.store.save(make_checkpoint(10, workload=RUN))
    with pytest.raises(UnavailableError):
        begin_if_due(replace(some, ledger=down), "a", RUN, SPEC, manifest)
    with pytest.raises(UnavailableError):
        in_use(down.client, "a")
    assert f"{RUN}-10" == begin_if_due(some, "a", RUN, SPEC, manifest)


def test_b66_a_checkpoint_in_use_is_not_removed_whoever_asks(
    some: Process, make_checkpoint: Make
) -> None:
    """An evaluation acts with step 10, another run begins from step 20."""
    for step in (10, 20, 30, 40):
        some.store.save(make_checkpoint(step, workload=RUN))
    begin_if_due(some, "a", RUN, SPEC, some.store.manifest(f"reach/{RUN}/10"))
    client = some.ledger.client
    client.sadd("vla:tenant:a:pending", "rl-1")
    client.hset("vla:w:rl-1", "init_from", f"reach/{RUN}/20")
    assert {f"reach/{RUN}/{step}" for step in (10, 20)} == in_use(client, "a")
    ids = [f"reach/{RUN}/{step}" for step in (10, 20, 30)]
    answer = change(some, "a", json.dumps({"what": "delete", "checkpoints": ids, "dry_run": False}))
    plan = plan_of(json.loads(json.dumps(answer)))
    assert {(ids[0], "in use"), (ids[1], "in use")} == set(plan.stay)
    assert ((ids[2], "asked for"),) == plan.go
    assert [ref.step for ref in some.store.list("reach")] == [10, 20, 40]
    apply_retention(some.store, "reach", keep_last=1, protect=in_use(client, "a"))
    assert [ref.step for ref in some.store.list("reach")] == [10, 20, 40]
    schedule_firings.finished(some, "a", f"{RUN}-10")
    change(some, "a", json.dumps({"what": "prune", "policy": "reach", "run": RUN, "keep_last": 1,
                                  "dry_run": False}))  # fmt: skip
    assert [ref.step for ref in some.store.list("reach")] == [20, 40]


@pytest.mark.parametrize("version", [10, f"reach/{RUN}/10"])
def test_the_teacher_of_a_running_distillation_is_in_use(
    some: Process, make_checkpoint: Make, version: int | str
) -> None:
    for step in (10, 20, 30):
        some.store.save(make_checkpoint(step, workload=RUN))
    spec = parse_spec(
        {
            "kind": "rl", "policy": "student", "init_from": f"reach/{RUN}/20", "updates": 5,
            "environment": {"id": "tabletop/reach"},
            "reward": {"kind": "distillation", "teacher": {"policy": "reach", "version": version}},
        }
    )  # fmt: skip
    teacher = teacher_checkpoint(some.store, spec)
    fields = ledger_fields("a", spec, content=b"", schema_signature="s", teacher=teacher)
    some.ledger.submit("rl-1", fields, max_pending=9)
    assert {f"reach/{RUN}/10", f"reach/{RUN}/20"} == in_use(some.ledger.client, "a")
    ids = [f"reach/{RUN}/10"]
    change(some, "a", json.dumps({"what": "delete", "checkpoints": ids, "dry_run": False}))
    assert [ref.step for ref in some.store.list("reach")] == [10, 20, 30]
    some.ledger.cancel("rl-1")
    assert set() == in_use(some.ledger.client, "a")


def test_the_best_by_evaluation_stay(some: Process, make_checkpoint: Make) -> None:
    for step, rate in ((10, 0.25), (20, 1.0), (30, 0.5)):
        begun(some, make_checkpoint, step)
        evaluations.keep_score(some, record_of(f"{RUN}-{step}", rate))
        schedule_firings.finished(some, "a", f"{RUN}-{step}")
    some.store.save(make_checkpoint(35, workload=RUN))
    apply_retention(some.store, "reach", keep_last=1, keep_best=1)
    assert [ref.step for ref in some.store.list("reach")] == [20, 35]
    # One that is gone by the end of its evaluation is missed by nobody.
    some.store.delete(f"reach/{RUN}/20")
    late = replace(some_outstanding(f"{RUN}-20", f"reach/{RUN}/20"), evaluation_id=f"{RUN}-20")
    some.ledger.client.hset(evaluations_key("a"), f"{RUN}-20", late.to_json())
    evaluations.keep_score(some, record_of(f"{RUN}-20", 1.0))


def simulator_s(some: Process) -> float:
    client = some.ledger.client
    return float(usage.statement(client, "a", usage.today(client)).totals.get("simulator_s", 0.0))


def test_an_evaluation_is_settled_once_however_often_its_message_comes(
    some: Process, make_checkpoint: Make
) -> None:
    begun(some, make_checkpoint, 10)
    record = record_of(f"{RUN}-10", 0.5)
    threads = [threading.Thread(target=settlement.settle, args=(some, record)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settlement.settle(some, record)
    assert (simulator_s(some), some.outstanding()) == (1.0, [])
    assert [f"{RUN}-10"] == [one.evaluation_id for one in read_trend(some.objects, "a", "reach")]
    assert read_marks(some.objects, "a", "reach").mark(REF).score == 0.5


def test_one_that_was_given_up_or_never_noted_is_charged_once_when_it_ends(some: Process) -> None:
    for _ in range(2):
        settlement.settle(some, record_of("by-hand", 0.5))
    assert simulator_s(some) == 1.0


def test_what_its_player_could_not_settle_is_settled_by_the_reconciler(
    some: Process, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refused the score; the record was there already."""
    begun(some, make_checkpoint, 10)
    record = record_of(f"{RUN}-10", 0.5)
    some.objects.put(f"a/evaluations/{RUN}-10/record.json", record.to_json())

    put = some.objects.put

    def refused(key: str, *given: Any, **more: Any) -> Any:
        if key.endswith("/marks.json"):
            raise StorageUnavailableError("the store does not answer")
        return put(key, *given, **more)

    monkeypatch.setattr(settlement, "RESEND_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(some.objects, "put", refused)
        with pytest.raises(StorageUnavailableError):
            settlement.settle(some, record)
        assert settlement.resend_lost(some, "a") == 0
    assert (simulator_s(some), len(some.outstanding())) == (0.0, 1)
    assert settlement.resend_lost(some, "a") == 0
    assert (simulator_s(some), some.outstanding()) == (1.0, [])
    assert read_marks(some.objects, "a", "reach").mark(REF).score == 0.5


def some_outstanding(evaluation_id: str, checkpoint: str) -> Outstanding:
    return Outstanding(
        evaluation_id=evaluation_id, policy="reach", policy_version=1, suite="s", due=0.0,
        sent=0.0, checkpoint=checkpoint,
    )  # fmt: skip


def test_a_tenants_decisions_are_carried_out_by_the_platform(
    some: Process, make_checkpoint: Make
) -> None:
    for step in (10, 20):
        some.store.save(make_checkpoint(step, workload=RUN))
    one = f"reach/{RUN}/10"

    def ask(tenant: str = "a", **wanted: Any) -> Any:
        return change(some, tenant, json.dumps(wanted))

    assert ask(what="mark", checkpoint=one, pinned=True)["pinned"] is True
    assert ask(what="mark", checkpoint=one, ttl_s=60.0)["expires"] > 0
    told = ask(what="mark", checkpoint=one, ttl_s=-1.0, milestone=True)
    assert (told["pinned"], told["milestone"], told["expires"]) == (True, True, None)
    ask(what="alias", policy="reach", alias="best", checkpoint=one)
    assert {"best": f"{RUN}/10"} == read_marks(some.objects, "a", "reach").aliases
    ask(what="alias", policy="reach", alias="best", checkpoint=None)
    assert read_marks(some.objects, "a", "reach").aliases == {}
    with pytest.raises(CheckpointNotFoundError):  # B20: as if it were not there
        ask("ab", what="mark", checkpoint=one, pinned=True)


@dataclass
class Shelf(CheckpointShelf):
    """A tenant's calls, carried out at once: a request is a number of removals."""

    some: Process
    removals: list[int] = field(default_factory=list)
    tenant: str = "a"

    @property
    def _checkpoints(self) -> Any:  # type: ignore[override]
        return self.some.store

    @property
    def _connection(self) -> Any:  # type: ignore[override]
        return self

    def call(self, task: str, *, change: str, **_: Any) -> Any:
        before = len(self.some.store.list("reach"))
        answer = json.loads(json.dumps(checkpoint_changes.change(self.some, "a", change)))
        self.removals.append(before - len(self.some.store.list("reach")))
        return answer


@pytest.mark.parametrize("ask", ["delete", "prune"])
def test_no_request_removes_more_than_a_few(
    some: Process, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    """Requests of all tenants share the control worker's threads."""
    monkeypatch.setattr(checkpoint_changes, "MOST_REMOVED", 3)
    steps = list(range(1, 9))
    for step in steps:
        some.store.save(make_checkpoint(step, workload=RUN))
        some.store.save(make_checkpoint(step, workload="other"))
    ids = [f"reach/{RUN}/{step}" for step in steps]
    shelf = Shelf(some)
    shelf.pin(ids[4])
    shelf.removals.clear()

    def asked(*, dry_run: bool) -> RetentionPlan:
        if ask == "prune":
            return shelf.prune("reach", keep_last=1, dry_run=dry_run)
        others = [f"reach/other/{step}" for step in steps]
        (plan,) = shelf.delete_checkpoints([*ids[:7], *others], dry_run=dry_run)
        return plan

    shown = asked(dry_run=True)
    assert shelf.removals == [0, 0]
    done = asked(dry_run=False)
    assert shelf.removals[2:] == [3, 3, 1, 3, 3]
    assert (set(shown.go), set(shown.stay)) == (set(done.go), set(done.stay))
    assert {ids[4], ids[7], "reach/other/8"} == {ref.id for ref in some.store.list("reach")}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"what":"mark"}', '{"what":"rm","checkpoint":"a/b/1"}',
        '{"what":"mark","checkpoint":"a/b/1","score":1.0}',
        '{"what":"mark","checkpoint":"a/b/1","ttl_s":NaN}',
        '{"what":"prune","policy":"../x","run":"r","keep_last":1}',
        '{"what":"prune","policy":"x","keep_last":1}',
        '{"what":"prune","policy":"x","run":"r","keep_last":0}',
        '{"what":"delete","checkpoints":[]}', '{"what":"delete","checkpoints":["a/b/1","a/c/1"]}',
    ],
)  # fmt: skip
def test_what_is_no_change_is_refused(some: Process, text: str) -> None:
    with pytest.raises(SpecError):
        change(some, "a", text)


def test_the_checkpoint_of_a_version_is_found_with_few_reads(make_checkpoint: Make) -> None:
    class Counting(MemoryObjectStore):
        gets = 0

        def get_with_etag(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, str]:
            self.gets += 1
            return super().get_with_etag(key, max_bytes=max_bytes)

    objects = Counting()
    store = CheckpointStore(objects=objects, tenant_id="a", signing_key=b"key")
    for run, base in (("w1", 0), ("w2", 100)):
        for step in range(1, 65):
            one = make_checkpoint(step, workload=run)
            header = replace(one.header, policy_version=base + step // 2)  # some teach nothing
            store.save(replace(one, header=header))
    objects.gets = 0
    assert evaluations.checkpoint_of(store, "reach", 120) == "reach/w2/41"
    assert objects.gets <= 2 * 8
    assert evaluations.checkpoint_of(store, "reach", 1) == "reach/w1/3"
    assert evaluations.checkpoint_of(store, "reach", 50) == ""
    objects.delete(store.folder(CheckpointRef.parse("reach/w1/32")) + "manifest.json")
    assert evaluations.checkpoint_of(store, "reach", 120) == "reach/w2/41"
