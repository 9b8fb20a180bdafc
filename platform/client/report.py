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
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Event = Mapping[str, Any]

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9600f", "#555555"
_PANEL_INCHES = (6.4, 3.8)
_DPI = 130
_LOG_ABOVE = 30.0  # ratio of largest to smallest loss from which the axis is logarithmic


@dataclass(frozen=True)
class RunReport:
    """What is known of one run.

    `events` are metric events with at least `step`, and any of `loss`, `heldout_loss`, `lr`,
    `grad_norm`, `samples_per_s`, `group_size`, `cache_hits`, `cache_misses`; others are ignored.
    """

    tenant: str
    policy: str
    workload_id: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    checkpoints: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)

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
    """A PNG with one panel per run: training loss, raw and smoothed, and held-out points."""
    columns = min(2, len(runs))
    rows = math.ceil(len(runs) / columns)
    width, height = _PANEL_INCHES
    # A figure of its own, not pyplot's: workers draw on several threads.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, run in enumerate(runs, start=1):
        _draw(figure.add_subplot(rows, columns, number), run)
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
    return {
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


def smooth(values: Sequence[float]) -> list[float]:
    """Centred mean over about a twentieth of the values; at the ends, over those that are there."""
    half = max(2, len(values) // 40)
    return [fmean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def _draw(axes: Axes, run: RunReport) -> None:
    loss, heldout = run.series("loss"), run.series("heldout_loss")
    if loss:
        steps, values = zip(*loss, strict=True)
        axes.plot(steps, values, color=_BLUE, alpha=0.3, linewidth=1, label="training, per step")
        axes.plot(steps, smooth(values), color=_BLUE, linewidth=2, label="training, smoothed")
    if heldout:
        steps, values = zip(*heldout, strict=True)
        axes.plot(
            steps, values, color=_ORANGE, marker="o", markersize=5, linestyle="--", label="held out"
        )
        for place in (0, -1):
            axes.annotate(
                f"{values[place]:.3g}",
                (steps[place], values[place]),
                xytext=(0, 7),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                fontsize=9,
                color=_ORANGE,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
            )
    if loss or heldout:
        axes.legend(frameon=False, fontsize=9)
        every = [value for _, value in (*loss, *heldout)]
        if min(every) > 0 and max(every) / min(every) > _LOG_ABOVE:
            axes.set_yscale("log")
        axes.margins(y=0.12)
    else:
        axes.text(0.5, 0.5, "no losses reported", ha="center", transform=axes.transAxes)
    # The font has no glyphs beyond Latin, and "$" would begin a formula.
    title = run.title.encode("ascii", "replace").decode("ascii")
    axes.set_title(title[:80], fontsize=11, parse_math=False)
    axes.set_xlabel("training step", color=_GREY)
    axes.set_ylabel("loss", color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _replace(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(content)
    staged.replace(path)
