"""What every command prints: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from vla_platform.client import Platform
from vla_platform.errors import ConfigurationError, SpecError
from vla_platform.specs import WorkloadSpec, parse_spec
from vla_platform.specs.parsing import load_yaml

console = Console(highlight=False)

Format = Annotated[Literal["table", "json"], typer.Option("--format", help="table or json")]
Var = Annotated[Path, typer.Option("--var", help="folder of the stack's state", envvar="VLA_VAR")]
Url = Annotated[
    str,
    typer.Option("--url", envvar="VLA_URL", help="your platform URL, from `vla tenants add`"),
]


def connect(url: str) -> Platform:
    if not url:
        raise ConfigurationError("no platform URL: set VLA_URL, or pass --url")
    return Platform(url)


def read_spec(file: Path) -> WorkloadSpec:
    """A spec file, validated. Raises `SpecError` also for one that cannot be read."""
    return parse_spec(read_yaml(file))


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a file. Raises `SpecError`."""
    try:
        return load_yaml(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SpecError(f"{file} is not UTF-8 text: {error}", problems=[]) from error
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}", problems=[]) from error


def emit(value: Any, format: str, table: Table) -> None:
    if format == "json":
        typer.echo(json.dumps(value, indent=2, default=str))
    else:
        console.print(table)


def table_of(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """Columns from the first row's keys; text is never read as markup."""
    table = Table(title=title)
    for at, name in enumerate(rows[0] if rows else ["nothing here yet"]):
        # Ids are there to be copied: the first column stays on one line, the others are whole.
        table.add_column(name, overflow="fold", no_wrap=at == 0)
    for row in rows:
        table.add_row(
            *["" if value is None else str(value).replace("[", r"\[") for value in row.values()]
        )
    return table


def progress_line(role: str, state: str) -> None:
    console.print(f"  {role}: {state}")
