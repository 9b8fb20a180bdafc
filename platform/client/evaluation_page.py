"""One evaluation as a self-contained page: the trend of its policy, its episodes, its films."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

import jinja2

from vla_platform.control.trends import Point, latest_change
from vla_platform.envs.evaluation_records import EvaluationRecord

WIDTH, HEIGHT, MARGIN = 720, 220, 36


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of the curve, in pixels."""

    x: float
    y: float
    low: float
    high: float
    label: str


def render(
    record: EvaluationRecord, trend: Sequence[Point], films: Mapping[int, bytes] | None = None
) -> str:
    """`films`: MP4 by episode."""
    template = resources.files("vla_platform.client").joinpath("evaluation.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    points = [one for one in trend if one.suite == record.suite]
    return environment.from_string(template).render(
        record=record,
        finished=datetime.fromtimestamp(record.finished, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        marks=marks(points),
        change=latest_change(points),
        films={
            index: base64.b64encode(film).decode() for index, film in sorted((films or {}).items())
        },
        width=WIDTH,
        height=HEIGHT,
        margin=MARGIN,
    )


def marks(points: Sequence[Point]) -> list[Mark]:
    """Left to right in the order of time, evenly spaced; rates from bottom to top."""
    step = (WIDTH - 2 * MARGIN) / max(1, len(points) - 1)

    def y(rate: float) -> float:
        return round(HEIGHT - MARGIN - rate * (HEIGHT - 2 * MARGIN), 1)

    return [
        Mark(
            x=round(MARGIN + number * step, 1),
            y=y(one.success_rate),
            low=y(one.interval_low),
            high=y(one.interval_high),
            label=f"{one.evaluation_id}: {one.success_rate:.3f}, version {one.policy_version}",
        )
        for number, one in enumerate(points)
    ]
