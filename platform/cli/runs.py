"""`vla submit` and `vla runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vla_platform.cli.output import Format, Url, connect, console, emit, read_spec, table_of
from vla_platform.client import Run, RunStatus

app = typer.Typer(no_args_is_help=True, help="Watch and cancel runs.")

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
    emit(rows, format, table_of(rows))


@app.command()
def show(run: RunId, url: Url = "", format: Format = "table") -> None:
    """State, progress, reason and history of one run."""
    with connect(url) as platform:
        status = platform.run(run).status()
    row = _row(status) | {"reason": status.reason, "history": list(status.history)}
    pairs = [{"field": name, "value": value} for name, value in row.items()]
    emit(row, format, table_of(pairs))


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


def follow(run: Run) -> None:
    """A progress bar per run, fed by its events; raises what ended the run."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(run.id, total=None)
        for event in run.events():
            if event["kind"] in ("step", "heldout"):
                status = run.status() if progress.tasks[bar].total is None else None
                progress.update(
                    bar,
                    completed=event["step"],
                    total=status.total_steps if status else progress.tasks[bar].total,
                    description=f"{run.id} loss {event.get('loss', event.get('heldout_loss')):.4f}",
                )
    run.result(timeout_s=5)


def _row(status: RunStatus) -> dict[str, Any]:
    return {
        "run": status.run,
        "policy": status.policy,
        "state": str(status.state),
        "step": f"{status.step}/{status.total_steps or '?'}",
        "policy_version": status.policy_version,
        "checkpoint": status.checkpoint,
    }
