"""Audits find every fault of a tenant's prefix, name it, delete nothing (F62, F65, B64, B65)."""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from vla_storage import manifests
from vla_storage.audit import Auditor, AuditRules
from vla_storage.audit_archive import AuditArchive
from vla_storage.audit_findings import AuditReport, FindingKind, Severity, difference
from vla_storage.checkpoints import Checkpoint, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointError, ObjectChangedError
from vla_storage.folders import unknown_prefixes
from vla_storage.marks import change_marks
from vla_storage.objects import MemoryObjectStore
from vla_storage.retention import apply_retention
from vla_storage.seals import Facts, facts_in, is_seal, seal_name

KEY = b"platform key of the tests"
FOLDER = "a/policies/reach/checkpoints/w1/"
Make = Callable[..., Checkpoint]


class Undeletable(MemoryObjectStore):
    """An audit deletes nothing: the store it gets cannot."""

    deletes = False
    gets = 0

    def delete(self, key: str) -> None:
        assert self.deletes, f"{key} was about to be deleted"
        super().delete(key)

    def get_with_etag(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, str]:
        self.gets += key.startswith("a/")
        return super().get_with_etag(key, max_bytes=max_bytes)

    def take(self, key: str) -> None:
        """Behind our back."""
        super().delete(key)


@pytest.fixture
def objects() -> Undeletable:
    return Undeletable()


@pytest.fixture
def store(objects: Undeletable) -> CheckpointStore:
    return CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)


def audit(
    objects: MemoryObjectStore, *, tenant: str = "a", deep: bool = False, ahead_s: float = 7200.0,
    **rules: object,
) -> AuditReport:  # fmt: skip
    """As if `ahead_s` later, so that nothing is young any more."""
    chosen = AuditRules(settle_s=0.0, **rules)  # type: ignore[arg-type]
    found = Auditor(
        objects, signing_key=KEY, rules=chosen, clock=lambda: time.time() + ahead_s
    ).audit(tenant, deep=deep)
    assert found is not None
    return found


def kinds(report: AuditReport) -> list[tuple[str, str]]:
    return [(str(one.kind), one.key) for one in report.findings]


def entry_key(store: CheckpointStore, checkpoint_id: str, name: str) -> str:
    entry = store.manifest(checkpoint_id).object(name)
    return store.folder(CheckpointRef.parse(checkpoint_id)) + entry.relative_key


def test_whole_checkpoints_give_no_finding(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    for step in (5, 10):
        store.save(make_checkpoint(step))
    report = audit(objects, deep=True)
    assert report.findings == ()
    assert (report.counts.checkpoints, report.counts.objects, report.worst) == (2, 10, None)
    assert report.counts.bytes_read == sum(
        store.manifest(f"reach/w1/{step}").size_bytes for step in (5, 10)
    )
    assert report == AuditReport.from_json(report.to_json())


@pytest.mark.parametrize(
    ("name", "fault", "kind"),
    [
        ("module.safetensors", "missing", FindingKind.MISSING),
        ("optimizer.safetensors", "truncated", FindingKind.TRUNCATED),
        ("module.safetensors", "replaced", FindingKind.CORRUPT),
        ("state.json", "longer", FindingKind.CORRUPT),
    ],
)
def test_f62_b65_an_object_changed_behind_our_back_is_named(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make,
    name: str, fault: str, kind: FindingKind,
) -> None:  # fmt: skip
    for step in (5, 10):
        store.save(make_checkpoint(step))
    assert audit(objects).findings == ()
    key = entry_key(store, "reach/w1/10", name)
    content = objects.get(key)
    if fault == "missing":
        objects.take(key)
    else:
        changed = {"truncated": content[:-1], "longer": content + b" "}
        objects.put(key, changed.get(fault, bytes(255 - byte for byte in content)))
    report = audit(objects)
    assert [(kind, key)] == kinds(report)
    assert (report.findings[0].severity, report.findings[0].tenant) == (Severity.ERROR, "a")
    with pytest.raises(CheckpointError):
        store.load("reach/w1/10")
    newest = store.latest("reach", "w1")
    assert newest is not None
    assert newest.checkpoint_id == "reach/w1/5"


def test_a_deep_audit_finds_what_etags_do_not_show(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(5))
    key = entry_key(store, "reach/w1/5", "module.safetensors")
    content, etag, modified = objects._objects[key]
    objects._objects[key] = (content[:-1] + b"\xff", etag, modified)  # rot below the store
    assert audit(objects).findings == ()
    assert [("corrupt", key)] == kinds(audit(objects, deep=True))


def _edit(raw: dict[str, object], **changes: object) -> bytes:
    """Signed by the platform's own key: a bug or a stolen key, not a tenant."""
    value = json.loads(manifests._canonical(raw | changes))
    signature = manifests._sign(value, KEY, str(value["tenant_id"]))
    return manifests._canonical({"manifest": value, "signature": signature})


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("edited", FindingKind.EDITED_MANIFEST, "signature_wrong"),
        ("other key", FindingKind.EDITED_MANIFEST, "signature_wrong"),
        ("unsigned", FindingKind.BAD_SIGNATURE, "signature_missing"),
        ("other tenant", FindingKind.FOREIGN_TENANT, "foreign_tenant"),
        ("foreign object", FindingKind.FOREIGN_TENANT, "foreign_object"),
        ("escape", FindingKind.FOREIGN_TENANT, "foreign_object"),
        ("negative step", FindingKind.BAD_MANIFEST, "step"),
        ("older step", FindingKind.BAD_MANIFEST, "wrong_place"),
        ("twice", FindingKind.BAD_MANIFEST, "duplicate_object"),
        ("version", FindingKind.BAD_MANIFEST, "version"),
        ("no json", FindingKind.BAD_MANIFEST, "malformed"),
    ],
)
def test_b64_every_bad_manifest_has_its_own_code(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make,
    fault: str, kind: FindingKind, reason: str,
) -> None:  # fmt: skip
    manifest = store.save(make_checkpoint(5))
    audit(objects)
    key = f"{FOLDER}0000000005/manifest.json"
    text = objects.get(key)
    raw = asdict(manifest)
    first = raw["objects"][0]
    faulty = {
        "edited": text.replace(b'"position":40', b'"position":41'),
        "other key": manifests.serialize(manifest, b"another key"),
        "unsigned": json.dumps({"manifest": raw}).encode(),
        "other tenant": manifests.serialize(replace(manifest, tenant_id="b"), KEY),
        "foreign object": _edit(raw, objects=[first | {"name": "b/policies/x/module"}]),
        "escape": _edit(raw, objects=[first | {"name": "../module"}]),
        "negative step": _edit(raw, step=-1),
        "older step": manifests.serialize(replace(manifest, step=4), KEY),
        "twice": _edit(raw, objects=[first, first]),
        "version": _edit(raw, version=99),
        "no json": b"{",
    }[fault]
    objects.put(key, faulty)
    report = audit(objects)
    assert [(kind, key)] == kinds(report)[:1]
    assert reason == report.findings[0].details["reason"]
    security = kind in (FindingKind.FOREIGN_TENANT, FindingKind.EDITED_MANIFEST)
    if security:
        assert Severity.CRITICAL is report.worst
    with pytest.raises(CheckpointError):
        store.load("reach/w1/5")


def test_what_nothing_refers_to_is_told_apart(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(5))
    expected = {
        "orphan": f"{FOLDER}0000000005/module-{'0' * 16}.safetensors",
        "extra": f"{FOLDER}0000000005/notes.txt",
        "half_written": f"{FOLDER}0000000007/",
    }
    objects.put(expected["orphan"], b"x")
    objects.put(expected["extra"], b"x")
    objects.put(f"{expected['half_written']}module-{'1' * 16}.safetensors", b"x")
    objects.put("a/policies/reach/checkpoints/w1/5/manifest.json", b"{}")  # not ten digits
    objects.put("a/somewhere/else", b"x")
    young = audit(objects, ahead_s=0.0)
    assert [kind for kind, _ in kinds(young)] == ["orphan", "orphan"]  # no place of ours
    assert young.counts.saves_in_progress == 2
    found = dict(kinds(audit(objects)))
    strays = {"a/policies/reach/checkpoints/w1/5/manifest.json", "a/somewhere/else"}
    listed = kinds(audit(objects))
    assert strays | {expected["orphan"]} == {key for kind, key in listed if kind == "orphan"}
    assert (expected["extra"], expected["half_written"]) == (
        found["extra"],
        found["half_written"],
    )


def test_lineage_that_does_not_hold_is_broken(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    def save(step: int, workload: str = "w1", **changes: object) -> None:
        one = make_checkpoint(step, workload=workload)
        line = replace(one.header.lineage, **changes)  # type: ignore[arg-type]
        store.save(replace(one, header=replace(one.header, lineage=line)))

    save(5)
    save(10, parent="reach/w1/5")
    save(5, workload="w2", parent="reach/gone/3")
    save(5, workload="w3", parent="reach/w3/9")
    save(5, workload="w4")
    save(6, workload="w4", dataset_digest="other")
    found = {one.key.split("/")[4]: one for one in audit(objects).findings}
    assert {"w2", "w3", "w4"} == set(found)
    assert Severity.WARNING is found["w2"].severity
    assert "is not older" in found["w3"].message
    assert "dataset_digest" in found["w4"].message
    # A parent of another run that was there is missed as soon as it is gone.
    save(7, workload="w5", parent="reach/w1/10")
    assert "w5" not in {one.key.split("/")[4] for one in audit(objects).findings}
    objects.deletes = True
    store.delete("reach/w1/10")
    objects.deletes = False
    assert "w5" in {one.key.split("/")[4] for one in audit(objects).findings}


def test_the_spec_of_a_run_is_compared_with_its_checkpoints(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(5))

    def spec_key(tenant: str, run: str) -> str:
        return f"{tenant}/workloads/{run}/spec.json"

    report = audit(objects, spec_key=spec_key)
    assert report.findings[0].message == "the spec it was made from is not there"


def test_expired_checkpoints_and_full_quotas_are_told(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    for step in (5, 10):
        store.save(make_checkpoint(step))
        ref = CheckpointRef.parse(f"reach/w1/{step}")
        change_marks(
            objects, "a", "reach",
            lambda m, r=ref: m.with_mark(r, expires=time.time(), pinned=r.step == 10),
        )  # fmt: skip
    report = audit(objects)
    assert [("expired_retention", f"{FOLDER}0000000005/")] == kinds(report)
    used = report.counts.size_bytes
    assert Severity.ERROR is audit(objects, quota_bytes=used - 1).worst
    near = [one for one in audit(objects, quota_bytes=used + 1).findings if one.kind == "quota"]
    assert [one.severity for one in near] == [Severity.WARNING]


def unsealed(objects: Undeletable) -> None:
    """As a release without seals left it."""
    for item in list(objects.list("a/")):
        if is_seal(item.key.rpartition("/")[2]):
            objects.take(item.key)


def test_an_unchanged_checkpoint_is_not_read_again(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    for step in range(1, 40):
        store.save(make_checkpoint(step))
    unsealed(objects)
    assert audit(objects).counts.checked == 39
    store.save(make_checkpoint(40))
    unsealed(objects)
    objects.gets = 0
    counts = audit(objects).counts
    assert (counts.unchanged, counts.checked, counts.checkpoints) == (39, 1, 40)
    assert objects.gets <= 3  # its manifest, that of the step before, the marks
    assert audit(objects, deep=True).counts.checked == 40


def test_the_first_audit_reads_one_manifest_of_each_run(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    for run in ("w1", "w2"):
        for step in range(1, 40):
            store.save(make_checkpoint(step, workload=run))
    objects.gets = 0
    counts = audit(objects).counts
    assert (counts.unchanged, counts.checked, counts.checkpoints) == (76, 2, 78)
    assert objects.gets <= 3  # two manifests, the marks


@pytest.mark.parametrize("fault", ["object", "manifest", "seal", "another's seal", "moved"])
def test_a_seal_hides_nothing(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make, fault: str
) -> None:
    """F62: whoever changes a folder cannot make the seal that goes with it."""
    for step in (1, 2, 3):
        store.save(make_checkpoint(step))
    folder = f"{FOLDER}0000000002/"
    (seal,) = (i.key for i in objects.list(folder) if is_seal(i.key.rpartition("/")[2]))
    key = entry_key(store, "reach/w1/2", "module.safetensors")
    if fault == "object":
        objects.put(key, objects.get(key)[::-1])
    elif fault == "manifest":
        text = objects.get(f"{folder}manifest.json").replace(b'"position":16', b'"position":17')
        objects.put(f"{folder}manifest.json", text)
    else:
        objects.take(seal)
        objects.put(key, objects.get(key)[::-1])
        forged = {
            "seal": seal.removesuffix("-16-2-none") + "-16-3-none",
            "another's seal": folder + next(
                i.key.rpartition("/")[2] for i in objects.list(f"{FOLDER}0000000003/")
                if is_seal(i.key.rpartition("/")[2])
            ),
            "moved": seal,
        }  # fmt: skip
        objects.put(forged[fault], b"")
    report = audit(objects)
    assert report.counts.unchanged == 0  # nor is what follows it taken for granted
    named = {"manifest": ("edited_manifest", f"{folder}manifest.json")}
    assert [named.get(fault, ("corrupt", key))] == kinds(report)


def test_facts_travel_in_a_seals_name(make_checkpoint: Make) -> None:
    facts = Facts(line="0" * 16, position=8, policy_version=1, parent="3")
    name = seal_name("1" * 32, facts, KEY)
    assert is_seal(name)
    assert facts == facts_in(name, "1" * 32, KEY)
    assert facts_in(name, "2" * 32, KEY) is None
    assert facts_in(name, "1" * 32, b"another key") is None
    assert facts_in(name.replace("-8-1-3", "-9-1-3"), "1" * 32, KEY) is None
    goes_on = replace(facts, position=16, policy_version=2)
    assert goes_on.goes_on_from(facts, step=4)
    assert not goes_on.goes_on_from(facts, step=3)  # its parent is not older
    assert not facts.goes_on_from(goes_on, step=4)
    assert not replace(goes_on, line="1" * 16).goes_on_from(facts, step=4)
    assert not replace(goes_on, parent="outer").goes_on_from(facts, step=4)


def test_an_audit_goes_on_where_it_was_stopped(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    for step in range(1, 101):
        store.save(make_checkpoint(step))
    unsealed(objects)
    objects.take(entry_key(store, "reach/w1/3", "state.json"))
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += 1
        return asked > 60

    rules = AuditRules(settle_s=0.0)
    assert Auditor(objects, signing_key=KEY, rules=rules, stopping=stopping).audit("a") is None
    report = audit(objects, ahead_s=0.0)
    assert (
        report.resumed, report.counts.checkpoints, report.counts.objects,
    ) == (1, 100, 400 - 1)  # fmt: skip
    assert [str(one.kind) for one in report.findings] == ["missing"]
    assert 100 - report.counts.checked <= 60  # the rest was not gone through twice
    assert audit(objects).resumed == 0


def test_the_newer_of_two_audits_of_a_tenant_goes_on(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(5))
    archive = AuditArchive(objects, "a")

    def stopping() -> bool:
        value, etag = archive.progress()
        archive.save_progress((value or {}) | {"owner": "another"}, etag)  # another one has begun
        return False

    rules = AuditRules(settle_s=0.0)
    with pytest.raises(ObjectChangedError, match="took over"):
        Auditor(objects, signing_key=KEY, rules=rules, stopping=stopping).audit("a")


def test_a_history_tells_what_changed(
    objects: Undeletable, store: CheckpointStore, make_checkpoint: Make
) -> None:
    for step in (5, 10):
        store.save(make_checkpoint(step))
    key = entry_key(store, "reach/w1/5", "state.json")
    content = objects.get(key)
    objects.take(key)
    first = audit(objects)
    objects.put(key, content)
    gone = entry_key(store, "reach/w1/10", "state.json")
    objects.take(gone)
    second = audit(objects)
    told = difference(first, second)
    assert ([gone], [key]) == ([f.key for f in told.appeared], [f.key for f in told.gone])
    archive = AuditArchive(objects, "a")
    assert [first.audit_id, second.audit_id] == archive.reports()
    assert second == archive.latest()


def test_one_tenants_audit_sees_nothing_of_a_tenant_with_a_longer_name(
    objects: Undeletable, make_checkpoint: Make
) -> None:
    CheckpointStore(objects=objects, tenant_id="ab", signing_key=KEY).save(make_checkpoint(5))
    assert audit(objects).counts.objects == 0
    assert audit(objects, tenant="ab").counts.checkpoints == 1
    objects.put("zz/x", b"")
    objects.put("platform/x", b"")
    assert unknown_prefixes(objects, {"ab"}) == ["zz"]


def test_f65_saves_and_retention_go_on_during_audits(make_checkpoint: Make) -> None:
    """Three writers at once: no entry is lost, and no audit takes what is in motion for a fault."""
    objects = MemoryObjectStore()
    store = CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)
    steps, done = 200, threading.Event()

    def train() -> None:
        for step in range(1, steps + 1):
            store.save(make_checkpoint(step))
        done.set()

    def retain() -> None:
        while not done.is_set():
            change_marks(
                objects, "a", "reach",
                lambda m: m.with_mark(CheckpointRef.parse("reach/w1/1"), pinned=True),
            )  # fmt: skip
            apply_retention(store, "reach", keep_last=5, protect=("reach/w1/1",))

    threads = [threading.Thread(target=train), threading.Thread(target=retain)]
    for thread in threads:
        thread.start()
    reports = []
    while not done.is_set():
        reports.append(
            Auditor(objects, signing_key=KEY, rules=AuditRules(settle_s=0.05)).audit("a")
        )
    for thread in threads:
        thread.join()
    assert [kinds(report) for report in reports if report and report.findings] == []
    kept = [ref.step for ref in store.list("reach")]
    assert 1 in kept
    assert list(range(steps - 4, steps + 1)) == kept[-5:]


def test_memory_is_flat_at_100_000_objects() -> None:
    """The listing is never held: what 20 000 and what 100 000 objects take is the same."""

    class Endless(MemoryObjectStore):
        num_folders = 0

        def list(self, prefix: str, *, after: str = ""):  # type: ignore[no-untyped-def]
            if not prefix.startswith("a/"):
                yield from super().list(prefix, after=after)
                return
            for folder in range(self.num_folders):
                for name in range(4):
                    yield replace(info, key=f"{FOLDER}{folder:010d}/module-{name:016x}.safetensors")

    objects = Endless()
    objects.put("b/x", b"")
    info = objects.head("b/x")
    peaks = []
    for num in (5_000, 25_000):
        objects.num_folders = num
        tracemalloc.start()
        report = audit(objects, ahead_s=0.0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (4 * num, num) == (report.counts.objects, report.counts.saves_in_progress)
    assert peaks[1] < 1.3 * peaks[0] + (1 << 20)
