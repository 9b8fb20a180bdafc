"""What a checkpoint is before and after its way through the store: plain frozen values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_storage import tensors
from vla_storage.canary import Canary
from vla_storage.errors import CheckpointError, InvalidKeyError
from vla_storage.manifests import Lineage, Manifest, ObjectEntry
from vla_storage.names import check_id, check_name
from vla_storage.objects.base import Body
from vla_storage.tensors import Array

MODULE = "module.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_CHUNK = 1 << 20

Failpoint = Callable[[str], None]
"""Called with `checkpoint.object` after each object and `checkpoint.manifest` after the manifest,
so that a test can end the process there."""


@dataclass(frozen=True, kw_only=True)
class CheckpointHeader:
    """What a checkpoint says of itself, besides its objects."""

    policy: str
    workload_id: str
    step: int
    policy_version: int
    position: int  # samples consumed
    lineage: Lineage
    canary: Canary | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One slot's whole state. Equal states give equal bytes."""

    header: CheckpointHeader
    module: Mapping[str, Array]
    optimizer: Mapping[str, Array]
    state: Mapping[str, Any]  # JSON: schedule, random generators, configuration; no times

    def bodies(self) -> dict[str, Body]:
        return {
            MODULE: tensors.encode(self.module),
            OPTIMIZER: tensors.encode(self.optimizer),
            STATE: encode_state(self.state),
        }


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint whose signature, sizes and digests were verified. Tensors are writable."""

    manifest: Manifest
    module: dict[str, Array]
    optimizer: dict[str, Array]
    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True, order=True)
class CheckpointRef:
    """Where one visible checkpoint is; ordered by workload, then by step as a number."""

    policy: str
    workload_id: str
    step: int

    @property
    def id(self) -> str:
        return f"{self.policy}/{self.workload_id}/{self.step}"

    @classmethod
    def parse(cls, checkpoint_id: str) -> CheckpointRef:
        """Raises `InvalidKeyError` for anything but `policy/workload/step`."""
        parts = checkpoint_id.split("/")
        if len(parts) != 3 or not (parts[2].isascii() and parts[2].isdigit()):
            raise InvalidKeyError(
                f"checkpoint id {checkpoint_id[:80]!r}: expected policy/workload/step",
                kind="checkpoint",
                value=checkpoint_id[:80],
            )
        return cls(
            policy=check_name("policy", parts[0]),
            workload_id=check_id("workload", parts[1]),
            step=int(parts[2]),
        )


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Canonical JSON; raises `CheckpointError` for NaN and for what JSON cannot hold."""
    try:
        return json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the scalar state is not JSON: {error}") from error


def describe(name: str, body: Body) -> ObjectEntry:
    """Size and SHA-256 of a body that is not stored yet."""
    digest = hashlib.sha256()
    size = 0
    if isinstance(body, Path):
        with body.open("rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    else:
        digest.update(body)
        size = len(body)
    return ObjectEntry(name=name, size=size, sha256=digest.hexdigest(), etag="")
