"""What rank 0 has the other ranks do: plain data, no tensor among it.

Commands and answers pass between processes of one worker, which run the same code and end together;
nothing of them is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vla_platform.gpu_workers.slot_state import SlotConfig


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the rows of a training job lie, and which of them each rank has."""

    partition_id: str
    tenant_id: str
    columns: tuple[str, ...] | None  # None: all
    rows: tuple[tuple[int, ...], ...]  # by rank, ascending


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job's part in a command."""

    policy_key: str
    source: Source
    num_microbatches: int = 1


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Build a slot; its state follows, `state_bytes` as `vla_storage.tensors` writes them. Answer:
    the error, or None."""

    config: SlotConfig
    scalars: dict[str, Any]
    state_bytes: int


@dataclass(frozen=True, kw_only=True)
class Unmount:
    policy_key: str


@dataclass(frozen=True, kw_only=True)
class TrainGroup:
    """One update of each, on one encoding. Answer: the error of each, or None."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, kw_only=True)
class TrainPolicy:
    """One RL update. Answer: its error, or None."""

    job: Job


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Answer: the digest of a policy's module."""

    policy_key: str


Command = Mount | Unmount | TrainGroup | TrainPolicy | Digest
