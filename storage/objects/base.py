"""What the platform needs of an object store: small verbs with conditional writes.

The conditions are the platform's only commit mechanism: `if_absent` creates once, `if_match`
replaces exactly the version that was read. A store without them is refused at start-up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vla_storage.closing import Closing

Body = bytes | Path
"""Bytes in memory, or a file that is streamed."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One object as a listing or a head request shows it."""

    key: str
    size: int  # bytes
    etag: str  # changes with the content; compared, never interpreted
    modified: float  # seconds since the epoch, by the store's clock


class ObjectStore(Closing):
    """One bucket. Thread-safe. Every method may raise `StorageUnavailableError` (retry helps) and
    `StorageAccessError` (the credentials do not reach this key)."""

    @abstractmethod
    def put(
        self,
        key: str,
        data: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        sha256: str | None = None,
    ) -> str:
        """Write one object, whole or not at all; returns its etag.

        The store compares what arrives with `sha256` (hex); without it, a digest is computed here.

        Raises `ObjectExistsError` where `if_absent` finds one, `ObjectChangedError` where the
        object is no longer the one with the etag `if_match`.
        """

    @abstractmethod
    def get_with_etag(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, str]:
        """Content and etag of one version. Raises `ObjectNotFoundError`, and
        `ObjectTooLargeError` before it allocates when the object is over `max_bytes`."""

    @abstractmethod
    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        """That part of an object, or what there is of it. Raises `ObjectNotFoundError`."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Raises `ObjectNotFoundError`."""

    @abstractmethod
    def chunks(self, key: str, *, size_bytes: int = 1 << 20) -> Iterator[bytes]:
        """One version of an object in parts of at most `size_bytes`, without holding all of it.

        Raises `ObjectNotFoundError`, at the first part.
        """

    @abstractmethod
    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with `prefix` and sorts after `after`, in key order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; an absent one is fine."""

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self.get_with_etag(key, max_bytes=max_bytes)[0]

    def close(self) -> None:
        """Release connections."""
        return None
