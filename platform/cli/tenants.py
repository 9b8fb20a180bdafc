"""`vla tenants`: the operator's side of a local stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vla_platform.cli.output import Format, emit, table_of
from vla_platform.control import tenants
from vla_platform.control.ledger import Ledger
from vla_platform.errors import ConfigurationError
from vla_platform.stack.info import StackInfo, load
from vla_storage.objects import S3Admin, S3ObjectStore

app = typer.Typer(no_args_is_help=True, help="Add, list and remove tenants.")

Var = Annotated[Path, typer.Option("--var", help="folder of the stack's state", envvar="VLA_VAR")]


@dataclass(frozen=True, kw_only=True)
class Operator:
    info: StackInfo
    ledger: Ledger
    objects: S3ObjectStore
    iam: S3Admin

    def add(self, name: str) -> str:
        return tenants.add_tenant(
            name,
            client=self.ledger.client,
            objects=self.objects,
            iam=self.iam,
            redis_url=self.info.redis_url,
            s3_endpoint=self.info.s3.endpoint,
            bucket=self.info.s3.bucket,
            payload_url=self.info.payload_url,
        )

    def remove(self, name: str) -> None:
        tenants.remove_tenant(
            name,
            client=self.ledger.client,
            objects=self.objects,
            iam=self.iam,
            payload_url=self.info.payload_url,
        )


@contextmanager
def operator(var: Path) -> Iterator[Operator]:
    """The operator's connections to the stack in `var`."""
    info = load(var.resolve())
    if info is None:
        raise ConfigurationError(f"no stack in {var}; start one with `vla up --var {var}`")
    s3 = info.s3
    one = Operator(
        info=info,
        ledger=Ledger.connect(info.redis_url),
        objects=S3ObjectStore(
            s3.bucket, endpoint=s3.endpoint, access_key=s3.access_key, secret_key=s3.secret_key
        ),
        iam=S3Admin(
            s3.bucket, endpoint=s3.endpoint, access_key=s3.access_key, secret_key=s3.secret_key
        ),
    )
    try:
        yield one
    finally:
        one.ledger.close()
        one.objects.close()
        one.iam.close()


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and '-'")],
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """Create a tenant; prints its URL once. Give it to the tenant as VLA_URL."""
    with operator(var) as one:
        url = one.add(name)
    if format == "json":
        emit({"tenant": name, "url": url}, format, table_of([]))
    else:
        typer.echo(url)


@app.command("list")
def list_tenants(var: Var = Path("var"), format: Format = "table") -> None:
    """All tenants."""
    with operator(var) as one:
        rows = [{"tenant": tenant.tenant_id} for tenant in tenants.list_tenants(one.objects)]
    emit(rows, format, table_of(rows))


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="the tenant's name")],
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """Revoke a tenant's access at once; its objects stay."""
    with operator(var) as one:
        one.remove(name)
    row = {"tenant": name, "state": "access revoked"}
    emit(row, format, table_of([row]))
