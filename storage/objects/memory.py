"""An object store in memory, for unit tests and examples."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator

from vla_storage.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StorageUnavailableError,
)
from vla_storage.names import check_key
from vla_storage.objects.base import Body, ObjectInfo, ObjectStore


class MemoryObjectStore(ObjectStore):
    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str, float]] = {}
        self._lock = threading.Lock()

    def put(
        self,
        key: str,
        data: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        sha256: str | None = None,
    ) -> str:
        check_key(key)
        content = data if isinstance(data, bytes) else data.read_bytes()
        if sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise StorageUnavailableError(f"{key} arrived damaged", key=key)
        etag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
        with self._lock:
            current = self._objects.get(key)
            if if_absent and current is not None:
                raise ObjectExistsError(f"{key} exists already", key=key)
            if if_match is not None and (current is None or current[1] != if_match):
                raise ObjectChangedError(f"{key} has changed", key=key)
            self._objects[key] = (content, etag, time.time())
        return etag

    def get_with_etag(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, str]:
        content, etag, _ = self._find(key)
        if max_bytes is not None and len(content) > max_bytes:
            raise ObjectTooLargeError(f"{key} is larger than {max_bytes} bytes", key=key)
        return content, etag

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        return self._find(key)[0][start : start + size_bytes]

    def head(self, key: str) -> ObjectInfo:
        content, etag, modified = self._find(key)
        return ObjectInfo(key=key, size=len(content), etag=etag, modified=modified)

    def chunks(self, key: str, *, size_bytes: int = 1 << 20) -> Iterator[bytes]:
        content = self._find(key)[0]
        for start in range(0, len(content), size_bytes):
            yield content[start : start + size_bytes]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted(k for k in self._objects if k.startswith(prefix) and k > after)
        for key in found:
            try:
                yield self.head(key)
            except ObjectNotFoundError:
                continue  # deleted since

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def _find(self, key: str) -> tuple[bytes, str, float]:
        with self._lock:
            try:
                return self._objects[key]
            except KeyError:
                raise ObjectNotFoundError(f"no object {key}", key=key) from None
