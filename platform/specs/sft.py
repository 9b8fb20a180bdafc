"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_platform.specs.base import Int, Key, Spec
from vla_platform.specs.policy import (
    ActionModuleSpec,
    AdamWSpec,
    CheckpointSpec,
    LimitsSpec,
    OFTModule,
    Workload,
)


class DatasetSpec(Spec):
    """A LeRobot v2.1 or v3.0 dataset in an allowed folder or in the tenant's own storage."""

    path: str = Field(
        min_length=1,
        max_length=1024,
        description="a folder below one of the platform's dataset roots, or `s3://datasets/NAME` "
        "for one uploaded to the tenant's own storage",
    )
    cameras: tuple[Key, ...] | None = Field(
        None, max_length=8, description="camera features in order; default: all, sorted"
    )
    state: Key | None = Field("observation.state", description="null: the policy gets no state")
    action: Key = "action"
    episodes: tuple[Annotated[Int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="episodes to train on; default: all but `heldout_episodes`"
    )
    heldout_episodes: tuple[Annotated[Int, Field(ge=0)], ...] = Field(
        (), description="episodes kept for the held-out loss; default: the last one"
    )
    heldout_samples: Int = Field(64, ge=0, le=1024, description="evenly spaced held-out frames")
    normalization: Literal["min_max", "mean_std", "q99"] = "min_max"
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail", description="a frame whose numbers are not finite: fail the run, or leave it out"
    )

    @model_validator(mode="after")
    def _splits_are_apart(self) -> DatasetSpec:
        for name in ("episodes", "heldout_episodes", "cameras"):
            values = getattr(self, name) or ()
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names something twice")
        both = set(self.episodes or ()) & set(self.heldout_episodes)
        if both:
            raise ValueError(f"episodes {sorted(both)} are in both episodes and heldout_episodes")
        return self


class SFTSpec(Workload):
    """Supervised fine-tuning of one policy on demonstrations."""

    kind: Literal["sft"] = "sft"
    version: Literal[1] = 1
    base_model: str = Field(
        "tiny", min_length=1, max_length=256, description="a base model that the platform serves"
    )
    action_module: ActionModuleSpec = OFTModule()
    dataset: DatasetSpec
    trainable: tuple[Literal["head", "state_encoder"], ...] = Field(
        ("head", "state_encoder"), min_length=1, description="parts of the action module to train"
    )
    optimizer: AdamWSpec = AdamWSpec()
    steps: Int | None = Field(None, ge=1, le=10_000_000)
    epochs: Int | None = Field(None, ge=1, le=100_000)
    batch_size: Int = Field(8, ge=1, le=1024)
    gradient_accumulation: Int = Field(
        1, ge=1, le=64, description="split each batch into so many backward passes"
    )
    evaluate_every: Int | None = Field(
        None, ge=1, description="steps between held-out losses; default: only first and last"
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    init_from: str | None = Field(
        None, max_length=256, description="id of a checkpoint of the tenant to start from"
    )
    limits: LimitsSpec = LimitsSpec()

    @model_validator(mode="after")
    def _fields_agree(self) -> SFTSpec:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of "
                f"gradient_accumulation {self.gradient_accumulation}"
            )
        every = self.checkpoint.every_steps
        if every is not None and self.steps is not None and every > self.steps:
            raise ValueError(f"checkpoint.every_steps {every} is above steps {self.steps}")
        if self.action_module.state != "encoder" and self.trainable == ("state_encoder",):
            raise ValueError("trainable names only state_encoder, but the module has none")
        return self
