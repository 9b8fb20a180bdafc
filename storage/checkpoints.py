"""A tenant's checkpoints in an object store: objects first, the manifest last.

    <tenant>/policies/<policy>/checkpoints/<workload>/<step, ten digits>/
        module-<digest>.safetensors  optimizer-<digest>.safetensors  state-<digest>.json
        manifest.json  sealed-<hmac>-<facts>

A checkpoint exists when its manifest does; everything else is a leftover. Object keys carry their
digest, so two writers of the same step never touch each other's objects, and the conditional
create of the manifest picks one of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from vla_storage import manifests, tensors
from vla_storage.checkpoint_types import (
    MODULE,
    OPTIMIZER,
    STATE,
    Checkpoint,
    CheckpointHeader,
    CheckpointRef,
    Failpoint,
    LoadedCheckpoint,
    describe,
)
from vla_storage.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StorageError,
    TensorFormatError,
)
from vla_storage.manifests import Manifest, ObjectEntry
from vla_storage.names import check_id, check_name
from vla_storage.objects.base import Body, ObjectStore
from vla_storage.seals import Facts, listing_seal, seal_name
from vla_storage.tensors import Array

__all__ = [
    "Checkpoint",
    "CheckpointHeader",
    "CheckpointRef",
    "CheckpointStore",
    "Failpoint",
    "LoadedCheckpoint",
]

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


class _Listed(NamedTuple):
    key: str
    size: int
    etag: str


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one tenant.

    `signing_key=None` is for a tenant's client, which reads its own checkpoints without the
    platform's key: digests are verified, signatures are not, and nothing can be published.
    """

    objects: ObjectStore
    tenant_id: str
    signing_key: bytes | None = field(default=None, repr=False)
    failpoint: Failpoint | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant_id)

    def publish(
        self,
        header: CheckpointHeader,
        bodies: Mapping[str, Body],
        *,
        guard: Callable[[], None] | None = None,
    ) -> Manifest:
        """Upload the bodies, then make the checkpoint visible; returns its manifest.

        `guard` runs right before the manifest is written: raise there (a lost lease, a cancelled
        workload) and nothing becomes visible. Publishing the same content again succeeds and
        changes nothing. Raises `ObjectExistsError` where the step exists with other content: the
        caller is not the owner of this workload any more and has to stop.
        """
        if self.signing_key is None:
            raise CheckpointError("publishing needs the platform's signing key")
        ref = CheckpointRef.parse(f"{header.policy}/{header.workload_id}/{header.step}")
        planned = {name: describe(name, body) for name, body in bodies.items()}
        manifest = self._manifest(header, planned.values())
        if self._is_published(ref, manifest):
            return self.manifest(ref.id)
        prefix = self.folder(ref)
        entries = []
        for name, body in bodies.items():
            entry = planned[name]
            etag = self.objects.put(prefix + entry.relative_key, body, sha256=entry.sha256)
            entries.append(ObjectEntry(name=name, size=entry.size, sha256=entry.sha256, etag=etag))
            self._reach("checkpoint.object")
        manifest = self._manifest(header, entries)
        for entry in entries:
            self._verify_head(ref, entry)
        if guard is not None:
            guard()
        text = manifests.serialize(manifest, self.signing_key)
        try:
            etag = self.objects.put(prefix + MANIFEST, text, if_absent=True)
        except ObjectExistsError:
            # Either a twin of this process won, or a retried request met its own first try.
            if not self._is_published(ref, manifest):
                raise
            return self.manifest(ref.id)
        self._reach("checkpoint.manifest")
        self._seal(ref, manifest, _Listed(prefix + MANIFEST, len(text), etag))
        return manifest

    def _seal(self, ref: CheckpointRef, manifest: Manifest, own: _Listed) -> None:
        """Spare audits the reading; see `vla_storage.seals`. The checkpoint is there without it."""
        assert self.signing_key is not None
        prefix = self.folder(ref)
        listed = [
            _Listed(prefix + one.relative_key, one.size, one.etag) for one in manifest.objects
        ]
        listed = sorted((*listed, own), key=lambda item: item.key)
        seal = listing_seal(listed, self.signing_key, num_objects=len(listed))
        try:
            name = seal_name(seal, Facts.of(manifest), self.signing_key)
            self.objects.put(prefix + name, b"")
        except StorageError as error:
            _log.warning("action=checkpoint_not_sealed reason=%s", error)

    def save(self, checkpoint: Checkpoint) -> Manifest:
        """Serialise and publish in the calling thread; see `CheckpointWriter` for training."""
        return self.publish(checkpoint.header, checkpoint.bodies())

    def list(self, policy: str, workload_id: str | None = None) -> list[CheckpointRef]:
        """Every visible checkpoint, by workload and numeric step. Validity is not checked."""
        found = []
        prefix = self.policy_prefix(policy, workload_id)
        for item in self.objects.list(prefix):
            ref = _ref_of_key(policy, item.key.removeprefix(self.policy_prefix(policy)))
            if ref is not None:
                found.append(ref)
        return sorted(found)

    def manifest(self, checkpoint_id: str) -> Manifest:
        """The verified manifest. Raises `CheckpointNotFoundError`, also for another tenant's id,
        and `ManifestInvalidError`."""
        ref = CheckpointRef.parse(checkpoint_id)
        try:
            data = self.objects.get(
                self.folder(ref) + MANIFEST, max_bytes=manifests.MAX_MANIFEST_BYTES
            )
        except ObjectNotFoundError:
            raise CheckpointNotFoundError(
                f"no checkpoint {checkpoint_id}", checkpoint=checkpoint_id
            ) from None
        except ObjectTooLargeError as error:
            raise manifests.refuse_size() from error
        manifest = manifests.parse(data, tenant_id=self.tenant_id, signing_key=self.signing_key)
        if manifest.checkpoint_id != ref.id:
            raise manifests.refuse_place(f"{manifest.checkpoint_id} found at {ref.id}")
        return manifest

    def verify(self, checkpoint_id: str, *, content: bool = True) -> Manifest:
        """The manifest after a check that every object is there and whole.

        `content` reads and hashes every byte; without it, sizes and etags are compared. Raises
        `CheckpointCorruptError` naming the object.
        """
        manifest = self.manifest(checkpoint_id)
        ref = CheckpointRef.parse(checkpoint_id)
        for entry in manifest.objects:
            self._verify_head(ref, entry)
            if content:
                self._read(ref, entry)
        return manifest

    def load(self, checkpoint_id: str, *, allow_not_finite: bool = False) -> LoadedCheckpoint:
        """Read and verify everything. Raises `CheckpointNotFoundError`, `ManifestInvalidError` or
        `CheckpointCorruptError` (missing, altered, malformed, or NaN weights)."""
        manifest = self.manifest(checkpoint_id)
        ref, finite = CheckpointRef.parse(checkpoint_id), not allow_not_finite
        return LoadedCheckpoint(
            manifest=manifest,
            module=self._tensors(ref, manifest.object(MODULE), finite=finite),
            optimizer=self._tensors(ref, manifest.object(OPTIMIZER), finite=finite),
            state=_decode_state(ref, self._read(ref, manifest.object(STATE))),
        )

    def load_module(self, checkpoint_id: str) -> tuple[Manifest, dict[str, Array]]:
        """What acting needs, a third of the bytes. Raises as `load` does."""
        manifest = self.manifest(checkpoint_id)
        ref = CheckpointRef.parse(checkpoint_id)
        return manifest, self._tensors(ref, manifest.object(MODULE), finite=True)

    def latest(self, policy: str, workload_id: str) -> Manifest | None:
        """The newest checkpoint of a workload whose manifest and objects are all there.

        Damaged ones are skipped and logged (action `checkpoint_damaged`).
        """
        return next(self._newest(policy, workload_id, self._verify_shallow), None)

    def restore(self, policy: str, workload_id: str) -> LoadedCheckpoint | None:
        """Load the newest checkpoint of a workload that verifies byte for byte."""
        return next(self._newest(policy, workload_id, self.load), None)

    def delete(self, checkpoint_id: str) -> None:
        """Remove one checkpoint, manifest first: it is never visible and incomplete."""
        folder = self.folder(CheckpointRef.parse(checkpoint_id))
        self.objects.delete(folder + MANIFEST)
        for item in list(self.objects.list(folder)):
            self.objects.delete(item.key)

    def _newest(self, policy: str, workload_id: str, read: Callable[[str], _T]) -> Iterator[_T]:
        for ref in reversed(self.list(policy, workload_id)):
            try:
                yield read(ref.id)
            except CheckpointError as error:
                _log.warning(
                    "action=checkpoint_damaged tenant=%s checkpoint=%s code=%s reason=%s",
                    self.tenant_id, ref.id, error.code, error,
                )  # fmt: skip

    def _verify_shallow(self, checkpoint_id: str) -> Manifest:
        return self.verify(checkpoint_id, content=False)

    def _is_published(self, ref: CheckpointRef, mine: Manifest) -> bool:
        """Whether this very content is visible; raises `ObjectExistsError` where other content is.

        A visible manifest that cannot be read counts as other content.
        """
        try:
            there = self.manifest(ref.id)
        except CheckpointNotFoundError:
            return False
        except CheckpointError as error:
            raise ObjectExistsError(
                f"checkpoint {ref.id} exists and is damaged", checkpoint=ref.id
            ) from error
        if there.content() != mine.content():
            raise ObjectExistsError(
                f"checkpoint {ref.id} was published by another writer with other content",
                checkpoint=ref.id,
            )
        return True

    def _manifest(self, header: CheckpointHeader, entries: Iterable[ObjectEntry]) -> Manifest:
        return Manifest(
            tenant_id=self.tenant_id,
            policy=header.policy,
            workload_id=header.workload_id,
            step=header.step,
            policy_version=header.policy_version,
            position=header.position,
            objects=tuple(entries),
            lineage=header.lineage,
            canary=header.canary,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _verify_head(self, ref: CheckpointRef, entry: ObjectEntry) -> None:
        try:
            info = self.objects.head(self.folder(ref) + entry.relative_key)
        except ObjectNotFoundError as error:
            raise _corrupt(ref, entry, "is missing") from error
        if info.size != entry.size:
            raise _corrupt(ref, entry, f"has {info.size} bytes, not {entry.size}")
        if info.etag != entry.etag:
            raise _corrupt(ref, entry, "was replaced: its etag differs")

    def _read(self, ref: CheckpointRef, entry: ObjectEntry) -> bytes:
        try:
            data = self.objects.get(self.folder(ref) + entry.relative_key, max_bytes=entry.size)
        except ObjectNotFoundError as error:
            raise _corrupt(ref, entry, "is missing") from error
        except ObjectTooLargeError as error:
            raise _corrupt(ref, entry, f"is larger than its {entry.size} bytes") from error
        if len(data) != entry.size:
            raise _corrupt(ref, entry, f"has {len(data)} bytes, not {entry.size}")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _corrupt(ref, entry, "does not match its SHA-256")
        return data

    def _tensors(self, ref: CheckpointRef, entry: ObjectEntry, *, finite: bool) -> dict[str, Array]:
        data = self._read(ref, entry)
        try:
            return tensors.decode(bytearray(data), max_bytes=entry.size, require_finite=finite)
        except TensorFormatError as error:
            raise CheckpointCorruptError(
                f"{ref.id}: {entry.name}: {error}",
                checkpoint=ref.id,
                object=entry.name,
                **error.details,
            ) from error

    def _reach(self, name: str) -> None:
        if self.failpoint is not None:
            self.failpoint(name)

    def policy_prefix(self, policy: str, workload_id: str | None = None) -> str:
        """Where the keys of a policy's (or one workload's) checkpoints begin."""
        prefix = f"{self.tenant_id}/policies/{check_name('policy', policy)}/checkpoints/"
        return prefix if workload_id is None else f"{prefix}{check_id('workload', workload_id)}/"

    def folder(self, ref: CheckpointRef) -> str:
        """Where the keys of one checkpoint begin."""
        return f"{self.policy_prefix(ref.policy, ref.workload_id)}{ref.step:010d}/"


def _ref_of_key(policy: str, relative_key: str) -> CheckpointRef | None:
    """The checkpoint whose manifest this is; None for objects and for foreign files."""
    parts = relative_key.split("/")
    if len(parts) != 3 or parts[2] != MANIFEST or len(parts[1]) != 10:
        return None
    try:
        return CheckpointRef.parse(f"{policy}/{parts[0]}/{parts[1]}")
    except InvalidKeyError:
        return None


def _corrupt(ref: CheckpointRef, entry: ObjectEntry, problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {ref.id}: {entry.name} {problem}", checkpoint=ref.id, object=entry.name
    )


def _decode_state(ref: CheckpointRef, data: bytes) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except ValueError as error:
        raise CheckpointCorruptError(
            f"checkpoint {ref.id}: {STATE} is not JSON", checkpoint=ref.id, object=STATE
        ) from error
    if not isinstance(state, dict):
        raise CheckpointCorruptError(
            f"checkpoint {ref.id}: {STATE} is not an object", checkpoint=ref.id, object=STATE
        )
    return state
