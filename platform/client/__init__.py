"""What tenants import: `from vla_platform.client import Platform`."""

from vla_platform.client.environments import RemoteEnvironment, batch_step
from vla_platform.client.inference import InferenceProxy
from vla_platform.client.platform import Platform
from vla_platform.client.runs import Run, RunStatus
from vla_platform.envs.base import Observation
from vla_platform.inference.protocol import Prediction
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
    "InferenceProxy",
    "LimitsSpec",
    "OFTModule",
    "Observation",
    "Platform",
    "Prediction",
    "RemoteEnvironment",
    "Run",
    "RunStatus",
    "SFTSpec",
    "ScheduleSpec",
    "batch_step",
]
