"""Whether a tenant's checkpoints go on from each other, compared in the order of their listing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from vla_storage.audit_archive import Seal
from vla_storage.audit_checks import check_lineage, manifest_or_none
from vla_storage.audit_findings import Finding, FindingKind, Severity
from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.checkpoints import MANIFEST, CheckpointStore
from vla_storage.errors import ObjectNotFoundError
from vla_storage.folders import Folder
from vla_storage.manifests import Manifest

SpecKey = Callable[[str, str], str]
"""`spec_key(tenant, workload)`: the object whose SHA-256 is the lineage's spec digest."""


class Lineages:
    """Remembers the checkpoint before, a run's spec and which parents are there."""

    def __init__(self, store: CheckpointStore, *, spec_key: SpecKey | None) -> None:
        self._store = store
        self._spec_key = spec_key
        self._before: tuple[CheckpointRef, Manifest | None] | None = None
        self._spec: tuple[str, str] = ("", "")
        self._parents: dict[CheckpointRef, bool] = {}

    def passed(self, ref: CheckpointRef, manifest: Manifest | None) -> None:
        """The next one is compared with this; its manifest is read where it is not given."""
        self._before = (ref, manifest)

    def look_back(self, ref: CheckpointRef) -> None:
        """The next one is compared with the one that is before `ref` now."""
        earlier = [
            one for one in self._store.list(ref.policy, ref.workload_id) if one.step < ref.step
        ]
        self._before = (earlier[-1], None) if earlier else None

    def check(self, manifest: Manifest, folder: Folder) -> list[Finding]:
        before = None
        if self._before is not None:
            ref, before = self._before
            if (ref.policy, ref.workload_id) != (manifest.policy, manifest.workload_id):
                before = None
            elif before is None:
                before = manifest_or_none(self._store, ref.id)
        return list(
            check_lineage(
                manifest,
                before,
                key=folder.prefix + MANIFEST,
                parent_is_there=self._is_there,
                spec_digest=self._spec_digest(manifest.workload_id),
            )
        )

    def lost_parent(self, known: Seal) -> list[Finding]:
        if not known.parent or self._is_there(CheckpointRef.parse(known.parent)):
            return []
        return [
            Finding(
                kind=FindingKind.BROKEN_LINEAGE,
                severity=Severity.WARNING,
                tenant=self._store.tenant_id,
                key=known.prefix + MANIFEST,
                message=f"its parent {known.parent} is not there: it cannot be made again from "
                "the start",
                details={"parent": known.parent},
            )
        ]

    def _spec_digest(self, workload: str) -> str | None:
        """Of the stored spec; empty where there is none, None where nobody asks."""
        if self._spec_key is None:
            return None
        if self._spec[0] != workload:
            try:
                text = self._store.objects.get(self._spec_key(self._store.tenant_id, workload))
                self._spec = (workload, hashlib.sha256(text).hexdigest())
            except ObjectNotFoundError:
                self._spec = (workload, "")
        return self._spec[1]

    def _is_there(self, ref: CheckpointRef) -> bool:
        if ref not in self._parents:
            if len(self._parents) > 1000:
                self._parents.clear()
            try:
                self._store.objects.head(self._store.folder(ref) + MANIFEST)
                self._parents[ref] = True
            except ObjectNotFoundError:
                self._parents[ref] = False
        return self._parents[ref]
