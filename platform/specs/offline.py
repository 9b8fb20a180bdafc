"""Recorded episodes in place of an environment: offline reinforcement learning."""

from __future__ import annotations

from pydantic import Field, model_validator

from vla_platform.specs.base import Float, Int, Key, Spec
from vla_platform.specs.sft import DatasetSpec


class SourceSpec(Spec):
    """One dataset, and what its episodes were worth."""

    dataset: DatasetSpec = Field(
        description="cameras, state and action are those of the policy; its statistics stay"
    )
    reward: Key | None = Field(
        None, description="column of each action's reward; null: 1 for the last of a success"
    )
    success: Key | None = Field(None, description="column that is true where an episode succeeded")
    share: Float = Field(
        1.0, gt=0.0, le=1e6, description="of an update's episodes, beside the other sources'"
    )

    @model_validator(mode="after")
    def _tells_good_from_bad(self) -> SourceSpec:
        if self.reward is None and self.success is None:
            raise ValueError("name the column of rewards, of success, or both")
        return self


class OfflineSpec(Spec):
    """What one update is made of."""

    sources: tuple[SourceSpec, ...] = Field(min_length=1, max_length=16)
    episodes_per_update: Int = Field(8, ge=1, le=1024, description="whole ones, of all sources")
    stride: Int | None = Field(
        None, ge=1, le=1024, description="frames from one decision to the next; null: a chunk"
    )

    @model_validator(mode="after")
    def _every_source_has_a_place(self) -> OfflineSpec:
        if len(self.sources) > self.episodes_per_update:
            raise ValueError(
                f"{len(self.sources)} sources share {self.episodes_per_update} episodes per update"
            )
        return self
