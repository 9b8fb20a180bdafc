"""Where a spec's dataset lies: in a folder the operator allows, or in the tenant's storage."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from vla_platform.errors import DatasetError
from vla_storage.names import check_key
from vla_storage.objects import ObjectInfo, ObjectStore

_MARK = ".etag"  # beside a file: which object it is
_STORED = re.compile(r"s3://datasets/([a-z0-9][a-z0-9-]{0,62})")


def locate(
    path: str, *, tenant: str, roots: tuple[Path, ...], objects: ObjectStore, cache: Path
) -> Path:
    """The dataset's folder on this machine; one in storage is fetched first.

    Raises `DatasetError` for anything else: a spec cannot name other folders (bad-inputs B06), nor
    can an object's key (`InvalidKeyError`).
    """
    stored = _STORED.fullmatch(path)
    if stored:
        return _fetch(f"{tenant}/datasets/{stored[1]}/", objects, cache / tenant / stored[1])
    if ":" in path or "\\" in path or "%" in path or ".." in Path(path).parts:
        raise DatasetError(f"dataset path {path[:80]!r} is not allowed", path=path[:80])
    for root in roots:
        folder = (root / path).resolve()
        if folder.is_relative_to(root) and folder.is_dir():
            return folder
    allowed = ", ".join(str(root) for root in roots) or "none"
    raise DatasetError(
        f"no dataset {path!r} below the allowed folders ({allowed}); "
        "an operator adds one with `vla up --dataset-root FOLDER`",
        path=path,
    )


def _fetch(prefix: str, objects: ObjectStore, target: Path) -> Path:
    """What the tenant keeps there now, and nothing that it removed. One process at a time."""
    found = list(objects.list(prefix))
    if not found:
        raise DatasetError(f"no dataset under {prefix}", path=prefix)
    for info in found:
        check_key(info.key)  # it becomes a path of this machine, and its tenant chose it
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        size, free = sum(info.size for info in found), shutil.disk_usage(target.parent).free
        if size > free + _size_bytes(target):
            raise DatasetError(
                f"the dataset under {prefix} has {size >> 20} MiB, and {free >> 20} MiB are free "
                "where workers keep datasets; an operator makes room there",
                path=prefix,
            )
        try:
            _mirror(prefix, found, objects, target)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise DatasetError(
                f"under {prefix} an object has the name of a folder: {error}", path=prefix
            ) from error
    return target


def _mirror(prefix: str, found: Sequence[ObjectInfo], objects: ObjectStore, target: Path) -> None:
    names = {info.key.removeprefix(prefix) for info in found}
    kept = names | {f"{name}{_MARK}" for name in names}
    for file in target.rglob("*"):
        if file.is_file() and file.relative_to(target).as_posix() not in kept:
            file.unlink()
    for info in found:
        file = target / info.key.removeprefix(prefix)
        mark = file.with_name(f"{file.name}{_MARK}")
        if file.exists() and mark.exists() and mark.read_text() == info.etag:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.part")
        part.write_bytes(objects.get(info.key))
        part.replace(file)
        mark.write_text(info.etag)


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
