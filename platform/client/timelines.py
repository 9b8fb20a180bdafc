"""A picture of one training job's life: a bar per phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")

WAITING = "#c9ced6"
WORKING = "#2464a8"


def draw_timeline(phases: Sequence[Mapping[str, Any]], file: Path, *, title: str) -> Path:
    """Write `file`, SVG or PNG by its suffix; phases as `Run.timeline` returns them."""
    begun = min(one["begun_s"] for one in phases)
    last = max(one["ended_s"] or one["begun_s"] for one in phases)
    figure = Figure(figsize=(9, 0.45 * len(phases) + 1.2), layout="constrained")
    axes = figure.subplots()
    for at, one in enumerate(phases):
        start = one["begun_s"] - begun
        length = (last if one["ended_s"] is None else one["ended_s"]) - begun - start
        colour = WAITING if one["name"].startswith("waits") else WORKING
        axes.barh(at, max(length, (last - begun) / 500), left=start, color=colour)
    axes.set_yticks(range(len(phases)), [one["name"] for one in phases])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since its reservation")
    axes.set_title(title, fontsize=10)
    figure.savefig(file)
    return file
