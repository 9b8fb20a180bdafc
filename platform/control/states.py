"""States of workloads and training jobs, and the transitions that the ledger allows.

The tables are data: `control/ledger.lua` gets them as JSON, so there is one truth.
"""

from __future__ import annotations

from enum import StrEnum


class WorkloadState(StrEnum):
    PENDING = "pending"
    """Accepted and in S3; its data is being prepared or it waits for admission."""
    RUNNING = "running"
    """Admitted: training jobs are reserved, produced and trained."""
    SUCCEEDED = "succeeded"
    """Every step took effect and the final checkpoint is published."""
    FAILED = "failed"
    """Ended by an error; the reason is kept."""
    CANCELLED = "cancelled"
    """Ended by the tenant; final."""


class JobState(StrEnum):
    RESERVED = "reserved"
    """A position is given out; a producer has it on a lease."""
    READY = "ready"
    """Its samples are in the payload store."""
    LEASED = "leased"
    """A training worker has it on a lease."""
    COMPLETED = "completed"
    """It took effect, once."""
    FAILED = "failed"
    CANCELLED = "cancelled"


WORKLOAD_TRANSITIONS: dict[WorkloadState, tuple[WorkloadState, ...]] = {
    WorkloadState.PENDING: (WorkloadState.RUNNING, WorkloadState.FAILED, WorkloadState.CANCELLED),
    WorkloadState.RUNNING: (WorkloadState.SUCCEEDED, WorkloadState.FAILED, WorkloadState.CANCELLED),
    WorkloadState.SUCCEEDED: (),
    WorkloadState.FAILED: (),
    WorkloadState.CANCELLED: (),
}

JOB_TRANSITIONS: dict[JobState, tuple[JobState, ...]] = {
    JobState.RESERVED: (JobState.READY, JobState.FAILED, JobState.CANCELLED),
    JobState.READY: (JobState.LEASED, JobState.FAILED, JobState.CANCELLED),
    JobState.LEASED: (
        JobState.COMPLETED,
        JobState.READY,
        JobState.FAILED,
        JobState.CANCELLED,
    ),
    JobState.COMPLETED: (),
    JobState.FAILED: (),
    JobState.CANCELLED: (),
}


def tables() -> dict[str, dict[str, list[str]]]:
    """Both tables as plain data."""
    return {
        "workload": {str(k): [str(s) for s in v] for k, v in WORKLOAD_TRANSITIONS.items()},
        "job": {str(k): [str(s) for s in v] for k, v in JOB_TRANSITIONS.items()},
    }


def is_terminal(state: str) -> bool:
    """Whether a workload in `state` will not change any more."""
    return not WORKLOAD_TRANSITIONS[WorkloadState(state)]
