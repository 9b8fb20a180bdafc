"""What training takes and gives: a job's rows for one policy, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_platform.gpu_workers.algorithms.policy_gradient import PolicyUpdate
from vla_platform.gpu_workers.ranks.commands import Job, Source
from vla_platform.gpu_workers.samples import Columns
from vla_storage.errors import CodedError

MISFITS = (RuntimeError, ValueError, TypeError, KeyError, IndexError)
"""What arrays of the wrong shape or kind raise, somewhere in torch or numpy."""


@dataclass(frozen=True)
class TrainItem:
    """One training job's data for one mounted policy: the columns of a `Batch`, or of a rollout
    with advantages."""

    policy_key: str
    columns: Columns  # with several ranks, of this one's rows
    num_microbatches: int = 1
    source: Source | None = None  # where the other ranks find theirs
    problem: CodedError | None = None  # why this rank has no columns

    def rows_of(self, rank: int) -> Sequence[int]:
        """Which rows of the job `columns` hold on that rank."""
        if self.source is None:
            return range(len(self.columns["actions"]))
        return self.source.rows[rank]

    def is_here(self, rank: int) -> bool:
        """Whether that rank has rows of it."""
        return self.source is None or bool(self.source.rows[rank])

    def job(self) -> Job:
        """The item as the other ranks are told of it."""
        if self.source is None:
            raise ValueError(f"nothing tells other ranks where the rows of {self.policy_key} are")
        return Job(
            policy_key=self.policy_key,
            source=self.source,
            num_microbatches=self.num_microbatches,
        )


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    policy_key: str
    loss: float
    grad_norm: float
    lr: float
    step: int  # updates of the policy so far
    policy_version: int
    samples: int
    skipped: bool  # every action step was padding
    forward_ms: float  # encoding of the whole group
    backbone_forwards: int  # of the whole group
    group_size: int  # jobs that shared the encoding
    cache_hits: int  # rows of this job
    cache_misses: int
    cost_s: float  # own update, and a share of the encoding by rows that were not cached


@dataclass(frozen=True, kw_only=True)
class PolicyResult(PolicyUpdate):
    """An RL update; see `PolicyUpdate`."""

    policy_key: str
    policy_version: int
    backbone_forwards: int  # 0 where the rollout's features were kept
    cost_s: float
