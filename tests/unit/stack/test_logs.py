"""`vla logs RUN`: what all processes say of one run, in the order of time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from vla_platform.errors import ConfigurationError
from vla_platform.stack.credentials import load_or_create
from vla_platform.stack.info import plan
from vla_platform.stack.operate import logs_of_run

RUN = "sft-0123456789abcdef0123"


def test_lines_of_one_run_come_from_all_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        list(logs_of_run(tmp_path, RUN))
    info = plan(
        tmp_path, ports={"redis-control": 1, "redis-payload": 2, "s3": 3},
        credentials=load_or_create(tmp_path, ()), signing_key=tmp_path / "key",
        roles=("gpu", "control"), environment={}, dataset_roots="",
    )  # fmt: skip
    (tmp_path / "stack.json").write_text(json.dumps(asdict(info), default=str))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gpu.log").write_text(
        f"[2026-01-01 12:00:02,000: INFO/MainThread] action=trained workload={RUN} step=1\n"
        "[2026-01-01 12:00:03,000: INFO/MainThread] action=trained workload=sft-other\n"
        f"[2026-01-01 12:00:04,000: INFO/MainThread] half a line of {RUN}"
    )
    (logs / "control.log").write_text(
        f"2026-01-01 12:00:01,500 INFO action=admitted workload={RUN}\n"
        f"2026-01-01 12:00:05,000 INFO job={RUN}-0-0 done\n"
        f"2026-01-01 12:00:05,000 INFO job={RUN}9 of another\n"
    )
    found = list(logs_of_run(tmp_path, RUN))
    assert [line.split()[0] for line in found] == ["control", "gpu", "control"]
    assert [part in line for part, line in zip(("admitted", "step=1", "done"), found, strict=True)]
