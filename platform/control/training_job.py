"""The training job: the descriptor that travels for one unit of training work."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vla_platform.control.states import Stage

SAMPLES_TTL_S = 3600.0
"""How long samples stay that nobody clears: longer than any job waits, for its end clears them."""
MOST_EPISODES = 400
"""Summaries that a descriptor carries: its metadata stay below 64 KB."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What a worker gets with a lease. The samples themselves lie under `partition_id`."""

    job_id: str
    workload: str
    tenant_id: str
    policy_key: str  # tenant/policy
    task_type: str  # sft | rl
    lifecycle: str  # see states.Lifecycle
    base_model: str
    schema_signature: str
    partition_id: str  # address of its samples in the payload store
    position: int  # place in the workload's sequence of jobs, from 0
    priority: int
    state: str
    fence: int  # rises with every lease; a write under an older one is refused
    attempt: int  # leases of the present stage, or of the position, so far
    producer_role: str = ""  # sft | rollout | tenant
    consumer_role: str = ""  # training
    behavior_policy_version: int = 0  # version that acted in the rollout
    max_policy_staleness: int = -1  # versions; -1: never dropped (SFT)
    sample_count: int = 0
    domain: str = "train"  # train | heldout
    created_seq: int = 0
    ready_seq: int = 0
    lease_owner: str = ""
    lease_expires: int = 0  # ms on the server's clock
    queue_wait_ms: int = 0  # from ready to leased
    mount: bool = False  # the slot changed hands: restore it before training
    slot_fence: int = 0
    base_version: int = 0  # policy version before the workload's first step
    terminal_reason: str = ""
    scored_by: str = ""  # base model of the teacher that scores it; empty: a grader, or nobody
    version: int = 1

    @classmethod
    def from_hash(cls, raw: dict[str, Any]) -> TrainingJob:
        """From the ledger's strings; fields that this version does not know are left out."""
        return cls(**{name: _READ[name](raw[name]) for name in raw if name in _READ})


_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "str": str,
    "bool": lambda value: bool(int(value)),
}
_READ = {name: _KINDS[kind] for name, kind in TrainingJob.__annotations__.items()}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a completed job leaves behind."""

    in_flight: int
    through: bool  # that was the workload's last one


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the ledger says is due and no live message carries."""

    prepare: tuple[str, ...] = ()  # workloads
    admit: tuple[str, ...] = ()  # workloads
    produce: tuple[str, ...] = ()  # workloads
    stranded: tuple[str, ...] = ()  # workloads with steps that their dead worker did not save
    stages: tuple[tuple[Stage, str], ...] = ()  # (stage, base model)
    train: tuple[str, ...] = ()  # base models


@dataclass(frozen=True, kw_only=True)
class ReserveLimits:
    """What a reservation is measured against beside the policy's own limits."""

    tenant_rollouts: int = 1  # active rollouts of one tenant
    rollouts: int = 3  # of all tenants
    share_window_s: float = 5.0  # worker-seconds a tenant may be ahead while others wait

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a handful of frozen values)
    def to_json(self) -> str:
        return json.dumps(asdict(self))
