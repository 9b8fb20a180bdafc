"""`vla submit` and `vla runs`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vla_platform.cli.output import Format, Url, connect, console, emit, read_spec, table_of
from vla_platform.client import Run, RunStatus
from vla_platform.client.report import RunReport, evaluated_events, write_report

app = typer.Typer(no_args_is_help=True, help="Watch, report, pause and cancel runs.")

RunId = Annotated[str, typer.Argument(help="a run's id, such as sft-0123456789abcdef0123")]


def submit(
    file: Annotated[Path, typer.Argument(help="a spec in YAML or JSON; see `vla check`")],
    url: Url = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="stay and show progress")] = False,
    format: Format = "table",
) -> None:
    """Submit a workload; prints the run's id."""
    spec = read_spec(file)
    with connect(url) as platform:
        run = platform.submit(spec)
        if format == "json":
            emit({"run": run.id}, format, table_of([]))
        else:
            typer.echo(run.id)
        if watch:
            follow(run)


@app.command("list")
def list_runs(url: Url = "", format: Format = "table") -> None:
    """All runs, newest first."""
    with connect(url) as platform:
        rows = [_row(run.status()) for run in platform.runs()]
    brief = [
        {key: row[key] for key in ("run", "policy", "state", "step", "updated")} for row in rows
    ]
    emit(rows, format, table_of(brief))


@app.command()
def show(run: RunId, url: Url = "", format: Format = "table") -> None:
    """State, progress, reason and history of one run."""
    with connect(url) as platform:
        status = platform.run(run).status()
    row = _row(status) | {"reason": status.reason, "history": list(status.history)}
    told = dict(_row(status))
    if status.reason:
        told["reason"] = f"{status.reason.get('message')} [{status.reason.get('code')}]"
    told |= {str(change["state"]): _time(change["at"] / 1000) for change in status.history}
    emit(row, format, table_of([{"field": key, "value": value} for key, value in told.items()]))


@app.command()
def report(
    run: RunId,
    folder: Annotated[Path, typer.Argument(help="where to write it")] = Path("report"),
    url: Url = "",
    format: Format = "table",
) -> None:
    """Draw a run's loss curve (PNG) and one self-contained page (HTML)."""
    with connect(url) as platform:
        found = platform.run(run)
        status = found.status()
        checkpoints = [
            {"checkpoint": one.checkpoint_id, "step": one.step, "size_bytes": one.size_bytes}
            for one in platform.checkpoints(status.policy, run)
        ]
        paths = write_report(
            folder,
            [
                RunReport(
                    tenant=platform.tenant,
                    policy=status.policy,
                    workload_id=run,
                    spec=found.spec(),
                    events=[
                        *found.metrics(),
                        *evaluated_events(platform.evaluations(status.policy), run),
                    ],
                    checkpoints=checkpoints,
                    summary=_row(status),
                )
            ],
        )
    row = {"page": str(paths.html), "curve": str(paths.curves[run])}
    emit(row, format, table_of([row]))


@app.command()
def watch(run: RunId, url: Url = "") -> None:
    """Show progress until the run is over."""
    with connect(url) as platform:
        follow(platform.run(run))


@app.command()
def cancel(run: RunId, url: Url = "", format: Format = "table") -> None:
    """Stop a run for good."""
    with connect(url) as platform:
        row = {"run": run, "state": str(platform.run(run).cancel())}
    emit(row, format, table_of([row]))


@app.command()
def pause(run: RunId, url: Url = "", format: Format = "table") -> None:
    """Begin no further training job of a run; what is in flight ends."""
    with connect(url) as platform:
        row = {"run": run, "state": str(platform.run(run).pause())}
    emit(row, format, table_of([row]))


@app.command()
def resume(run: RunId, url: Url = "", format: Format = "table") -> None:
    """Go on with a paused run."""
    with connect(url) as platform:
        row = {"run": run, "state": str(platform.run(run).resume())}
    emit(row, format, table_of([row]))


def explain(run: RunId, url: Url = "", format: Format = "table") -> None:
    """What a run waits for, its place in the line, and about how long."""
    with connect(url) as platform:
        row = platform.run(run).explain()
    told = [{"field": key, "value": value} for key, value in row.items() if value not in (None, "")]
    emit(row, format, table_of(told))


def follow(run: Run) -> None:
    """A progress bar fed by the run's events, then how it ended; raises what ended it badly."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{run.id} pending", total=None)
        for event in run.events():
            if event["kind"] == "state":
                total = run.status().total_steps
                progress.update(bar, total=total, description=f"{run.id} {event['state']}")
            elif event["kind"] in ("step", "update"):
                shown = f"{run.id} training loss {event['loss']:.4f}"
                progress.update(bar, completed=event["step"], description=shown)
            elif event["kind"] == "unscored":
                progress.console.print(
                    f"rollout {event['position']} has no scores ({event['outcome']}): "
                    f"{event['reason']}"
                )
            elif event["kind"] == "heldout":
                progress.console.print(
                    f"step {event['step']}: held-out loss {event['heldout_loss']:.4f}"
                )
    status = run.result(timeout_s=5)
    typer.echo(f"{run.id} {status.state} after {status.step} steps: {status.checkpoint}")
    typer.echo(f"next: vla runs report {run.id}; vla checkpoints download {status.checkpoint}")


def _row(status: RunStatus) -> dict[str, Any]:
    return {
        "run": status.run,
        "policy": status.policy,
        "state": str(status.state),
        "step": f"{status.step}/{status.total_steps or '?'}",
        "policy_version": status.policy_version,
        "checkpoint": status.checkpoint,
        "updated": _time(status.updated_s),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
