"""`vla workers` and `vla maintenance`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from vla_platform.cli.output import Format, Var, console, emit, table_of
from vla_platform.cli.tenants import Operator, operator
from vla_platform.control import maintenance
from vla_platform.errors import NotFoundError
from vla_platform.operators.workers import Workers

app = typer.Typer(no_args_is_help=True, help="See, drain and restart workers.")
maintain = typer.Typer(no_args_is_help=True, help="Take nothing new, and tell tenants why.")

Name = Annotated[str, typer.Argument(help="such as gpu, or gpu@host")]


@contextmanager
def _workers(var: Path) -> Iterator[tuple[Operator, Workers]]:
    with operator(var) as one:
        found = Workers(one.info.redis_url, one.ledger.client)
        try:
            yield one, found
        finally:
            found.close()


@app.command("list")
def list_workers(var: Var = Path("var"), format: Format = "table") -> None:
    """Who is there and what each does."""
    with _workers(var) as (_, found):
        rows = [
            {
                "worker": one.name,
                "state": one.state,
                "pid": one.pid,
                "pool": one.pool,
                "queues": ", ".join(one.queues),
                "active": ", ".join(one.active),
                "done": one.done,
            }
            for one in found.rows()
        ]
    emit(rows, format, table_of(rows))


@app.command()
def drain(name: Name, var: Var = Path("var"), format: Format = "table") -> None:
    """Let a worker finish what it has and take no more."""
    with _workers(var) as (_, found):
        row = {"worker": name, "left": ", ".join(found.drain(name))}
    emit(row, format, table_of([row]))


@app.command()
def undrain(name: Name, var: Var = Path("var"), format: Format = "table") -> None:
    """Let a drained worker take tasks again."""
    with _workers(var) as (_, found):
        row = {"worker": name, "takes": ", ".join(found.undrain(name))}
    emit(row, format, table_of([row]))


@app.command()
def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="roles of this machine; default: all workers")
    ] = None,
    wait_s: Annotated[float, typer.Option(help="for the end of its tasks", min=0)] = 60.0,
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """Drain and restart workers one after the other; no work is lost."""
    from vla_platform.stack.operate import restart_role
    from vla_platform.stack.roles import SERVERS

    rows = []
    with _workers(var) as (one, found):
        roles = names or [role for role in one.info.roles if role not in SERVERS]
        for role in roles:
            console.print(f"  {role}: restarting")
            idle = _drained(found, role, wait_s)
            restart_role(var, role)
            found.forget(role)
            rows.append({"role": role, "was_idle": idle, "state": "ready"})
    emit(rows, format, table_of(rows))


def _drained(found: Workers, role: str, wait_s: float) -> bool | None:
    """Whether it ended its tasks in time; None: it is no Celery worker, or does not answer."""
    try:
        found.drain(role)
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            if found.is_idle(role):
                return True
            time.sleep(0.2)
    except NotFoundError:
        return None
    return False


@maintain.command("on")
def maintenance_on(
    reason: Annotated[str, typer.Argument(help="what tenants read")], var: Var = Path("var")
) -> None:
    """Refuse new submissions with this reason; what runs goes on."""
    with operator(var) as one:
        maintenance.begin(one.ledger.client, reason)


@maintain.command("off")
def maintenance_off(var: Var = Path("var")) -> None:
    """Take submissions again."""
    with operator(var) as one:
        maintenance.end(one.ledger.client)
