"""Where a spec's dataset lies: in a folder the operator allows, or in the tenant's storage."""

from __future__ import annotations

import re
from pathlib import Path

from vla_platform.errors import DatasetError
from vla_storage.objects import ObjectStore

_STORED = re.compile(r"s3://datasets/([a-z0-9][a-z0-9-]{0,62})")


def locate(
    path: str, *, tenant: str, roots: tuple[Path, ...], objects: ObjectStore, cache: Path
) -> Path:
    """The dataset's folder on this machine; one in storage is fetched first.

    Raises `DatasetError` for anything else: a spec cannot name other folders (bad-inputs B06).
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
    found = list(objects.list(prefix))
    if not found:
        raise DatasetError(f"no dataset under {prefix}", path=prefix)
    for info in found:
        file = target / info.key.removeprefix(prefix)
        mark = file.with_name(f"{file.name}.etag")
        if file.exists() and mark.exists() and mark.read_text() == info.etag:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.part")
        part.write_bytes(objects.get(info.key))
        part.replace(file)
        mark.write_text(info.etag)
    return target
