"""What tenants import: `from vla_platform.client import Platform`."""

from vla_platform.client.environments import RemoteEnvironment, batch_step
from vla_platform.client.platform import Platform
from vla_platform.client.runs import Run, RunStatus
from vla_platform.specs import (
    AdamWSpec,
    CheckpointSpec,
    DatasetSpec,
    FlowMatchingModule,
    LimitsSpec,
    OFTModule,
    ScheduleSpec,
    SFTSpec,
)

__all__ = [
    "AdamWSpec",
    "CheckpointSpec",
    "DatasetSpec",
    "FlowMatchingModule",
    "LimitsSpec",
    "OFTModule",
    "Platform",
    "RemoteEnvironment",
    "Run",
    "RunStatus",
    "SFTSpec",
    "ScheduleSpec",
    "batch_step",
]
