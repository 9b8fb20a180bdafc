"""The embedded stack: everything of the platform on one machine, under one supervisor."""

from vla_platform.stack.info import ProcessState, ProcessStatus, StackInfo
from vla_platform.stack.operate import Progress, down, logs, status, up

__all__ = [
    "ProcessState",
    "ProcessStatus",
    "Progress",
    "StackInfo",
    "down",
    "logs",
    "status",
    "up",
]
