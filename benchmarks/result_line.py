"""The last line of a benchmark: one JSON object."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def target(value: float, goal: float, unit: str, *, digits: int = 4) -> dict[str, Any]:
    return {"value": round(value, digits), "goal": goal, "unit": unit}


def print_result(
    benchmark: str, targets: dict[str, dict[str, Any]], details: dict[str, Any]
) -> None:
    done = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    line = {
        "benchmark": benchmark,
        "commit": done.stdout.strip() or "unknown",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "targets": targets,
        "details": details,
    }
    print(json.dumps(line))
