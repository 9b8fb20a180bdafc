"""What GPU workers say of themselves: how busy their device is, and with what.

vla:gpu:<worker>    hash  what `GpuReport` holds; gone `FRESH_S` after the worker's last word
vla:gpus            set   their names
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "vla:gpu:"
NAMES = "vla:gpus"
FRESH_S = 15


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """One worker's last word. Shares are of the last minute of time, 0 to 1."""

    worker: str  # such as gpu-1@host
    base_models: str
    device: str
    training_share: float
    inference_share: float
    slots: int


def keep_report(client: Any, report: GpuReport) -> None:
    with client.pipeline() as pipe:
        pipe.hset(PREFIX + report.worker, mapping=asdict(report))
        pipe.expire(PREFIX + report.worker, FRESH_S)
        pipe.sadd(NAMES, report.worker)
        pipe.execute()


def read_reports(client: Any) -> tuple[GpuReport, ...]:
    """Of the workers that are alive, by name."""
    found = []
    for worker in sorted(client.smembers(NAMES)):
        raw = client.hgetall(PREFIX + worker)
        if not raw:
            client.srem(NAMES, worker)
            continue
        raw |= {name: float(raw[name]) for name in ("training_share", "inference_share")}
        found.append(GpuReport(**(raw | {"slots": int(raw["slots"])})))
    return tuple(found)
