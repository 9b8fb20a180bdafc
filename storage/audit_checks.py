"""What one folder of a tenant should be, compared with what is there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vla_storage.audit_findings import Finding, FindingKind, Severity
from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.checkpoints import MANIFEST, CheckpointStore
from vla_storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidKeyError,
    ManifestInvalidError,
    ObjectNotFoundError,
    StorageUnavailableError,
)
from vla_storage.folders import MOST_OBJECTS, Folder, Kind
from vla_storage.manifests import Manifest, ManifestReason, ObjectEntry
from vla_storage.objects.base import ObjectInfo
from vla_storage.seals import is_seal

_OURS = re.compile(r"[a-z0-9][a-z0-9_-]*-[0-9a-f]{16}(\.[a-z0-9]+)?")
_REASONS = {
    ManifestReason.SIGNATURE_WRONG: (FindingKind.EDITED_MANIFEST, Severity.CRITICAL),
    ManifestReason.SIGNATURE_MISSING: (FindingKind.BAD_SIGNATURE, Severity.CRITICAL),
    ManifestReason.FOREIGN_TENANT: (FindingKind.FOREIGN_TENANT, Severity.CRITICAL),
    ManifestReason.FOREIGN_OBJECT: (FindingKind.FOREIGN_TENANT, Severity.CRITICAL),
}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of one folder."""

    findings: tuple[Finding, ...] = ()
    manifest: Manifest | None = None
    in_progress: bool = False  # a save may be under way
    bytes_read: int = 0


@dataclass
class _Notes:
    tenant: str
    found: list[Finding] = field(default_factory=list)

    def add(
        self, kind: FindingKind, severity: Severity, key: str, message: str, **details: Any
    ) -> None:
        self.found.append(
            Finding(
                kind=kind, severity=severity, tenant=self.tenant, key=key, message=message,
                details=details,
            )
        )  # fmt: skip


def check_folder(
    store: CheckpointStore, folder: Folder, *, deep: bool, now: float, grace_s: float
) -> Checked:
    """Compare a folder's listing with its manifest; `deep` reads and hashes every byte.

    Objects younger than `grace_s` may belong to a save that is under way.
    """
    notes = _Notes(store.tenant_id)
    if folder.kind is Kind.STRAY:
        for item in folder.items[:1]:
            more = f" and {folder.num_objects - 1} more" if folder.num_objects > 1 else ""
            notes.add(
                FindingKind.ORPHAN, Severity.WARNING, item.key,
                f"lies in no place that the platform writes to{more}",
                num_objects=folder.num_objects, size_bytes=folder.size_bytes,
            )  # fmt: skip
    elif folder.kind is Kind.CHECKPOINT:
        return _check_checkpoint(store, notes, folder, deep=deep, limit=now - grace_s)
    return Checked(findings=tuple(notes.found))


def _check_checkpoint(
    store: CheckpointStore, notes: _Notes, folder: Folder, *, deep: bool, limit: float
) -> Checked:
    assert folder.ref is not None
    listed = ((item.key.removeprefix(folder.prefix), item) for item in folder.items)
    by_name = {name: item for name, item in listed if not is_seal(name)}
    if MANIFEST not in by_name:
        if folder.newest > limit:
            return Checked(in_progress=True)
        _half_written(notes, folder, "objects of a checkpoint without a manifest")
        return Checked(findings=tuple(notes.found))
    try:
        manifest = store.manifest(folder.ref.id)
    except ManifestInvalidError as error:
        _refused(notes, folder, error)
        return Checked(findings=tuple(notes.found))
    except CheckpointNotFoundError:
        # Removed since it was listed; the second look decides.
        notes.add(
            FindingKind.MISSING, Severity.ERROR, folder.prefix + MANIFEST, "the manifest is gone"
        )
        return Checked(findings=tuple(notes.found))
    bytes_read = 0
    for entry in manifest.objects:
        key = folder.prefix + entry.relative_key
        there = by_name.pop(entry.relative_key, None)
        if _compare(notes, key, entry, there, folder) and deep:
            bytes_read += _hash(store, notes, key, entry)
    del by_name[MANIFEST]
    young = False
    for item in by_name.values():
        if item.modified > limit:
            young = True
        else:
            _unnamed(notes, folder.prefix, item)
    return Checked(
        findings=tuple(notes.found), manifest=manifest, in_progress=young, bytes_read=bytes_read
    )


def _half_written(notes: _Notes, folder: Folder, what: str) -> None:
    notes.add(
        FindingKind.HALF_WRITTEN, Severity.WARNING, folder.prefix,
        f"{what}: {folder.num_objects} objects of a save that died",
        num_objects=folder.num_objects, size_bytes=folder.size_bytes,
    )  # fmt: skip


def _refused(notes: _Notes, folder: Folder, error: ManifestInvalidError) -> None:
    kind, severity = _REASONS.get(
        ManifestReason(error.details["reason"]), (FindingKind.BAD_MANIFEST, Severity.ERROR)
    )
    notes.add(kind, severity, folder.prefix + MANIFEST, error.message, **error.details)


def _compare(
    notes: _Notes, key: str, entry: ObjectEntry, there: ObjectInfo | None, folder: Folder
) -> bool:
    if there is None:
        if folder.num_objects <= MOST_OBJECTS:
            notes.add(FindingKind.MISSING, Severity.ERROR, key, f"{entry.name} is not there")
        return False
    sizes = {"size_bytes": there.size, "expected_bytes": entry.size}
    if there.size < entry.size:
        notes.add(
            FindingKind.TRUNCATED, Severity.ERROR, key,
            f"{entry.name} has {there.size} bytes, not {entry.size}", **sizes,
        )  # fmt: skip
    elif there.size > entry.size or there.etag != entry.etag:
        notes.add(
            FindingKind.CORRUPT, Severity.ERROR, key,
            f"{entry.name} was replaced: its {'size' if there.size != entry.size else 'etag'} "
            "differs from the manifest's", **sizes,
        )  # fmt: skip
    else:
        return True
    return False


def _hash(store: CheckpointStore, notes: _Notes, key: str, entry: ObjectEntry) -> int:
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in store.objects.chunks(key):
            digest.update(chunk)
            size += len(chunk)
    except ObjectNotFoundError:
        notes.add(FindingKind.MISSING, Severity.ERROR, key, f"{entry.name} is gone")
        return size
    except StorageUnavailableError as error:
        notes.add(FindingKind.UNREADABLE, Severity.ERROR, key, f"{entry.name}: {error}")
        return size
    if digest.hexdigest() != entry.sha256:
        notes.add(
            FindingKind.CORRUPT, Severity.ERROR, key,
            f"{entry.name} does not match its SHA-256", expected=entry.sha256,
        )  # fmt: skip
    return size


def _unnamed(notes: _Notes, prefix: str, item: ObjectInfo) -> None:
    name = item.key.removeprefix(prefix)
    if _OURS.fullmatch(name):
        notes.add(
            FindingKind.ORPHAN, Severity.INFO, item.key,
            "no manifest names it: a save that lost a race left it", size_bytes=item.size,
        )  # fmt: skip
    else:
        notes.add(
            FindingKind.EXTRA, Severity.WARNING, item.key,
            "a foreign object inside a checkpoint", size_bytes=item.size,
        )  # fmt: skip


def check_lineage(
    manifest: Manifest,
    before: Manifest | None,
    *,
    key: str,
    parent_is_there: Callable[[CheckpointRef], bool],
    spec_digest: str | None,
) -> Iterator[Finding]:
    """Whether a checkpoint goes on from what it says.

    `before` is the one before it of the same workload. A parent of the same workload may have been
    removed by retention; one of another workload is what the run was made from.
    """

    def broken(message: str, severity: Severity = Severity.ERROR, **details: Any) -> Finding:
        return Finding(
            kind=FindingKind.BROKEN_LINEAGE, severity=severity, tenant=manifest.tenant_id,
            key=key, message=message, details=details,
        )  # fmt: skip

    line = manifest.lineage
    if spec_digest is not None and spec_digest != line.spec_digest:
        what = "is not there" if not spec_digest else "is another one"
        yield broken(f"the spec it was made from {what}", expected=line.spec_digest)
    if before is not None:
        for name in ("spec_digest", "dataset_digest", "base_digest", "schema_signature"):
            if getattr(before.lineage, name) != getattr(line, name):
                yield broken(
                    f"{name} differs from that of step {before.step} of the same run", field=name
                )
        if (manifest.position, manifest.policy_version) < (before.position, before.policy_version):
            yield broken(f"position or version are behind those of step {before.step}")
    if line.parent is None:
        return
    try:
        parent = CheckpointRef.parse(line.parent)
    except InvalidKeyError as error:
        yield broken(f"the parent's id is malformed: {error}")
        return
    same_run = (parent.policy, parent.workload_id) == (manifest.policy, manifest.workload_id)
    if same_run and parent.step >= manifest.step:
        yield broken(f"its parent {parent.id} is not older", parent=parent.id)
    elif not same_run and not parent_is_there(parent):
        yield broken(
            f"its parent {parent.id} is not there: it cannot be made again from the start",
            Severity.WARNING, parent=parent.id,
        )  # fmt: skip


def manifest_or_none(store: CheckpointStore, checkpoint_id: str) -> Manifest | None:
    try:
        return store.manifest(checkpoint_id)
    except CheckpointError:
        return None
