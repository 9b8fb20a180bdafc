"""The digest that pins a dataset's files (B56)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from vla_platform.errors import DatasetError

_FOLDERS = ("meta", "data", "videos")


@dataclass(frozen=True)
class FileStamp:
    """What tells cheaply that a file may have changed."""

    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Pin:
    """All files of a dataset: stamp and SHA-256 by path relative to the dataset."""

    root: Path
    stamps: dict[str, FileStamp]
    sums: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over the sorted lines `path NUL size NUL sha256`."""
        total = hashlib.sha256()
        for name in sorted(self.sums):
            line = f"{name}\0{self.stamps[name].size_bytes}\0{self.sums[name]}\n"
            total.update(line.encode())
        return total.hexdigest()

    def verify(self) -> None:
        """Raise `DatasetError` where a file came, went or changed since the pin.

        Looks at sizes and times, and reads only files whose stamp moved.
        """
        now = stamp_files(self.root)
        changed = sorted(set(now) ^ set(self.stamps))
        changed += [
            name
            for name, stamp in now.items()
            if name in self.stamps
            and stamp != self.stamps[name]
            and _sha256(self.root / name) != self.sums[name]
        ]
        if changed:
            path = self.root / changed[0]
            raise DatasetError(
                f"{path}: changed since the dataset was opened ({len(changed)} files in all)",
                path=str(path),
                changed=changed[:20],
            )


def pin_files(root: Path) -> Pin:
    """Read and hash all files of the dataset."""
    stamps = stamp_files(root)
    return Pin(root, stamps, {name: _sha256(root / name) for name in stamps})


def stamp_files(root: Path) -> dict[str, FileStamp]:
    stamps = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                stat = path.stat()
                stamps[path.relative_to(root).as_posix()] = FileStamp(
                    stat.st_size, stat.st_mtime_ns, stat.st_ino
                )
    return stamps


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}", path=str(path)) from error
