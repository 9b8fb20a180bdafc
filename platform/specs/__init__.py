"""What a tenant may ask for: the workload specs, validated at the edge.

Every model refuses unknown fields (with the nearest known name), booleans where numbers are meant,
NaN and infinity. `parse_spec` is the one entrance for Python input, `parse_spec_yaml` and
`parse_spec_json` for text. Field names follow StarVLA, LeRobot and RLinf where they have one.
"""

from vla_platform.specs.base import (
    SPEC_VERSION,
    Float,
    Int,
    Spec,
    canonical_json,
    check_name,
    nearest,
)
from vla_platform.specs.offline import OfflineSpec, SourceSpec
from vla_platform.specs.parsing import (
    MAX_SPEC_BYTES,
    WorkloadSpec,
    json_schema,
    load_json,
    parse_spec,
    parse_spec_json,
    parse_spec_yaml,
)
from vla_platform.specs.policy import (
    DEFAULT_EVERY_STEPS,
    ActionModuleSpec,
    AdamWSpec,
    CheckpointSpec,
    FlowMatchingModule,
    LimitsSpec,
    OFTModule,
    ScheduleSpec,
)
from vla_platform.specs.rewards import (
    DistillationReward,
    EnvironmentReward,
    GraderReward,
    HookSpec,
    RewardSpec,
    TeacherSpec,
)
from vla_platform.specs.rl import (
    AlgorithmSpec,
    AWRSpec,
    EnvironmentSpec,
    GRPOSpec,
    PPOSpec,
    ReinforceSpec,
    RLSpec,
    RolloutSpec,
    UpdateSpec,
)
from vla_platform.specs.sft import DatasetSpec, SFTSpec

__all__ = [
    "DEFAULT_EVERY_STEPS",
    "MAX_SPEC_BYTES",
    "SPEC_VERSION",
    "AWRSpec",
    "ActionModuleSpec",
    "AdamWSpec",
    "AlgorithmSpec",
    "CheckpointSpec",
    "DatasetSpec",
    "DistillationReward",
    "EnvironmentReward",
    "EnvironmentSpec",
    "Float",
    "FlowMatchingModule",
    "GRPOSpec",
    "GraderReward",
    "HookSpec",
    "Int",
    "LimitsSpec",
    "OFTModule",
    "OfflineSpec",
    "PPOSpec",
    "RLSpec",
    "ReinforceSpec",
    "RewardSpec",
    "RolloutSpec",
    "SFTSpec",
    "ScheduleSpec",
    "SourceSpec",
    "Spec",
    "TeacherSpec",
    "UpdateSpec",
    "WorkloadSpec",
    "canonical_json",
    "check_name",
    "json_schema",
    "load_json",
    "nearest",
    "parse_spec",
    "parse_spec_json",
    "parse_spec_yaml",
]
