"""Reinforcement learning of a policy in an environment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_platform.specs.base import Float, Int, Spec
from vla_platform.specs.offline import OfflineSpec
from vla_platform.specs.policy import AdamWSpec, CheckpointSpec, LimitsSpec, Workload
from vla_platform.specs.rewards import (
    DistillationReward,
    EnvironmentReward,
    HookSpec,
    RewardSpec,
)

Share = Annotated[Float, Field(ge=0.0, le=1.0)]
Level = Literal["chunk", "step"]
Text256 = Annotated[str, Field(max_length=256)]


class EnvironmentSpec(Spec):
    """Where the policy acts."""

    id: str = Field(
        min_length=3, max_length=128, description="`harness/name`, such as `tabletop/reach`"
    )
    options: dict[
        Annotated[str, Field(max_length=64)],
        bool | Int | Float | Text256 | Annotated[tuple[Text256, ...], Field(max_length=64)],
    ] = Field(default_factory=dict, max_length=32, description="what the harness lets one choose")
    isolation: Literal["thread", "shared", "process"] = "thread"


class RolloutSpec(Spec):
    """What one training job of RL is made of."""

    num_envs: Int = Field(8, ge=1, le=1024, description="sessions side by side (N)")
    horizon: Int = Field(16, ge=1, le=10_000, description="decisions in each session (T)")
    group_size: Int = Field(1, ge=1, le=256, description="sessions that share an initial state")
    whole_episodes: bool = Field(
        False, description="one episode per session, ended or cut by the horizon"
    )
    execute_steps: Int | None = Field(
        None, ge=1, le=64, description="actions of a chunk before the next decision; null: all"
    )
    num_videos: Int = Field(0, ge=0, le=16, description="films per rollout")

    @model_validator(mode="after")
    def _groups_fill(self) -> RolloutSpec:
        if self.num_envs % self.group_size:
            raise ValueError(
                f"num_envs {self.num_envs} is not a multiple of group_size {self.group_size}"
            )
        return self


class UpdateSpec(Spec):
    """How a rollout's rows become optimizer steps."""

    epochs: Int = Field(2, ge=1, le=64, description="passes over the rows")
    minibatches: Int = Field(4, ge=1, le=256, description="optimizer steps per pass")
    clip_low: Float = Field(
        0.2, gt=0.0, lt=1.0, description="ratios below 1 - clip_low earn nothing"
    )
    clip_high: Float = Field(0.2, gt=0.0, le=10.0)
    dual_clip: Float | None = Field(3.0, gt=1.0, le=100.0, description="null: off")
    entropy_weight: Float = Field(0.0, ge=0.0, le=1.0)
    target_kl: Float | None = Field(
        None, gt=0.0, le=10.0, description="end an update whose divergence passes this"
    )
    ratio: Level = Field("step", description="one ratio per action, or one per chunk")


class PPOSpec(UpdateSpec):
    """PPO with a value head and GAE."""

    kind: Literal["ppo"] = "ppo"
    gamma: Float = Field(0.99, ge=0.0, le=1.0)
    lam: Float = Field(0.95, ge=0.0, le=1.0, description="lambda of GAE")
    level: Level = Field("chunk", description="what counts as a step of time")
    value_weight: Float = Field(0.5, ge=0.0, le=100.0)
    value_clip: Float | None = Field(0.2, gt=0.0, le=100.0)
    normalize_advantages: bool = True
    actor_forward: bool = Field(
        False, description="compute log-probabilities and values anew before the advantages"
    )


class GRPOSpec(UpdateSpec):
    """GRPO: an episode's score against those of its group; no value head."""

    kind: Literal["grpo"] = "grpo"
    scale: bool = Field(True, description="divide by the group's standard deviation")
    pass_rates: tuple[Share, Share] = Field(
        (0.0, 1.0), description="groups whose share of successes lies outside are rejected"
    )
    keep_zero_groups: bool = Field(False, description="train groups without any advantage, too")
    actor_forward: bool = False


class ReinforceSpec(Spec):
    """Return-based policy gradient with a baseline."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: Float = Field(0.99, ge=0.0, le=1.0)
    level: Level = "chunk"
    baseline: Literal["mean", "none"] = "mean"
    normalize_advantages: bool = True
    entropy_weight: Float = Field(0.0, ge=0.0, le=1.0)
    actor_forward: bool = False


class AWRSpec(Spec):
    """Advantage-weighted regression: imitate what went better than expected, the better the more.

    Needs nothing of the policy that acted, so it also learns from recorded episodes.
    """

    kind: Literal["awr"] = "awr"
    gamma: Float = Field(0.99, ge=0.0, le=1.0, description="per decision")
    baseline: Literal["value", "mean"] = Field(
        "value", description="what returns are measured against: the value head, or their mean"
    )
    normalize_advantages: bool = Field(True, description="then the temperature has no unit")
    temperature: Float = Field(1.0, gt=0.0, le=1e6, description="weight exp(A / temperature)")
    max_weight: Float = Field(20.0, ge=1.0, le=1e6)
    value_weight: Float = Field(0.5, ge=0.0, le=100.0)
    epochs: Int = Field(2, ge=1, le=64, description="passes over the rows")
    minibatches: Int = Field(4, ge=1, le=256, description="optimizer steps per pass")

    @property
    def actor_forward(self) -> bool:
        """The value head speaks before the advantages."""
        return self.baseline == "value"


AlgorithmSpec = Annotated[PPOSpec | GRPOSpec | ReinforceSpec | AWRSpec, Field(discriminator="kind")]


class RLSpec(Workload):
    """Reinforcement learning of one policy, from a fine-tuned checkpoint."""

    kind: Literal["rl"] = "rl"
    version: Literal[1] = 1
    base_model: str = Field("tiny", min_length=1, max_length=256)
    init_from: str = Field(
        min_length=1,
        max_length=256,
        description="id of a checkpoint of the tenant; its interface, statistics and module stay",
    )
    environment: EnvironmentSpec | None = Field(
        None, description="null: the tenant acts and gives the samples itself, by `Run.train_batch`"
    )
    data: OfflineSpec | None = Field(
        None, description="recorded episodes in place of an environment: offline RL"
    )
    rollout: RolloutSpec = RolloutSpec()
    algorithm: AlgorithmSpec = PPOSpec()
    reward: RewardSpec = EnvironmentReward()
    score_hooks: tuple[HookSpec, ...] = Field(
        (), max_length=8, description="rewrite scores, in order"
    )
    shape_hooks: tuple[HookSpec, ...] = Field((), max_length=8, description="rewrite advantages")
    optimizer: AdamWSpec = AdamWSpec(lr=1e-4)
    updates: Int = Field(ge=1, le=1_000_000, description="training jobs that take effect")
    max_dropped: Int = Field(
        64, ge=1, le=1_000_000, description="rollouts in a row that may teach nothing"
    )
    max_policy_staleness: Int = Field(
        2, ge=0, le=1000, description="versions between acting and training; older is dropped"
    )
    encode_once: bool = Field(
        True, description="train on the features that the rollout's predictions computed"
    )
    checkpoint: CheckpointSpec = CheckpointSpec(every_steps=1)
    limits: LimitsSpec = LimitsSpec(max_in_flight=2)

    @model_validator(mode="after")
    def _data_come_from_one_place(self) -> RLSpec:
        if self.data is None:
            if "environment" not in self.model_fields_set:
                raise ValueError("environment is missing (null: samples of your own), or data")
            return self
        if self.environment is not None:
            raise ValueError("data takes the environment's place: give one of them")
        if not isinstance(self.algorithm, AWRSpec):
            raise ValueError(
                f"algorithm {self.algorithm.kind} needs the log-probabilities of the policy that "
                "acted, which no dataset has: use awr"
            )
        if isinstance(self.reward, DistillationReward):
            raise ValueError("a teacher judges what the student draws; data hold what others did")
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> RLSpec:
        if isinstance(self.algorithm, GRPOSpec):
            if self.rollout.group_size < 2:
                raise ValueError("grpo compares episodes of a group: rollout.group_size is below 2")
            if not self.rollout.whole_episodes:
                raise ValueError("grpo scores whole episodes: set rollout.whole_episodes")
            lowest, highest = self.algorithm.pass_rates
            if lowest > highest:
                raise ValueError(f"pass_rates {lowest} is above {highest}")
        if self.checkpoint.every_steps != 1 and self.data is None:
            raise ValueError(
                "checkpoint.every_steps is 1 unless the data are recorded: rollouts use every "
                "update that is published"
            )
        return self
