"""What reinforcement learning rewards: the environment's numbers, a grader's, or a teacher's."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from vla_platform.specs.base import Float, Int, Name, Spec


class OnUnscored(StrEnum):
    """What happens to a rollout whose grader or teacher is late or fails. Counted either way."""

    KEEP_REWARD = "keep_reward"
    """It goes on with the environment's rewards."""
    DROP = "drop"
    """It trains nothing; another rollout takes its place."""
    FAIL = "fail"
    """The run ends."""


class HookSpec(Spec):
    """A named, versioned function of the platform, such as `length_penalty@1`."""

    name: str = Field(min_length=3, max_length=64, pattern=r"^[a-z_]+@[0-9]+$")
    options: dict[Annotated[str, Field(max_length=64)], Float] = Field(
        default_factory=dict, max_length=16
    )


class EnvironmentReward(Spec):
    """The rewards that the environment gave."""

    kind: Literal["environment"] = "environment"


class ScoredReward(Spec):
    """Rewards that a task beside the rollouts computes, while others go on."""

    deadline_s: Float = Field(
        60.0, ge=1.0, le=1800.0, description="from the rollout's end; later scores are refused"
    )
    on_failure: OnUnscored = Field(
        OnUnscored.DROP,
        description="late or failed: train on the environment's rewards, drop the rollout, or end "
        "the run",
    )


class GraderReward(ScoredReward, HookSpec):
    """A grader, such as `smoothness@1`: it sees whole groups, and its grades are their rewards."""

    kind: Literal["grader"] = "grader"


class TeacherSpec(Spec):
    """A policy of the tenant, pinned."""

    policy: Name
    version: Int | str = Field(description="a published policy version, or a checkpoint's id")
    base_model: str | None = Field(
        None, min_length=1, max_length=256, description="of the teacher; null: the student's"
    )


class DistillationReward(ScoredReward):
    """On-policy distillation: each action's reward is log p_teacher - log p_student of it."""

    kind: Literal["distillation"] = "distillation"
    teacher: TeacherSpec


RewardSpec = Annotated[
    EnvironmentReward | GraderReward | DistillationReward, Field(discriminator="kind")
]
