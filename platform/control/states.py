"""States of workloads and training jobs, and the transitions that the ledger allows.

The tables are data: the ledger's Lua functions get them as they are here, so there is one truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class WorkloadState(StrEnum):
    PENDING = "pending"
    """Accepted and in S3; its data is being prepared or it waits for admission."""
    RUNNING = "running"
    """Admitted: training jobs are reserved, produced and trained."""
    PAUSED = "paused"
    """Held by the tenant: what is in flight ends, nothing new begins."""
    SUCCEEDED = "succeeded"
    """Every step took effect and the final checkpoint is published."""
    FAILED = "failed"
    """Ended by an error; the reason is kept."""
    CANCELLED = "cancelled"
    """Ended by the tenant; final."""


class JobState(StrEnum):
    RESERVED = "reserved"
    """A position is given out; a producer has it on a lease."""
    NEEDS_SCORES = "needs_scores"
    """Its episodes lack what the spec rewards in place of the environment's rewards."""
    COMPUTING_SCORES = "computing_scores"
    """A grader, or a GPU worker with the teacher, has that stage on a lease."""
    NEEDS_ACTOR_FORWARD = "needs_actor_forward"
    """Its samples lack what the current actor says of them, such as log-probabilities."""
    COMPUTING_ACTOR_FORWARD = "computing_actor_forward"
    """A GPU worker has that stage on a lease."""
    NEEDS_ADVANTAGES = "needs_advantages"
    """Its samples lack advantages and returns."""
    COMPUTING_ADVANTAGES = "computing_advantages"
    """An advantage worker has that stage on a lease."""
    READY = "ready"
    """Everything that training reads is in the payload store."""
    LEASED = "leased"
    """A training worker has it on a lease."""
    COMPLETED = "completed"
    """It took effect, once."""
    DROPPED = "dropped"
    """RL only: its samples train nothing; see `DropReason`."""
    FAILED = "failed"
    """Its workload ended by an error."""
    CANCELLED = "cancelled"
    """Its workload was cancelled, or went back to an earlier position."""


class DropReason(StrEnum):
    """Why an RL job's samples were not trained."""

    POLICY_STALE = "policy_stale"
    """The actor is more than `max_policy_staleness` versions ahead of the behaviour policy."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Every group's advantages are zero: there is nothing to learn."""
    REJECTED_BY_PASSRATE = "rejected_by_passrate"
    """No group is within the accepted pass rates."""
    UNSCORED = "unscored"
    """Nobody scored it in time, or its grader failed, and its spec drops it then."""
    SAMPLES_LOST = "samples_lost"
    """The payload store has lost them; another rollout takes their place."""


class WaitReason(StrEnum):
    """Why a running workload may not begin a training job now."""

    ALL_RESERVED = "all reserved"
    """Everything it asked for is on its way."""
    IN_FLIGHT = "in-flight limit"
    """`limits.max_in_flight`; for RL, steps that are not yet published count, too."""
    STALENESS = "staleness bound"
    """What it sampled now would be too old when it is trained."""
    TENANT_ROLLOUTS = "the tenant's rollout limit"
    ROLLOUTS = "the global rollout limit"
    FAIR_SHARE = "fair share"
    """Its tenant is ahead of its share while others have work for the device."""


PASSING_WAITS = frozenset(WaitReason) - {WaitReason.ALL_RESERVED}
"""Those that pass by themselves: whoever produces waits, and asks again."""


class Lifecycle(StrEnum):
    """The path of a training job from reservation to its end."""

    SFT = "sft"
    """Demonstrations: reserved, ready, leased."""
    RL = "rl"
    """A rollout whose samples carry what the behaviour policy said of them."""
    RL_ACTOR_FORWARD = "rl_actor_forward"
    """As `rl`, with a forward of the current actor before the advantages."""
    RL_SCORED = "rl_scored"
    """As `rl`, with a grader's or a teacher's scores in place of the rewards."""
    RL_SCORED_ACTOR_FORWARD = "rl_scored_actor_forward"
    """Both."""


class Stage(StrEnum):
    """What is computed on an RL job's samples between rollout and training, in this order."""

    SCORES = "scores"
    ACTOR_FORWARD = "actor_forward"
    ADVANTAGES = "advantages"


Transitions = Mapping[StrEnum, tuple[StrEnum, ...]]

W, J = WorkloadState, JobState
_STOPPED = (J.FAILED, J.CANCELLED)
_ENDS: Transitions = {J.COMPLETED: (), J.FAILED: (), J.CANCELLED: ()}


def _rl(*stages: Stage) -> Transitions:
    """Reserved, the stages in turn, ready, leased; it may be dropped anywhere."""
    needs = [JobState(f"needs_{stage}") for stage in stages]
    table: dict[StrEnum, tuple[StrEnum, ...]] = {J.RESERVED: (needs[0], J.DROPPED, *_STOPPED)}
    for stage, need, after in zip(stages, needs, [*needs[1:], J.READY], strict=True):
        computing = JobState(f"computing_{stage}")
        table[need] = (computing, J.DROPPED, *_STOPPED)
        table[computing] = (after, need, J.DROPPED, *_STOPPED)
    return {
        **table,
        J.READY: (J.LEASED, J.DROPPED, *_STOPPED),
        J.LEASED: (J.COMPLETED, J.READY, J.DROPPED, *_STOPPED),
        J.DROPPED: (),
        **_ENDS,
    }


WORKLOAD_TRANSITIONS: Transitions = {
    W.PENDING: (W.RUNNING, W.FAILED, W.CANCELLED),
    W.RUNNING: (W.PAUSED, W.SUCCEEDED, W.FAILED, W.CANCELLED),
    W.PAUSED: (W.RUNNING, W.SUCCEEDED, W.FAILED, W.CANCELLED),
    W.SUCCEEDED: (),
    W.FAILED: (),
    W.CANCELLED: (),
}

JOB_TRANSITIONS: Mapping[Lifecycle, Transitions] = {
    Lifecycle.SFT: {
        J.RESERVED: (J.READY, *_STOPPED),
        J.READY: (J.LEASED, *_STOPPED),
        J.LEASED: (J.COMPLETED, J.READY, *_STOPPED),
        **_ENDS,
    },
    Lifecycle.RL: _rl(Stage.ADVANTAGES),
    Lifecycle.RL_ACTOR_FORWARD: _rl(Stage.ACTOR_FORWARD, Stage.ADVANTAGES),
    Lifecycle.RL_SCORED: _rl(Stage.SCORES, Stage.ADVANTAGES),
    Lifecycle.RL_SCORED_ACTOR_FORWARD: _rl(Stage.SCORES, Stage.ACTOR_FORWARD, Stage.ADVANTAGES),
}
"""The first state of each entry is where a job goes on; ledger and workers take it from here."""


def state_after(lifecycle: str, state: JobState) -> JobState:
    """Where a job goes on that is through with what it was in `state` for."""
    return JobState(JOB_TRANSITIONS[Lifecycle(lifecycle)][state][0])


def tables() -> dict[str, dict[str, list[str]]]:
    """All tables as plain data: `workload`, and one per lifecycle."""
    every: dict[str, Transitions] = {"workload": WORKLOAD_TRANSITIONS}
    every |= {str(lifecycle): table for lifecycle, table in JOB_TRANSITIONS.items()}
    return {
        kind: {str(state): [str(one) for one in after] for state, after in table.items()}
        for kind, table in every.items()
    }


def is_terminal(state: str) -> bool:
    """Whether a workload in `state` will not change any more."""
    return not WORKLOAD_TRANSITIONS[WorkloadState(state)]
