"""`vla checkpoints`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_platform.cli.output import Format, Url, connect, emit, table_of

app = typer.Typer(no_args_is_help=True, help="List, verify and download checkpoints.")

CheckpointId = Annotated[str, typer.Argument(help="policy/run/step, from `vla checkpoints list`")]


@app.command("list")
def list_checkpoints(
    policy: Annotated[str, typer.Argument(help="the policy's name")],
    url: Url = "",
    format: Format = "table",
) -> None:
    """Visible checkpoints of a policy, oldest first."""
    with connect(url) as platform:
        rows = [
            {
                "checkpoint": one.checkpoint_id,
                "step": one.step,
                "policy_version": one.policy_version,
                "size_bytes": one.size_bytes,
                "created": one.created,
            }
            for one in platform.checkpoints(policy)
        ]
    emit(rows, format, table_of(rows))


@app.command()
def verify(checkpoint: CheckpointId, url: Url = "", format: Format = "table") -> None:
    """Read every object and compare sizes and digests."""
    with connect(url) as platform:
        manifest = platform.verify(checkpoint)
    rows = [
        {"object": one.name, "size_bytes": one.size, "sha256": one.sha256, "verified": True}
        for one in manifest.objects
    ]
    emit(rows, format, table_of(rows, title=checkpoint))


@app.command()
def download(
    checkpoint: CheckpointId,
    folder: Annotated[Path, typer.Argument(help="where to put it")] = Path("."),
    url: Url = "",
    format: Format = "table",
) -> None:
    """Fetch a verified checkpoint."""
    with connect(url) as platform:
        row = {"checkpoint": checkpoint, "folder": str(platform.download(checkpoint, folder))}
    emit(row, format, table_of([row]))
