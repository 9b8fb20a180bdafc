"""Parts that the specs of all workloads share: action modules, optimizer, checkpoints, limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_platform.specs.base import Float, Int, Name, Spec, Text
from vla_platform.specs.evaluation import IntervalEvaluationSpec

LogStd = Annotated[
    Float,
    Field(
        ge=-5.0,
        le=1.0,
        description="spread with which reinforcement learning begins to explore, in units of "
        "normalised actions; learned from there",
    ),
]


class OFTModule(Spec):
    """Regression head on action-query hidden states (OpenVLA-OFT, StarVLA `QwenOFT`)."""

    kind: Literal["oft"] = "oft"
    chunk: Int = Field(8, ge=1, le=64, description="actions predicted at once (H)")
    hidden_dim: Int | None = Field(None, ge=8, le=8192, description="default: 2 x backbone width")
    num_blocks: Int = Field(2, ge=1, le=8, description="residual MLP blocks")
    state: Literal["encoder", "prompt", "none"] = Field(
        "encoder",
        description="proprioception: a learned encoder added to the queries, 256-bin text in the "
        "prompt as in StarVLA, or not used",
    )
    initial_log_std: LogStd = -2.0


class FlowMatchingModule(Spec):
    """GR00T-style flow matching: a DiT that cross-attends to the backbone's hidden states."""

    kind: Literal["flow_matching"] = "flow_matching"
    chunk: Int = Field(8, ge=1, le=64, description="actions predicted at once (H)")
    hidden_dim: Int = Field(128, ge=16, le=4096, description="DiT width; 768 is StarVLA's DiT-B")
    num_layers: Int = Field(
        4, ge=1, le=48, description="even: cross-attention, odd: self-attention"
    )
    num_heads: Int = Field(4, ge=1, le=64)
    num_future_tokens: Int = Field(8, ge=0, le=64)
    dropout: Float = Field(0.0, ge=0.0, lt=1.0)
    num_inference_steps: Int = Field(4, ge=1, le=50, description="Euler steps from noise to action")
    repeated_diffusion_steps: Int = Field(
        4, ge=1, le=16, description="noise draws per sample; multiplies head work only"
    )
    state: Literal["encoder", "none"] = "encoder"
    initial_log_std: LogStd = -2.0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> FlowMatchingModule:
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}"
            )
        return self


ActionModuleSpec = Annotated[OFTModule | FlowMatchingModule, Field(discriminator="kind")]


class ScheduleSpec(Spec):
    """Learning rate: linear warm-up, then constant, cosine or linear decay to `min_lr`."""

    kind: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Int = Field(0, ge=0, le=1_000_000)
    min_lr: Float = Field(0.0, ge=0.0, le=1.0)


class AdamWSpec(Spec):
    kind: Literal["adamw"] = "adamw"
    lr: Float = Field(1e-3, gt=0.0, le=1.0)
    betas: tuple[
        Annotated[Float, Field(ge=0.0, lt=1.0)], Annotated[Float, Field(ge=0.0, lt=1.0)]
    ] = (0.9, 0.95)
    eps: Float = Field(1e-8, gt=0.0, le=1e-2)
    weight_decay: Float = Field(0.0, ge=0.0, le=1.0)
    grad_clip: Float | None = Field(
        1.0, gt=0.0, le=1e6, description="global norm; null: no clipping"
    )
    schedule: ScheduleSpec = ScheduleSpec()

    @model_validator(mode="after")
    def _min_lr_below_lr(self) -> AdamWSpec:
        if self.schedule.min_lr > self.lr:
            raise ValueError(f"schedule.min_lr {self.schedule.min_lr} is above lr {self.lr}")
        return self


DEFAULT_EVERY_STEPS = 50


class CheckpointSpec(Spec):
    every_steps: Int | None = Field(
        None, ge=1, le=1_000_000, description=f"default: {DEFAULT_EVERY_STEPS}, and at the end"
    )
    keep_last: Int = Field(3, ge=1, le=1000)
    keep_best: Int = Field(
        0, ge=0, le=1000, description="also those with the highest success in evaluations"
    )
    milestone_every: Int | None = Field(
        None, ge=1, description="steps divisible by this are kept for good"
    )


class LimitsSpec(Spec):
    max_in_flight: Int = Field(8, ge=1, le=64, description="training jobs of this policy at once")
    max_seconds: Float | None = Field(None, gt=0.0, description="fail the run after this long")


class Workload(Spec):
    """What every workload says of itself, whatever it does."""

    policy: Name = Field(description="the tenant's name for what is trained; `tenant/policy`")
    seed: Int = Field(0, ge=0, lt=2**32)
    priority: Int = Field(0, ge=0, le=9, description="higher is sooner")
    display_name: str | None = Field(None, max_length=256)
    description: Text | None = None
    user_metadata: dict[
        Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
    ] = Field(default_factory=dict, max_length=32)
    evaluation: IntervalEvaluationSpec | None = Field(
        None, description="evaluate on a suite every so many updates; training does not wait"
    )
    idempotency_key: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9_.:\-]+$",
        description="the same key with the same spec returns the same run",
    )
