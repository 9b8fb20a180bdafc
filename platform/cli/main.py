"""The `vla` command: run the stack, look after tenants, submit and watch runs."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from vla_platform.cli import (
    audit,
    checkpoints,
    envs,
    runs,
    schedules,
    tenants,
    trace,
    usage,
    workers,
)
from vla_platform.cli.output import (
    Format,
    Var,
    console,
    emit,
    progress_line,
    read_spec,
    table_of,
)
from vla_platform.errors import ConfigurationError, SpecError
from vla_platform.specs import json_schema
from vla_platform.stack.roles import Profile
from vla_storage.errors import CodedError, Fault

app = typer.Typer(
    no_args_is_help=True,
    help="Post-training of vision-language-action policies for many tenants on one backbone.\n\n"
    "Operators begin with `vla up`, tenants with `vla check FILE.yaml` and `vla submit`.",
    pretty_exceptions_enable=False,
)
app.add_typer(runs.app, name="runs")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(tenants.app, name="tenants")
app.add_typer(envs.app, name="env")
app.add_typer(schedules.app, name="schedules")
app.add_typer(workers.app, name="workers")
app.add_typer(workers.maintain, name="maintenance")
app.add_typer(schedules.evaluations, name="evaluations")
app.command("submit")(runs.submit)
app.command("explain")(runs.explain)
app.command("demos")(envs.demos)
app.command("audit")(audit.audit)
app.command("usage")(usage.usage)
app.command("trace")(trace.trace)

_RUN = re.compile(r"(sft|rl)-[0-9a-f]{20}")


@app.command()
def up(
    var: Var = Path("var"),
    dataset_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder whose datasets specs may name; repeatable; kept for later starts",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    profile: Annotated[
        Profile, typer.Option(help="cluster-like: a process per duty, two GPU workers")
    ] = Profile.LAPTOP,
    env_hosts: Annotated[
        int | None,
        typer.Option(
            help="environment hosts; default: one per harness, two in cluster-like",
            min=0,
            envvar="VLA_ENV_HOSTS",
        ),
    ] = None,
    env_shares: Annotated[
        str, typer.Option(help="each harness's share of the hosts", envvar="VLA_ENV_SHARES")
    ] = "tabletop=1",
    training_ranks: Annotated[
        int,
        typer.Option(
            help="processes of each GPU worker that train together, a device each",
            min=1,
            envvar="VLA_TRAINING_RANKS",
        ),
    ] = 1,
    timeout_s: Annotated[float, typer.Option(help="give up after this long")] = 180.0,
) -> None:
    """Start the platform on this machine and wait until every process is ready."""
    from vla_platform.control.environment_hosts import parse_shares
    from vla_platform.stack.operate import up as start
    from vla_platform.stack.roles import environment_roles

    shares = parse_shares(env_shares)
    if env_hosts is None:
        env_hosts = profile.hosts_per_harness * len(shares)
    roots = ":".join(str(root.resolve()) for root in dataset_root or [])
    hosts = environment_roles(env_hosts, shares, var) if env_hosts else ()
    info = start(
        var,
        roles=(*profile.roles, *hosts),
        environment={**os.environ, "VLA_TRAINING_RANKS": str(training_ranks)},
        dataset_roots=roots,
        timeout_s=timeout_s,
        on_progress=progress_line,
    )
    console.print(f"ready. Flower: {info.flower_url}, user {info.flower_user}, password:")
    console.print(f"flower_password in {var}/credentials.json. Metrics: {info.metrics_url}")
    if info.page_url:
        console.print(f"Operators' page, same user and password: {info.page_url}")
    console.print("next: vla tenants add NAME; stop with vla down")


@app.command()
def down(var: Var = Path("var")) -> None:
    """Stop the platform; nothing is left running, data stay."""
    from vla_platform.stack.operate import down as stop

    known_stack(var)
    leftovers = stop(var)
    console.print("stopped" + (f"; {leftovers} leftovers ended" if leftovers else ""))


@app.command()
def status(var: Var = Path("var"), format: Format = "table") -> None:
    """Each process: state, pid, uptime, and how often it was started again since `up`."""
    from vla_platform.stack.operate import status as look

    known_stack(var)
    rows = [
        {
            "role": one.role,
            "state": str(one.state),
            "pid": one.pid,
            "uptime_s": round(one.uptime_s),
            "restarts": one.restarts,
            "detail": one.detail,
        }
        for one in look(var)
    ]
    emit(rows, format, table_of(rows))


@app.command()
def logs(
    role: Annotated[
        str, typer.Argument(help="such as gpu, control, sft; or a run's id: its lines of all")
    ],
    var: Var = Path("var"),
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
    lines: int = 200,
) -> None:
    """The log of one process, or what all processes say of one run."""
    from vla_platform.stack.operate import logs as read
    from vla_platform.stack.operate import logs_of_run

    if _RUN.fullmatch(role):
        for line in logs_of_run(var, role, follow=follow):
            typer.echo(line)
        return
    for line in read(var, role, follow=follow, lines=lines):
        typer.echo(line)


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="a spec in YAML or JSON")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="show the spec with every default filled in")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON Schema")] = False,
) -> None:
    """Validate a spec without sending it."""
    if schema:
        emit(json_schema(), "json", Table())
        return
    if file is None:
        raise SpecError("name a FILE.yaml to check, or use --schema", problems=[])
    spec = read_spec(file)
    if print_config:
        emit(spec.model_dump(mode="json"), "json", Table())
    else:
        console.print(f"{file}: a valid {spec.kind} spec for policy {spec.policy}")


@app.command()
def recover(var: Var = Path("var"), format: Format = "table") -> None:
    """Build the ledger again from the object store. Safe at any time; nothing done is redone.

    The control worker does the same by itself when the control Redis was restarted or emptied.
    """
    from vla_platform.control.recovery import recover as rebuild

    with tenants.operator(var) as one:
        found = rebuild(one)
    row = {name: list(runs) for name, runs in asdict(found).items()}
    emit(row, format, table_of([{"what": name, "runs": runs} for name, runs in row.items()]))


def known_stack(var: Path) -> None:
    """Refuse a folder in which no stack was ever started: most likely it is the wrong one."""
    from vla_platform.stack.info import load

    if load(var.resolve()) is None:
        raise ConfigurationError(f"no stack in {var.resolve()}; name its folder with --var")


def main() -> None:
    """Run the command; an expected error becomes one line; exit status 2 user, 1 platform."""
    try:
        app()
    except CodedError as error:
        retry = " Retrying may help." if error.retryable else ""
        print(f"vla: {error.message}{retry} [{error.code}]", file=sys.stderr)
        sys.exit(2 if error.fault is Fault.USER else 1)
    except OSError as error:
        print(f"vla: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
