"""The auditor: walks a tenant's prefix in listing order and says what is wrong. Deletes nothing.

Memory stays flat: one folder, a window of manifests under way, and a bounded number of findings.
A folder whose listing (keys, sizes, etags) is what its publisher sealed or an earlier audit found
whole is not read, so a shallow audit costs little more than the listing; a deep one trusts nothing
and reads all.
What looks wrong is looked at a second time at the end: saves and retention go on meanwhile. An
audit that was stopped goes on where it had got to.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from vla_storage.audit_archive import AuditArchive, Seal
from vla_storage.audit_checks import Checked, check_folder
from vla_storage.audit_findings import AuditReport, Counts, Finding, FindingKind, Severity
from vla_storage.audit_lineage import Lineages, SpecKey
from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import (
    CheckpointError,
    InvalidKeyError,
    ObjectChangedError,
    ObjectExistsError,
)
from vla_storage.folders import Folder, Kind, folders
from vla_storage.manifests import Manifest
from vla_storage.marks import Marks, read_marks
from vla_storage.objects.base import ObjectStore
from vla_storage.seals import Facts

_log = logging.getLogger(__name__)

MOST_FINDINGS = 10_000
_SEALS_PER_PART = 5000
_WINDOW = 32


@dataclass(frozen=True, kw_only=True)
class AuditRules:
    """What an audit is measured against."""

    grace_s: float = 3600.0  # objects without a manifest may belong to a save this long
    quota_bytes: int | None = None
    quota_warning: float = 0.9  # share of the quota
    settle_s: float = 1.0  # before the second look
    save_every_s: float = 10.0
    stale_s: float = 24 * 3600.0  # progress older than this is begun anew
    num_threads: int = 4
    spec_key: SpecKey | None = None


@dataclass(kw_only=True)
class _State:
    """What survives a stop."""

    audit_id: str
    deep: bool
    started: float
    generation: int
    after: str = ""
    parts: int = 0
    resumed: int = 0
    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)  # prefixes to look at again

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> _State:
        known = {name: raw[name] for name in cls.__dataclass_fields__}
        known["counts"] = Counts(**raw["counts"])
        known["findings"] = [Finding.from_dict(one) for one in raw["findings"]]
        return cls(**known)


class Auditor:
    """`stopping()` is asked between folders: True ends the audit there, to be gone on with."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        signing_key: bytes,
        rules: AuditRules | None = None,
        clock: Callable[[], float] = time.time,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._objects = objects
        self._key = signing_key
        self._rules = rules or AuditRules()
        self._clock = clock
        self._stopping = stopping

    def audit(self, tenant: str, *, deep: bool = False) -> AuditReport | None:
        """Walk the tenant's prefix and keep the report; None where it was stopped.

        Raises `ObjectChangedError` where another audit of the tenant took over.
        """
        walk = _Walk(self._objects, tenant, self._key, self._rules, self._clock, deep=deep)
        with ThreadPoolExecutor(self._rules.num_threads, "audit") as pool:
            if not walk.run(pool, self._stopping):
                return None
            walk.look_again()
        return walk.finish()


class _Walk:
    def __init__(
        self, objects: ObjectStore, tenant: str, key: bytes, rules: AuditRules,
        clock: Callable[[], float], *, deep: bool,
    ) -> None:  # fmt: skip
        self._objects, self._tenant, self._key = objects, tenant, key
        self._rules, self._clock = rules, clock
        self._store = CheckpointStore(objects=objects, tenant_id=tenant, signing_key=key)
        self._archive = AuditArchive(objects, tenant)
        last = self._archive.latest()
        self._state, self._etag = self._begin(last, deep)
        # A deep audit trusts nothing; one whose listing was cut short has nothing to trust.
        trusted = last is not None and not deep
        self._old = (
            self._archive.seals(last.generation, last.index_parts) if trusted and last else iter(())
        )
        self._old_head: Seal | None = next(self._old, None)
        self._new: list[Seal] = []
        self._saved = time.monotonic()
        self._lineages = Lineages(self._store, spec_key=rules.spec_key)
        self._marks: tuple[str, Marks] = ("", Marks())

    def _begin(self, last: AuditReport | None, deep: bool) -> tuple[_State, str | None]:
        left, etag = self._archive.progress()
        now = self._clock()
        if left and left["deep"] == deep and now - left["started"] < self._rules.stale_s:
            state = _State.from_dict(left)
            # One that was stopped between its report and this mark has nothing left to do.
            if last is None or last.audit_id != state.audit_id:
                state.resumed += 1
                return state, etag
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%S")
        # The store's order of reports is that of their beginnings, also within one second.
        millis = int(now % 1 * 1000)
        state = _State(
            audit_id=f"{stamp}.{millis:03d}Z-{secrets.token_hex(3)}",
            deep=deep,
            started=now,
            generation=1 - last.generation if last else 0,
        )
        return state, etag

    def run(self, pool: ThreadPoolExecutor, stopping: Callable[[], bool]) -> bool:
        self._save()
        waiting: deque[tuple[Folder, str, Future[Checked] | None, Seal | None]] = deque()
        items = self._objects.list(f"{self._tenant}/", after=self._state.after)
        before: tuple[CheckpointRef, Facts] | None = None
        for folder in folders(items, self._tenant):
            if stopping():
                break
            seal, known = "", None
            if folder.kind is Kind.CHECKPOINT and folder.ref is not None:
                seal = folder.seal(self._key)
                facts = folder.facts(seal, self._key)
                known = self._known(folder, seal) or _sealed(folder, seal, facts, before)
                before = (folder.ref, facts) if facts is not None else None
                if self._state.deep:
                    known = None
            checked: Future[Checked] | None = None
            if folder.kind is not Kind.AREA and known is None:
                checked = pool.submit(self._check, folder)
            waiting.append((folder, seal, checked, known))
            if len(waiting) >= _WINDOW:
                self._take(*waiting.popleft())
        else:
            while waiting:
                self._take(*waiting.popleft())
            self._save()
            return True
        while waiting:
            self._take(*waiting.popleft())
        self._save()
        return False

    def _check(self, folder: Folder) -> Checked:
        return check_folder(
            self._store, folder, deep=self._state.deep, now=self._clock(),
            grace_s=self._rules.grace_s,
        )  # fmt: skip

    def _known(self, folder: Folder, seal: str) -> Seal | None:
        """What an earlier audit sealed as it is; both run in listing order, so neither is ever
        searched."""
        while self._old_head is not None and self._old_head.prefix < folder.prefix:
            self._old_head = next(self._old, None)
        found = self._old_head
        same = found is not None and (found.prefix, found.seal) == (folder.prefix, seal)
        return found if same else None

    def _take(
        self, folder: Folder, seal: str, checked: Future[Checked] | None, known: Seal | None
    ) -> None:
        state, counts = self._state, self._state.counts
        counts.objects += folder.num_objects
        counts.size_bytes += folder.size_bytes
        area = folder.prefix.split("/")[1] or "."
        counts.bytes_by_area[area] = counts.bytes_by_area.get(area, 0) + folder.size_bytes
        findings: list[Finding] = []
        if folder.kind is Kind.CHECKPOINT and folder.ref is not None:
            findings += self._expired(folder.ref, folder.prefix)
        if known is not None and folder.ref is not None:
            counts.checkpoints += 1
            counts.unchanged += 1
            self._new.append(known)
            self._lineages.passed(folder.ref, None)
            findings += self._lineages.lost_parent(known)
        elif checked is not None:
            found = checked.result()
            counts.bytes_read += found.bytes_read
            counts.saves_in_progress += found.in_progress
            findings += found.findings
            if found.manifest is not None and folder.ref is not None:
                counts.checkpoints += 1
                counts.checked += 1
                findings += self._lineages.check(found.manifest, folder)
                if not findings and not found.in_progress:
                    self._new.append(
                        Seal(prefix=folder.prefix, seal=seal, parent=_outer(found.manifest))
                    )
                self._lineages.passed(folder.ref, found.manifest)
        if findings and folder.kind is not Kind.STRAY and len(state.suspects) < MOST_FINDINGS:
            state.suspects.append(folder.prefix)
        else:
            self._report(findings)
        state.after = folder.last_key
        if len(self._new) >= _SEALS_PER_PART:
            self._write_seals()
        if time.monotonic() - self._saved > self._rules.save_every_s:
            self._save()

    def _report(self, findings: list[Finding]) -> None:
        for one in findings:
            kinds = self._state.counts.findings
            kinds[one.kind] = kinds.get(one.kind, 0) + 1
            if len(self._state.findings) < MOST_FINDINGS:
                self._state.findings.append(one)

    def look_again(self) -> None:
        """What a save or a removal was in the middle of is whole or gone by now."""
        suspects = self._state.suspects
        if suspects:
            time.sleep(self._rules.settle_s)
        for prefix in suspects:
            items = self._objects.list(prefix)
            for folder in folders(items, self._tenant):
                findings: list[Finding] = []
                checked = self._check(folder)
                findings += checked.findings
                if folder.ref is not None:
                    findings += self._expired(folder.ref, folder.prefix)
                    if checked.manifest is not None:
                        self._lineages.look_back(folder.ref)
                        findings += self._lineages.check(checked.manifest, folder)
                self._report(findings)
        self._state.suspects = []

    def finish(self) -> AuditReport:
        state, rules = self._state, self._rules
        used, quota = state.counts.size_bytes, rules.quota_bytes
        if quota is not None and used > rules.quota_warning * quota:
            over = used > quota
            finding = Finding(
                kind=FindingKind.QUOTA,
                severity=Severity.ERROR if over else Severity.WARNING,
                tenant=self._tenant,
                key=f"{self._tenant}/",
                message=f"stores {used} of {quota} bytes",
                details={"size_bytes": used, "quota_bytes": quota},
            )
            self._report([finding])
        self._write_seals()
        report = AuditReport(
            audit_id=state.audit_id,
            tenant=self._tenant,
            deep=state.deep,
            started=state.started,
            finished=self._clock(),
            counts=state.counts,
            findings=tuple(
                sorted(state.findings, key=lambda one: (-one.severity.rank, one.key, one.kind))
            ),
            generation=state.generation,
            index_parts=state.parts,
            resumed=state.resumed,
        )
        try:
            self._archive.keep(report)
        except ObjectExistsError:
            return self._archive.report(report.audit_id)
        return report

    def _save(self) -> None:
        self._write_seals()
        try:
            self._etag = self._archive.save_progress(self._state.to_dict(), self._etag)
        except (ObjectExistsError, ObjectChangedError) as error:
            raise ObjectChangedError(
                f"another audit of {self._tenant} took over", tenant=self._tenant
            ) from error
        self._saved = time.monotonic()

    def _write_seals(self) -> None:
        if self._new:
            self._archive.write_seals(self._state.generation, self._state.parts, self._new)
            self._state.parts += 1
            self._new = []

    def _expired(self, ref: CheckpointRef, prefix: str) -> list[Finding]:
        if self._marks[0] != ref.policy:
            try:
                marks = read_marks(self._objects, self._tenant, ref.policy)
            except CheckpointError as error:
                marks = Marks()
                _log.warning("action=marks_damaged reason=%s", error)
            self._marks = (ref.policy, marks)
        marks = self._marks[1]
        expires = marks.mark(ref).expires
        late_s = self._clock() - (expires or 0.0)
        if expires is None or marks.is_kept(ref) or late_s < self._rules.grace_s:
            return []
        return [
            Finding(
                kind=FindingKind.EXPIRED_RETENTION,
                severity=Severity.WARNING,
                tenant=self._tenant,
                key=prefix,
                message=f"its time to live was over {late_s / 3600:.1f} h ago",
                details={"expires": expires},
            )
        ]


def _sealed(
    folder: Folder, seal: str, facts: Facts | None, before: tuple[CheckpointRef, Facts] | None
) -> Seal | None:
    """What its publisher sealed, where it goes on from the one before. A run's first checkpoint is
    read whoever sealed it: it tells what the run was made from."""
    ref = folder.ref
    if ref is None or facts is None or before is None:
        return None
    same_run = (before[0].policy, before[0].workload_id) == (ref.policy, ref.workload_id)
    if same_run and facts.goes_on_from(before[1], step=ref.step):
        return Seal(prefix=folder.prefix, seal=seal)
    return None


def _outer(manifest: Manifest) -> str:
    """The parent where it belongs to another run."""
    parent = manifest.lineage.parent
    if parent is None:
        return ""
    try:
        ref = CheckpointRef.parse(parent)
    except InvalidKeyError:
        return ""
    same = (ref.policy, ref.workload_id) == (manifest.policy, manifest.workload_id)
    return "" if same else parent
