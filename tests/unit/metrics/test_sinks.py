"""Sinks: what is named is opened; a tracker that fails loses its own events and no other's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_platform.errors import ConfigurationError
from vla_platform.metrics.events import Event
from vla_platform.metrics.sinks import MemorySink, Sink, numbers_of, open_sinks

STEP = Event(tenant="a", workload="run-1", kind="step", values={"step": 3, "loss": 0.5})


def test_lines_of_json_are_appended_also_after_a_rotation(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "events.jsonl"
    (sink,) = open_sinks(f"jsonl={file}")
    sink.write(STEP)
    file.rename(tmp_path / "old")
    sink.write(STEP)
    sink.close()
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["values"] == {"step": 3, "loss": 0.5}


def test_only_finite_numbers_go_to_trackers() -> None:
    values = {"a": 1, "b": True, "c": "x", "d": float("nan"), "e": 2.5, "f": None}
    assert numbers_of(values) == {"a": 1.0, "e": 2.5}


def test_unknown_kinds_and_missing_packages_are_told() -> None:
    assert open_sinks("") == []
    with pytest.raises(ConfigurationError, match="no metrics sink 'tensorbored'"):
        open_sinks("tensorbored=x")


def test_one_that_fails_holds_up_nobody() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    assert prometheus
    from vla_platform.metrics.collector import forward

    class Failing(Sink):
        def write(self, event: Event) -> None:
            raise RuntimeError("the tracker is down")

    kept = MemorySink()
    raw = {"tenant": "a", "workload": "w", "kind": "step", "values": {}, "at": 1.0, "version": 1}
    forward([Failing(), kept], [("1-0", raw), ("2-0", raw)])
    assert [event.workload for event in kept.events] == ["w", "w"]


def test_mlflow_gets_one_run_per_workload(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    target = f"sqlite:///{tmp_path}/mlflow.db"
    pytest.importorskip("sqlalchemy")
    for _ in range(2):  # a restarted collector finds its run
        (sink,) = open_sinks(f"mlflow={target}")
        sink.write(STEP)
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=target)
    experiment = client.get_experiment_by_name("vla/a")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["step.loss"] == 0.5
    assert run.data.tags["workload"] == "run-1"


def test_wandb_gets_one_run_per_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (sink,) = open_sinks("wandb=demo")
    sink.write(STEP)
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*-a-run-1"))
