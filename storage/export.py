"""A checkpoint on local disk: a folder or a tar, verified on the way, whole or not there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from vla_storage.checkpoints import MANIFEST, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointCorruptError, ObjectNotFoundError
from vla_storage.manifests import MAX_MANIFEST_BYTES, ObjectEntry


def export_folder(store: CheckpointStore, checkpoint_id: str, target: Path) -> Path:
    """Write every object under its name, and the manifest; replaces an earlier export.

    Raises `CheckpointNotFoundError`, `ManifestInvalidError`, `CheckpointCorruptError`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _fetch(store, checkpoint_id, staged)
        staged.chmod(0o755)
        if target.is_dir():
            shutil.rmtree(target)
        staged.rename(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return target


def export_tar(store: CheckpointStore, checkpoint_id: str, target: Path) -> Path:
    """The same as one tar file; equal checkpoints give equal bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        content = folder / "content"
        content.mkdir()
        _fetch(store, checkpoint_id, content)
        with tarfile.open(folder / "tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(content.iterdir()):
                info = tarfile.TarInfo(f"{checkpoint_id.replace('/', '-')}/{path.name}")
                info.size, info.mode = path.stat().st_size, 0o644
                with path.open("rb") as body:
                    tar.addfile(info, body)
        os.replace(folder / "tar", target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _fetch(store: CheckpointStore, checkpoint_id: str, folder: Path) -> None:
    manifest = store.manifest(checkpoint_id)
    ref = CheckpointRef.parse(checkpoint_id)
    prefix = store.folder(ref)
    for entry in manifest.objects:
        with (folder / entry.name).open("wb") as file:
            _copy(store, ref, prefix + entry.relative_key, entry, file)
    text = store.objects.get(prefix + MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
    (folder / MANIFEST).write_bytes(text)


def _copy(
    store: CheckpointStore, ref: CheckpointRef, key: str, entry: ObjectEntry, file: IO[bytes]
) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in store.objects.chunks(key):
            size += len(chunk)
            if size > entry.size:
                break
            digest.update(chunk)
            file.write(chunk)
    except ObjectNotFoundError as error:
        raise _corrupt(ref, entry, "is missing") from error
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise _corrupt(ref, entry, "does not match its manifest")


def _corrupt(ref: CheckpointRef, entry: ObjectEntry, problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {ref.id}: {entry.name} {problem}", checkpoint=ref.id, object=entry.name
    )
