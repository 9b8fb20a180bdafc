"""What tenants import: `from vla_platform.client import Platform`."""

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
from vla_storage.payloads import FrameColumn, Frames

__all__ = [
    "AdamWSpec",
    "CheckpointSpec",
    "DatasetSpec",
    "FlowMatchingModule",
    "FrameColumn",
    "Frames",
    "LimitsSpec",
    "OFTModule",
    "Platform",
    "Run",
    "RunStatus",
    "SFTSpec",
    "ScheduleSpec",
]
