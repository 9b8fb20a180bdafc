"""`vla schedules` and `vla evaluations`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_platform.cli.output import Format, Url, connect, console, emit, read_yaml, table_of
from vla_platform.client.evaluation_page import render
from vla_platform.control.schedules import firing_table
from vla_platform.control.trends import Point, compare, latest_change
from vla_platform.errors import SpecError

app = typer.Typer(no_args_is_help=True, help="Evaluations by cron.")
evaluations = typer.Typer(no_args_is_help=True, help="Evaluations once, and what all found.")

Name = Annotated[str, typer.Argument(help="the schedule's name")]


@app.command("list")
def list_schedules(url: Url = "", format: Format = "table") -> None:
    """All schedules, with what they did so far."""
    with connect(url) as platform:
        found = platform.schedules()
    rows = [
        {
            "schedule": one.name,
            "cron": one.cron,
            "timezone": one.timezone,
            "state": "enabled" if one.enabled else f"disabled: {one.reason}",
            "next": _time(one.next_due) if one.enabled else "",
            "running": len(one.running),
            "queued": len(one.queued),
            "fired": one.num_fired,
            "skipped": one.num_skipped,
            "missed": one.num_missed,
            "failed": one.num_failed,
            "last_error": one.last_error,
        }
        for one in found
    ]
    emit(rows, format, table_of(rows))


@app.command()
def add(
    file: Annotated[Path, typer.Argument(help="an evaluation spec in YAML or JSON")],
    name: Annotated[str, typer.Option(help="of the schedule")],
    cron: Annotated[str, typer.Option(help="five fields, such as '0 */6 * * *'")],
    timezone: Annotated[str, typer.Option(help="UTC, or such as Europe/Berlin")] = "UTC",
    overlap: Annotated[
        str, typer.Option(help="while the one before runs: skip, queue or allow")
    ] = "skip",
    missed: Annotated[str, typer.Option(help="run_once or record")] = "run_once",
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    url: Url = "",
    format: Format = "table",
) -> None:
    """Show when it would fire, then make it."""
    spec = read_yaml(file)
    given = {"name": name, "cron": cron, "timezone": timezone, "overlap": overlap, "missed": missed}
    with connect(url) as platform:
        schedule = platform.check_schedule(spec, **given)
        if not yes:
            rows = [{"firing": at} for at in firing_table(schedule)]
            console.print(table_of(rows, title=f"{name}: {schedule.cron}, {schedule.timezone}"))
            typer.confirm("Make this schedule?", abort=True)
        done = platform.schedule(
            spec, name=name, cron=cron, timezone=timezone, overlap=overlap, missed=missed
        )
    emit(asdict(done), format, table_of([{"firing": at} for at in done.next], title=done.name))


@app.command()
def pause(name: Name, url: Url = "", format: Format = "table") -> None:
    """Fire no more until it is resumed; what runs ends."""
    _change(name, "pause", url, format)


@app.command()
def resume(name: Name, url: Url = "", format: Format = "table") -> None:
    """Fire again from the next time on; the pause is not made up."""
    _change(name, "resume", url, format)


@app.command("run-now")
def run_now(name: Name, url: Url = "", format: Format = "table") -> None:
    """Evaluate at once, beside the schedule."""
    _change(name, "run-now", url, format)


@app.command()
def remove(name: Name, url: Url = "", format: Format = "table") -> None:
    """End a schedule; the records of its evaluations stay."""
    _change(name, "remove", url, format)


def _change(name: str, what: str, url: str, format: str) -> None:
    with connect(url) as platform:
        row = platform.change_schedule(name, what)
    emit(row, format, table_of([row]))


@evaluations.command("run")
def run_once(
    file: Annotated[Path, typer.Argument(help="an evaluation spec in YAML or JSON")],
    watch: Annotated[bool, typer.Option("--watch", help="wait for its result")] = False,
    url: Url = "",
    format: Format = "table",
) -> None:
    """Evaluate a policy once, now."""
    with connect(url) as platform:
        begun = platform.evaluate(read_yaml(file))
        row: dict[str, Any] = {
            "evaluation": begun.evaluation_id,
            "policy_version": begun.policy_version,
            "episodes": begun.num_episodes,
        }
        if watch:
            record = begun.result()
            row |= {
                "success_rate": round(record.success_rate, 4),
                "interval": f"{record.interval_low:.3f} to {record.interval_high:.3f}",
            }
    emit(row, format, table_of([row]))


@evaluations.command("list")
def list_evaluations(
    policy: Annotated[str, typer.Argument(help="the policy's name")],
    url: Url = "",
    format: Format = "table",
) -> None:
    """Finished evaluations of a policy, oldest first, and how the latest changed."""
    with connect(url) as platform:
        points = platform.evaluations(policy)
    rows = [_row(point) for point in points]
    emit(rows, format, table_of(rows))
    change = latest_change(points)
    if change is not None and format != "json":
        verdict = "regression" if change.is_regression else "no regression"
        console.print(
            f"{verdict}: {change.change:+.3f} [{change.low:+.3f}, {change.high:+.3f}] since "
            f"{change.before.evaluation_id}"
        )


@evaluations.command()
def show(
    evaluation: Annotated[str, typer.Argument(help="an evaluation's id")],
    html: Annotated[
        Path | None, typer.Option("--html", help="write a page with curve and films")
    ] = None,
    url: Url = "",
    format: Format = "table",
) -> None:
    """One evaluation with its episodes."""
    with connect(url) as platform:
        record = platform.evaluation(evaluation)
        if html is not None:
            policy = record.policy_key.partition("/")[2]
            films = {one.index: platform.film(one.video) for one in record.episodes if one.video}
            html.write_text(render(record, platform.evaluations(policy), films), encoding="utf-8")
    rows = [
        {"episode": e.index, "environment": e.env_id, "seed": e.seed, "success": e.success,
         "end": e.end, "return": round(e.total_reward, 4), "steps": e.num_steps}
        for e in record.episodes
    ]  # fmt: skip
    title = (
        f"{evaluation}: {record.success_rate:.3f} [{record.interval_low:.3f}, "
        f"{record.interval_high:.3f}], {record.policy_key} version {record.policy_version}"
    )
    emit(json.loads(record.to_json()), format, table_of(rows, title=title))


@evaluations.command("compare")
def compare_two(
    before: Annotated[str, typer.Argument(help="an evaluation's id")],
    now: Annotated[str, typer.Argument(help="another one's")],
    url: Url = "",
    format: Format = "table",
) -> None:
    """The difference of two success rates, with its 95 % interval."""
    with connect(url) as platform:
        records = [platform.evaluation(one) for one in (before, now)]
    if records[0].suite != records[1].suite:
        raise SpecError(
            f"{records[0].suite} and {records[1].suite} are different suites", problems=[]
        )
    change = compare(*(Point.of(record) for record in records))
    row = {
        "before": change.before.success_rate,
        "now": change.now.success_rate,
        "change": round(change.change, 4),
        "low": round(change.low, 4),
        "high": round(change.high, 4),
        "regression": change.is_regression,
    }
    emit(row, format, table_of([row]))


def _row(point: Point) -> dict[str, Any]:
    return {
        "evaluation": point.evaluation_id,
        "suite": point.suite,
        "policy_version": point.policy_version,
        "success_rate": round(point.success_rate, 4),
        "interval": f"{point.interval_low:.3f} to {point.interval_high:.3f}",
        "episodes": point.num_episodes,
        "finished": _time(point.finished),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
