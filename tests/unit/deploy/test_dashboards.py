"""Dashboards and alerts name only metrics and labels that the collector exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Gauge

from vla_platform.metrics import collector

METRIC = re.compile(r"\bvla_[a-z0-9_]+")
LABELS = re.compile(r"(vla_[a-z0-9_]+)\{([^}]*)\}|by \(([^)]*)\)")


def exported() -> dict[str, set[str]]:
    """Sample names to labels, as `/metrics` shows them."""
    return {
        f"{metric._name}_total" if isinstance(metric, Counter) else metric._name: set(
            metric._labelnames
        )
        for metric in vars(collector).values()
        if isinstance(metric, Counter | Gauge)
    }


def expressions(repository: Path) -> list[str]:
    dashboard = json.loads((repository / "deploy/grafana/vla-platform.json").read_text())
    alerts = yaml.safe_load((repository / "deploy/prometheus/alerts.yml").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [one["query"] for one in dashboard["templating"]["list"]]
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    assert len(panels) > 10
    assert len(rules) > 5
    return [*panels, *queries, *rules]


def test_every_metric_that_is_shown_is_exported(repository: Path) -> None:
    known = exported()
    used = {name for text in expressions(repository) for name in METRIC.findall(text)}
    assert used - set(known) == set()
    # Nothing is measured that nobody looks at.
    assert set(known) - used == set()


def test_every_label_that_is_used_is_exported(repository: Path) -> None:
    known = exported()
    for text in expressions(repository):
        for name, given, _ in LABELS.findall(text):
            labels = set(re.findall(r"(\w+)\s*(?:=|!=|=~)", given))
            assert labels <= known.get(name, labels)
        for _, _, grouped in LABELS.findall(text):
            wanted = {part.strip() for part in grouped.split(",") if part.strip()}
            named = METRIC.findall(text)
            assert all(wanted <= known[name] for name in named if wanted)


def test_alerts_say_what_to_do_and_panels_do_not_overlap(repository: Path) -> None:
    alerts = yaml.safe_load((repository / "deploy/prometheus/alerts.yml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule)
        assert set(rule["annotations"]) == {"summary", "action"}
    dashboard: dict[str, Any] = json.loads(
        (repository / "deploy/grafana/vla-platform.json").read_text()
    )
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_legends_use_labels_of_their_expression(repository: Path) -> None:
    known = exported()
    dashboard = json.loads((repository / "deploy/grafana/vla-platform.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (name, *_) = METRIC.findall(target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in known[name], panel["title"]


@pytest.mark.parametrize("name", ["vla_steps_total", "vla_audit_findings"])
def test_the_collectors_metrics_are_found(name: str) -> None:
    assert name in exported()
