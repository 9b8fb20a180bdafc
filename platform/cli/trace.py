"""`vla trace`: where a training job's time went."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_platform.cli.output import Format, Url, Var, connect, emit, table_of
from vla_platform.cli.tenants import operator
from vla_platform.client.timelines import draw_timeline
from vla_platform.control import timeline
from vla_platform.errors import NotFoundError

_JOB = re.compile(r"(?P<run>(?:sft|rl)-[0-9a-f]{20})(?:-\d+-\d+)?")
_WIDTH = 32


def trace(
    job: Annotated[
        str, typer.Argument(help="a training job's id, from an event; of a run: its last step's")
    ],
    picture: Annotated[
        Path | None, typer.Option(help="also draw it: a file ending in .svg or .png")
    ] = None,
    url: Url = "",
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """The life of one training job, phase by phase. Without --url: as the operator of --var."""
    known = _JOB.fullmatch(job)
    if known is None:
        raise NotFoundError(f"no training job {job[:80]!r}: ids look like sft-…-POSITION-NUMBER")
    run = known["run"]
    job_id = job if job != run else ""
    phases: list[dict[str, Any]]
    if url:
        with connect(url) as platform:
            found = platform.run(run)
            job_id = job_id or _last(found.metrics(), run)
            phases = found.timeline(job_id)
    else:
        with operator(var) as one:
            job_id = job_id or _last(timeline.events_of_run(one.ledger, run), run)
            phases = [asdict(phase) for phase in timeline.of_job(one.ledger, run, job_id)]
    if picture is not None:
        draw_timeline(phases, picture, title=job_id)
    rows = _rows(phases)
    emit({"job": job_id, "phases": phases}, format, table_of(rows, title=job_id))


def _last(events: Sequence[Mapping[str, Any]], run: str) -> str:
    done = [one for one in events if one["kind"] in ("step", "update") and one.get("job_id")]
    if not done:
        raise NotFoundError(f"no training job of {run} took effect yet", workload=run)
    return str(done[-1]["job_id"])


def _rows(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    begun = min(one["begun_s"] for one in phases)
    last = max(one["ended_s"] or one["begun_s"] for one in phases)
    scale = _WIDTH / max(last - begun, 1e-3)
    rows = []
    for one in phases:
        end = last if one["ended_s"] is None else one["ended_s"]
        first = min(_WIDTH - 1, round((one["begun_s"] - begun) * scale))
        length = max(1, round((end - begun) * scale) - first)
        rows.append(
            {
                "phase": one["name"],
                "after_s": f"{one['begun_s'] - begun:.3f}",
                "took_s": "goes on" if one["ended_s"] is None else f"{end - one['begun_s']:.3f}",
                "when": (" " * first + "█" * length)[:_WIDTH],
                "where": one["where"],
                "note": one["note"],
            }
        )
    return rows
