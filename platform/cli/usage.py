"""`vla usage`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_platform.cli.output import Format, Var, connect, emit, table_of
from vla_platform.cli.tenants import operator
from vla_platform.control.tenant_records import list_tenants
from vla_platform.control.usage import Statement, Use, statements
from vla_platform.errors import SpecError


def usage(
    url: Annotated[
        str, typer.Option("--url", envvar="VLA_URL", help="a tenant's URL: its own use")
    ] = "",
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="operator: only this one; repeatable")
    ] = None,
    month: Annotated[str, typer.Option(help="such as 2026-11; default: this one")] = "",
    by: Annotated[str, typer.Option(help="tenant, policy, workload or day")] = "policy",
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """What was used, from the daily statements: of one tenant (--url), or of all (operator)."""
    month = month or datetime.now(UTC).strftime("%Y-%m")
    if by not in ("tenant", "policy", "workload", "day"):
        raise SpecError(f"--by {by}: use tenant, policy, workload or day", problems=[])
    if url and not tenant:
        with connect(url) as platform:
            found = platform.usage(month)
    else:
        with operator(var) as one:
            names = tenant or [known.tenant_id for known in list_tenants(one.objects)]
            found = [
                day
                for name in names
                for day in statements(one.objects, f"platform/usage/{name}/", month=month)
            ]
    rows = summed(found, by)
    emit(rows, format, table_of(rows, title=f"{month}, by {by}"))


def summed(found: list[Statement], by: str) -> list[dict[str, Any]]:
    """One row per tenant and `by`."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for day in found:
        for line in day.lines:
            key = {"tenant": "", "day": day.day}.get(by) if by in ("tenant", "day") else None
            place = (day.tenant, str(getattr(line, by)) if key is None else key)
            row = rows.setdefault(place, dict.fromkeys(Use, 0.0))
            for what, amount in line.amounts.items():
                row[what] += amount
    return [
        {"tenant": tenant, **({by: place} if place else {}),
         **{str(what): round(amount, 3) for what, amount in row.items()}}
        for (tenant, place), row in sorted(rows.items())
    ]  # fmt: skip
