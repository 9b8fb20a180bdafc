"""What a run did, as pictures and one self-contained HTML page.

The page loads nothing and runs no script; all text of the tenant's is escaped (B04).
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vla_platform.client.curves import draw_losses, draw_success
from vla_platform.control.trends import Point

Event = Mapping[str, Any]

_PANEL_INCHES = (6.4, 3.8)
_DPI = 130


@dataclass(frozen=True)
class Video:
    caption: str
    mp4: bytes = field(repr=False)


@dataclass(frozen=True)
class RunReport:
    """What is known of one run.

    `events` are metric events with at least `step`, and any of `loss`, `heldout_loss`, `lr`,
    `grad_norm`, `samples_per_s`, `group_size`, `cache_hits`, `cache_misses`; of reinforcement
    learning `success_rate` and `mean_return` by rollout, and `evaluated_success` with
    `evaluated_low` and `evaluated_high`, the ends of its interval. Others are ignored.
    """

    tenant: str
    policy: str
    workload_id: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    checkpoints: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    videos: Sequence[Video] = ()

    @property
    def title(self) -> str:
        return f"{self.tenant}/{self.policy}"

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every finite value of a metric, by step; a repeated step counts once.

        A job that was delivered again may report its step twice: the last report stays.
        """
        points: dict[int, float] = {}
        for event in self.events:
            value, step = event.get(name), event.get("step")
            if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value):
                points[step] = float(value)
        return sorted(points.items())

    @property
    def by_rollouts(self) -> bool:
        """Whether this is reinforcement learning: what counts is success, not the loss."""
        return bool(self.series("success_rate"))


def evaluated_events(points: Sequence[Point], run: str) -> list[dict[str, Any]]:
    """A run's own evaluations as events of its report."""
    found = []
    for one in points:
        of, _, step = one.evaluation_id.rpartition("-")
        if of == run and step.isdigit():
            found.append(
                {
                    "kind": "evaluated",
                    "step": int(step),
                    "evaluated_success": one.success_rate,
                    "evaluated_low": one.interval_low,
                    "evaluated_high": one.interval_high,
                }
            )
    return found


@dataclass(frozen=True)
class ReportPaths:
    html: Path
    overview: Path  # PNG, one panel per run
    curves: Mapping[str, Path]  # workload id to the PNG of that run alone


def write_report(folder: Path, runs: Sequence[RunReport]) -> ReportPaths:
    """Write `report.html`, `loss_curves.png` and one PNG per run into `folder`.

    Files are replaced whole. Raises `ValueError` without a run.
    """
    if not runs:
        raise ValueError("a report needs a run")
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {run.workload_id: render_curves([run]) for run in runs}
    curves = {}
    for run in runs:
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{run.tenant}-{run.policy}-{run.workload_id}")
        curves[run.workload_id] = folder / f"{name[:150]}.png"
        _replace(curves[run.workload_id], pictures[run.workload_id])
    paths = ReportPaths(folder / "report.html", folder / "loss_curves.png", curves)
    _replace(paths.overview, render_curves(runs))
    _replace(paths.html, render_html(runs, pictures).encode("utf-8"))
    return paths


def render_curves(runs: Sequence[RunReport]) -> bytes:
    """A PNG with one panel per run: its losses, or success and return where it learns by reward."""
    columns = min(2, len(runs))
    rows = math.ceil(len(runs) / columns)
    width, height = _PANEL_INCHES
    # A figure of its own, not pyplot's: workers draw on several threads.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, run in enumerate(runs, start=1):
        axes = figure.add_subplot(rows, columns, number)
        rates, low, high = (run.series(f"evaluated_{name}") for name in ("success", "low", "high"))
        evaluated = [
            (step, rate, bottom, top)
            for (step, rate), (_, bottom), (_, top) in zip(rates, low, high, strict=True)
        ]
        if run.by_rollouts:
            draw_success(
                axes,
                run.title,
                success=run.series("success_rate"),
                returns=run.series("mean_return"),
                evaluated=evaluated,
            )
        else:
            draw_losses(
                axes,
                run.title,
                loss=run.series("loss"),
                heldout=run.series("heldout_loss"),
                evaluated=evaluated,
            )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def render_html(runs: Sequence[RunReport], pictures: Mapping[str, bytes]) -> str:
    """The page; `pictures` are the PNG files of each run by workload id."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["show"] = show
    source = resources.files("vla_platform.client").joinpath("report.html.j2")
    template = environment.from_string(source.read_text(encoding="utf-8"))
    return template.render(
        runs=[
            {
                "run": run,
                "facts": facts(run),
                "columns": list(dict.fromkeys(key for row in run.checkpoints for key in row)),
                "spec": json.dumps(dict(run.spec), indent=2, ensure_ascii=False, default=str),
                "png": base64.b64encode(pictures[run.workload_id]).decode("ascii"),
                "videos": [
                    (video.caption, base64.b64encode(video.mp4).decode("ascii"))
                    for video in run.videos
                ],
            }
            for run in runs
        ]
    )


def facts(run: RunReport) -> dict[str, Any]:
    """The figures of the table of runs; None where the events do not tell."""
    loss, heldout = run.series("loss"), run.series("heldout_loss")
    hits = sum(value for _, value in run.series("cache_hits"))
    misses = sum(value for _, value in run.series("cache_misses"))
    speed = [value for _, value in run.series("samples_per_s")]
    groups = [value for _, value in run.series("group_size")]
    success = run.series("evaluated_success") or run.series("success_rate")
    return {
        "success_first": success[0][1] if success else None,
        "success_last": success[-1][1] if success else None,
        "steps": loss[-1][0] if loss else None,
        "loss_first": loss[0][1] if loss else None,
        "loss_last": loss[-1][1] if loss else None,
        "heldout_first": heldout[0][1] if heldout else None,
        "heldout_last": heldout[-1][1] if heldout else None,
        "samples_per_s": median(speed) if speed else None,
        "group_size": fmean(groups) if groups else None,
        "cache_hit_share": hits / (hits + misses) if hits + misses else None,
    }


def show(value: Any) -> str:
    """A value as the tables print it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _replace(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(content)
    staged.replace(path)
