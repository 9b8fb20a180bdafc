"""A tenant's prefix as a listing shows it, cut into folders as it comes.

<tenant>/policies/<policy>/checkpoints/<workload>/<step>/   a checkpoint
<tenant>/policies/<policy>/marks.json                       see `vla_storage.marks`
<tenant>/<area>/...                                         counted only
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.errors import InvalidKeyError
from vla_storage.names import check_name
from vla_storage.objects.base import ObjectInfo, ObjectStore
from vla_storage.seals import Facts, facts_in, is_seal, listing_seal

MOST_OBJECTS = 1000
"""Of one folder; further ones are counted, so that memory stays flat."""
AREAS = frozenset({"policies", "workloads", "evaluations", "datasets", "schedules", "usage"})


class Kind(StrEnum):
    CHECKPOINT = "checkpoint"
    AREA = "area"
    """Part of an area whose objects refer to nothing here."""
    STRAY = "stray"
    """In no place that the platform writes to."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    kind: Kind
    prefix: str  # with its slash; of an area, the area
    items: tuple[ObjectInfo, ...]
    num_objects: int
    size_bytes: int
    last_key: str
    ref: CheckpointRef | None = None  # of a checkpoint

    @property
    def newest(self) -> float:
        return max(item.modified for item in self.items)

    def seal(self, key: bytes) -> str:
        """Equal as long as nothing in the folder changes, publishers' seals aside."""
        items = [item for item in self.items if not is_seal(self._name(item))]
        return listing_seal(items, key, num_objects=self.num_objects - len(self.items) + len(items))

    def facts(self, seal: str, key: bytes) -> Facts | None:
        """What its publisher sealed together with this very listing."""
        for item in self.items:
            name = self._name(item)
            if is_seal(name) and (facts := facts_in(name, seal, key)) is not None:
                return facts
        return None

    def is_sealed(self, key: bytes | None) -> bool:
        """Whether it lists as its publisher left it."""
        return key is not None and self.facts(self.seal(key), key) is not None

    def _name(self, item: ObjectInfo) -> str:
        return item.key[len(self.prefix) :]


def folders(items: Iterable[ObjectInfo], tenant: str) -> Iterator[Folder]:
    """The folders of a listing, in its order; holds one folder at a time."""
    skip = len(tenant) + 1
    for (kind, prefix), group in groupby(items, key=lambda item: _place(item.key[skip:])):
        if kind is Kind.AREA or kind is Kind.STRAY:
            # Long stretches of these come by; what counts of them are their sums.
            yield from _in_parts(group, kind, f"{tenant}/{prefix}")
        else:
            yield _folder(group, kind, f"{tenant}/{prefix}")


def _place(key: str) -> tuple[Kind, str]:
    parts = key.split("/")
    if parts[0] == "policies" and len(parts) == 6 and parts[2] == "checkpoints":
        return Kind.CHECKPOINT, "/".join(parts[:5]) + "/"
    if parts[0] == "policies":
        is_marks = len(parts) == 3 and parts[2] == "marks.json"
        return Kind.AREA if is_marks else Kind.STRAY, "policies/"
    known = len(parts) > 1 and parts[0] in AREAS
    return (Kind.AREA if known else Kind.STRAY), f"{parts[0]}/" if len(parts) > 1 else ""


@dataclass
class _Sum:
    items: list[ObjectInfo] = field(default_factory=list)
    num_objects: int = 0
    size_bytes: int = 0
    last_key: str = ""

    def add(self, item: ObjectInfo) -> None:
        if self.num_objects < MOST_OBJECTS:
            self.items.append(item)
        self.num_objects += 1
        self.size_bytes += item.size
        self.last_key = item.key

    def folder(self, kind: Kind, prefix: str) -> Folder:
        ref = None
        if kind is Kind.CHECKPOINT:
            _, _, policy, _, workload, step, _ = prefix.split("/")
            try:
                ref = CheckpointRef.parse(f"{policy}/{workload}/{step}")
            except InvalidKeyError:
                kind = Kind.STRAY
            else:
                kind = kind if len(step) == 10 else Kind.STRAY
        return Folder(
            kind=kind,
            prefix=prefix,
            items=tuple(self.items),
            num_objects=self.num_objects,
            size_bytes=self.size_bytes,
            last_key=self.last_key,
            ref=ref,
        )


def _folder(items: Iterable[ObjectInfo], kind: Kind, prefix: str) -> Folder:
    total = _Sum()
    for item in items:
        total.add(item)
    return total.folder(kind, prefix)


def _in_parts(items: Iterable[ObjectInfo], kind: Kind, prefix: str) -> Iterator[Folder]:
    total = _Sum()
    for item in items:
        total.add(item)
        if total.num_objects == MOST_OBJECTS:
            yield total.folder(kind, prefix)
            total = _Sum()
    if total.num_objects:
        yield total.folder(kind, prefix)


def prefixes(objects: ObjectStore) -> Iterator[str]:
    """The first segments of all keys of a bucket, with one short listing each."""
    after = ""
    while True:
        first = next(iter(objects.list("", after=after)), None)
        if first is None:
            return
        head = first.key.partition("/")[0]
        yield head
        # The character after "/": every key below the prefix sorts before it.
        after = f"{head}0" if "/" in first.key else first.key


def unknown_prefixes(objects: ObjectStore, tenants: set[str]) -> list[str]:
    """Prefixes of the bucket that belong to no tenant that there is."""
    return [name for name in prefixes(objects) if is_tenant(name) and name not in tenants]


def is_tenant(name: str) -> bool:
    try:
        check_name("tenant", name)
    except InvalidKeyError:
        return False
    return name != "platform"
