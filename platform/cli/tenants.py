"""`vla tenants`: the operator's side of a local stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import redis
import typer

from vla_platform.cli.output import Format, Var, emit, table_of
from vla_platform.control import tenant_records, tenants, usage
from vla_platform.control.ledger import Ledger
from vla_platform.control.services import payload_clients
from vla_platform.errors import ConfigurationError
from vla_platform.settings import urls_of
from vla_platform.stack.info import StackInfo, load
from vla_storage.checkpoints import CheckpointStore
from vla_storage.objects import S3Admin, S3ObjectStore
from vla_storage.payloads import DEFAULT_QUOTA_BYTES

app = typer.Typer(no_args_is_help=True, help="Add, list and remove tenants.")


@dataclass(frozen=True, kw_only=True)
class Operator:
    info: StackInfo
    ledger: Ledger
    payload_clients: tuple[redis.Redis, ...]
    objects: S3ObjectStore
    iam: S3Admin

    @property
    def signing_key(self) -> bytes:
        return self.info.signing_key_file.read_bytes().strip()

    def checkpoints(self, tenant: str) -> CheckpointStore:
        """One tenant's, verified with the platform's key."""
        return CheckpointStore(objects=self.objects, tenant_id=tenant, signing_key=self.signing_key)

    @property
    def _servers(self) -> tenants.TenantServers:
        return tenants.TenantServers(
            client=self.ledger.client,
            objects=self.objects,
            iam=self.iam,
            redis_url=self.info.redis_url,
            s3_endpoint=self.info.s3.endpoint,
            bucket=self.info.s3.bucket,
            payload_urls=urls_of(self.info.payload_url),
            payload_clients=self.payload_clients,
        )

    def add(self, name: str, *, payload_quota_bytes: int = DEFAULT_QUOTA_BYTES) -> str:
        return tenants.add_tenant(self._servers, name, payload_quota_bytes=payload_quota_bytes)

    def rotate(self, name: str) -> str:
        return tenants.rotate_tenant(self._servers, name)

    def remove(self, name: str) -> None:
        tenants.remove_tenant(self._servers, name)


@contextmanager
def operator(var: Path) -> Iterator[Operator]:
    """The operator's connections to the stack in `var`."""
    info = load(var.resolve())
    if info is None:
        raise ConfigurationError(f"no stack in {var}; start one with `vla up --var {var}`")
    one = Operator(
        info=info,
        ledger=Ledger.connect(info.redis_url),
        payload_clients=payload_clients(urls_of(info.payload_url)),
        objects=info.s3.objects(),
        iam=info.s3.admin(),
    )
    try:
        yield one
    finally:
        one.ledger.close()
        for client in one.payload_clients:
            client.close()
        one.objects.close()
        one.iam.close()


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and '-'")],
    var: Var = Path("var"),
    payload_quota_mb: Annotated[
        int, typer.Option(min=1, help="samples it may hold in the payload store")
    ] = DEFAULT_QUOTA_BYTES >> 20,
    format: Format = "table",
) -> None:
    """Create a tenant; prints its URL once. Give it to the tenant as VLA_URL."""
    with operator(var) as one:
        url = one.add(name, payload_quota_bytes=payload_quota_mb << 20)
    if format == "json":
        emit({"tenant": name, "url": url}, format, table_of([]))
    else:
        typer.echo(url)


@app.command("list")
def list_tenants(var: Var = Path("var"), format: Format = "table") -> None:
    """All tenants."""
    with operator(var) as one:
        rows = [{"tenant": tenant.tenant_id} for tenant in tenant_records.list_tenants(one.objects)]
    emit(rows, format, table_of(rows))


@app.command()
def weight(
    name: Annotated[str, typer.Argument(help="the tenant's name")],
    share: Annotated[
        float, typer.Argument(help="beside the others' shares, which are 1", min=0.01)
    ],
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """Give a tenant a larger or smaller share of the workers while others wait."""
    with operator(var) as one:
        one.ledger.set_weight(name, share)
    row = {"tenant": name, "weight": share}
    emit(row, format, table_of([row]))


@app.command()
def limits(
    name: Annotated[str, typer.Argument(help="the tenant's name")],
    monthly_worker_s: Annotated[
        float | None, typer.Option(help="seconds of workers a month; 0: no limit", min=0)
    ] = None,
    storage_gb: Annotated[
        float | None, typer.Option(help="in the object store; 0: no limit", min=0)
    ] = None,
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """Show or set what a tenant may use; submissions beyond it are refused with the reason."""
    changes: dict[str, float | int | None] = {}
    if monthly_worker_s is not None:
        changes["monthly_worker_s"] = monthly_worker_s or None
    if storage_gb is not None:
        changes["storage_quota_bytes"] = int(storage_gb * (1 << 30)) or None
    with operator(var) as one:
        tenant = tenants.set_limits(one.objects, name, **changes)
        (used,) = usage.month_so_far(one.ledger.client, [name])
        stored = usage.stored_bytes(one.objects, name)
    row = {
        "tenant": name,
        "monthly_worker_s": tenant.monthly_worker_s,
        "used_worker_s": round(used["worker_s"] + used["backbone_s"], 3),
        "storage_quota_bytes": tenant.storage_quota_bytes,
        "stored_bytes": stored,
    }
    emit(row, format, table_of([row]))


@app.command()
def rotate(
    name: Annotated[str, typer.Argument(help="the tenant's name")],
    var: Var = Path("var"),
    format: Format = "table",
) -> None:
    """New password and keys; the old ones end at once. Prints the new URL once."""
    with operator(var) as one:
        url = one.rotate(name)
    if format == "json":
        emit({"tenant": name, "url": url}, format, table_of([]))
    else:
        typer.echo(url)


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
