"""Evaluations: of which policy, on which suite, and when."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vla_platform.specs.base import Float, Int, Name, Spec, Text
from vla_platform.specs.cron import check_cron, check_timezone


class EpisodesSpec(Spec):
    """What is played, and how."""

    suite: str = Field(
        min_length=3, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:\-]*$",
        description="an environment such as tabletop/push, or libero/libero_object",
    )  # fmt: skip
    episodes: Int = Field(20, ge=1, le=100_000)
    seed: Int = Field(0, ge=0, lt=2**32)
    num_envs: Int = Field(4, ge=1, le=64, description="sessions at once")
    execute_steps: Int | None = Field(None, ge=1, le=1000, description="of each action chunk")
    videos: Int = Field(0, ge=0, le=100, description="so many first episodes are filmed")
    options: dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=256)] | Int | Float | bool | None,
    ] = Field(default_factory=dict, max_length=16, description="of the environments")


class IntervalEvaluationSpec(EpisodesSpec):
    """Evaluations of a run by itself, each of the version that was published at that update."""

    every_updates: Int = Field(
        ge=1, le=1_000_000, description="updates between evaluations; a checkpoint is made at each"
    )


class EvaluationSpec(EpisodesSpec):
    """Success of a policy over the episodes of a suite; the policy is not changed."""

    kind: Literal["evaluation"] = "evaluation"
    version: Literal[1] = 1
    policy: Name = Field(description="the tenant's name for the policy")
    policy_version: Int | None = Field(
        None, ge=0, description="default: the current one, resolved once when it begins"
    )
    checkpoint: str | None = Field(
        None, min_length=1, max_length=256, description="instead: the version of a checkpoint"
    )
    description: Text | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> EvaluationSpec:
        if self.policy_version is not None and self.checkpoint is not None:
            raise ValueError("give policy_version or checkpoint, not both")
        if self.checkpoint is not None and self.checkpoint.partition("/")[0] != self.policy:
            raise ValueError(f"checkpoint {self.checkpoint} is of another policy")
        return self


class Overlap(StrEnum):
    """What a firing does while the one before still runs."""

    SKIP = "skip"
    """It is counted as skipped."""
    QUEUE = "queue"
    """It waits for the end; at most `MOST_QUEUED` wait."""
    ALLOW = "allow"
    """It runs beside it."""


class Missed(StrEnum):
    """What becomes of firings that nobody served in time."""

    RUN_ONCE = "run_once"
    """The latest of them runs late; the others are counted as missed."""
    RECORD = "record"
    """All are counted as missed."""


MOST_QUEUED = 3


def _enum(kind: type[StrEnum]) -> BeforeValidator:
    # Strict models take no text for an enum when they are built from Python.
    return BeforeValidator(lambda value: kind(value) if isinstance(value, str) else value)


class EvaluationSchedule(Spec):
    """An evaluation by cron."""

    kind: Literal["schedule"] = "schedule"
    version: Literal[1] = 1
    name: Name
    cron: Annotated[str, AfterValidator(check_cron)]
    timezone: Annotated[str, AfterValidator(check_timezone)] = "UTC"
    overlap: Annotated[Overlap, _enum(Overlap)] = Overlap.SKIP
    missed: Annotated[Missed, _enum(Missed)] = Missed.RUN_ONCE
    evaluation: EvaluationSpec
