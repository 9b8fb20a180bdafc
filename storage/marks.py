"""What a tenant decided about checkpoints of a policy: pins, milestones, names, times to live.

One small document per policy, `<tenant>/policies/<policy>/marks.json`, changed by compare-and-swap
only: two writers never lose each other's marks (PF-25).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.errors import (
    CheckpointError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from vla_storage.names import check_name
from vla_storage.objects.base import ObjectStore

MARKS_VERSION = 1
MAX_BYTES = 4 << 20
_TRIES = 64


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What holds for one checkpoint."""

    pinned: bool = False
    milestone: bool = False
    expires: float | None = None  # seconds since the epoch; pinned ones never expire
    score: float | None = None  # of an evaluation; higher is better

    @property
    def is_empty(self) -> bool:
        return self == Mark()


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Of one policy; checkpoints by `workload/step`."""

    of: Mapping[str, Mark] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # name -> workload/step
    removing: tuple[str, ...] = ()  # by retention, right now; a pin comes too late for these

    def mark(self, ref: CheckpointRef) -> Mark:
        return self.of.get(place_of(ref), Mark())

    def is_kept(self, ref: CheckpointRef) -> bool:
        """Whether no rule may remove it."""
        one = self.mark(ref)
        return one.pinned or one.milestone or place_of(ref) in self.aliases.values()

    def with_mark(self, ref: CheckpointRef, **changes: Any) -> Marks:
        marked = replace(self.mark(ref), **changes)
        rest = {place: mark for place, mark in self.of.items() if place != place_of(ref)}
        return replace(self, of=rest if marked.is_empty else rest | {place_of(ref): marked})

    def with_alias(self, alias: str, ref: CheckpointRef | None) -> Marks:
        """`ref` None takes the name away."""
        check_name("alias", alias)
        rest = {name: place for name, place in self.aliases.items() if name != alias}
        return replace(self, aliases=rest if ref is None else rest | {alias: place_of(ref)})

    def without(self, refs: list[CheckpointRef]) -> Marks:
        gone = {place_of(ref) for ref in refs}
        return Marks(
            of={place: mark for place, mark in self.of.items() if place not in gone},
            aliases={name: place for name, place in self.aliases.items() if place not in gone},
            removing=tuple(place for place in self.removing if place not in gone),
        )

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "version": MARKS_VERSION,
                "marks": {place: asdict(mark) for place, mark in sorted(self.of.items())},
                "aliases": dict(sorted(self.aliases.items())),
                "removing": list(self.removing),
            },
            indent=1,
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Marks:
        """Raises `CheckpointError` for a document of another release or a damaged one."""
        try:
            raw = json.loads(text)
            if raw["version"] != MARKS_VERSION:
                raise ValueError(f"version {raw['version']}")
            return cls(
                of={place: Mark(**mark) for place, mark in raw["marks"].items()},
                aliases=dict(raw["aliases"]),
                removing=tuple(raw["removing"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the marks of a policy are damaged: {error}") from error


def place_of(ref: CheckpointRef) -> str:
    return f"{ref.workload_id}/{ref.step}"


def marks_key(tenant: str, policy: str) -> str:
    return f"{check_name('tenant', tenant)}/policies/{check_name('policy', policy)}/marks.json"


def read_marks(objects: ObjectStore, tenant: str, policy: str) -> Marks:
    """None were made: an empty document. Raises `CheckpointError` for a damaged one."""
    return _read(objects, marks_key(tenant, policy))[0]


def change_marks(
    objects: ObjectStore, tenant: str, policy: str, change: Callable[[Marks], Marks]
) -> Marks:
    """Read, change and write back until no other writer was faster; returns what is written."""
    key = marks_key(tenant, policy)
    for number in range(_TRIES):
        if number:
            # Writers that lose together must not meet again together.
            time.sleep(random.uniform(0, min(0.05, 0.001 * 2**number)))
        marks, etag = _read(objects, key)
        changed = change(marks)
        if changed == marks:
            return marks
        try:
            if etag is None:
                objects.put(key, changed.to_json(), if_absent=True)
            else:
                objects.put(key, changed.to_json(), if_match=etag)
        except (ObjectExistsError, ObjectChangedError):
            continue
        return changed
    raise ObjectChangedError(f"{key} changed {_TRIES} times in a row", key=key)


def _read(objects: ObjectStore, key: str) -> tuple[Marks, str | None]:
    try:
        text, etag = objects.get_with_etag(key, max_bytes=MAX_BYTES)
    except ObjectNotFoundError:
        return Marks(), None
    return Marks.from_json(text), etag
