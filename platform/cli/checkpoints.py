"""`vla checkpoints`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_platform.cli.output import Format, Url, Var, connect, emit, table_of
from vla_platform.cli.tenants import operator
from vla_storage.canary import Match
from vla_storage.checkpoints import CheckpointStore
from vla_storage.marks import Mark
from vla_storage.retention import RetentionPlan

NOT_FINITE = "not_finite"

app = typer.Typer(no_args_is_help=True, help="List, verify, keep, remove and download checkpoints.")

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
def verify(
    checkpoint: CheckpointId,
    canary: Annotated[
        bool, typer.Option(help="also load it and ask the policy again what it was asked at save")
    ] = True,
    base_model: Annotated[
        str, typer.Option(help="a folder or hub id of the base model; default: its name")
    ] = "",
    tenant: Annotated[str, typer.Option(help="operators: whose it is; checks signatures")] = "",
    var: Var = Path("var"),
    url: Url = "",
    format: Format = "table",
) -> None:
    """Compare every byte with its digest, then ask the policy again what it was asked at save.

    Exit status 4: the answer is another one. Needs the `worker` extra for the second part.
    """
    with _store(url, tenant, var) as store:
        manifest = store.verify(checkpoint)
        told = _ask_again(store, checkpoint, base_model) if canary else None
    rows = [
        {"object": one.name, "size_bytes": one.size, "sha256": one.sha256, "verified": True}
        for one in manifest.objects
    ]
    signature = "verified" if store.signing_key is not None else "not checked: the platform's key"
    if format == "json":
        emit({"objects": rows, "signature": signature, "canary": told}, format, table_of([]))
    else:
        emit(rows, format, table_of(rows, title=checkpoint))
        typer.echo(f"signature: {signature}")
        if told is not None:
            typer.echo(f"canary: {told['match']}: {told['told']}")
    if told is not None and told["match"] in (str(Match.DIFFERENT), NOT_FINITE):
        raise typer.Exit(4)


@contextmanager
def _store(url: str, tenant: str, var: Path) -> Iterator[CheckpointStore]:
    """A tenant's own by its URL, or with the platform's key as an operator."""
    if tenant:
        with operator(var) as one:
            yield one.checkpoints(tenant)
        return
    with connect(url) as platform:
        yield platform.checkpoint_store


def _ask_again(store: CheckpointStore, checkpoint: str, base_model: str) -> dict[str, Any]:
    try:
        from vla_platform.gpu_workers import canary, training
    except ImportError as error:
        return {"match": "not_run", "told": f"this environment has no worker extra ({error})"}
    training.use_one_thread()
    found = canary.reproduce(store, checkpoint, base_model=base_model)
    if found.answer is None or found.comparison is None:
        return {"match": NOT_FINITE, "told": "the policy's answer has numbers that are not finite"}
    recorded = found.manifest.canary
    return {
        "match": str(found.comparison.match),
        "told": found.comparison.told,
        "tolerance": found.comparison.tolerance,
        "largest_difference": found.comparison.largest,
        "recorded": None if recorded is None else asdict(recorded),
        "now": asdict(found.answer),
    }


@app.command()
def download(
    checkpoint: CheckpointId,
    folder: Annotated[Path, typer.Argument(help="where to put it")] = Path("."),
    tar: Annotated[bool, typer.Option("--tar", help="one tar file instead of a folder")] = False,
    url: Url = "",
    format: Format = "table",
) -> None:
    """Fetch a checkpoint, verified on the way."""
    with connect(url) as platform:
        if tar:
            name = f"{checkpoint.replace('/', '-')}.tar"
            row = {
                "checkpoint": checkpoint,
                "file": str(platform.export(checkpoint, folder / name)),
            }
        else:
            row = {"checkpoint": checkpoint, "folder": str(platform.download(checkpoint, folder))}
    emit(row, format, table_of([row]))


@app.command()
def links(
    checkpoint: CheckpointId,
    expires_s: Annotated[int, typer.Option(min=1, max=7 * 86400)] = 3600,
    url: Url = "",
    format: Format = "table",
) -> None:
    """Links with which anybody can read the objects for a while."""
    with connect(url) as platform:
        found = platform.links(checkpoint, expires_s=expires_s)
    rows = [{"object": name, "link": link} for name, link in found.items()]
    emit(rows, format, table_of(rows))


@app.command()
def pin(checkpoint: CheckpointId, url: Url = "", format: Format = "table") -> None:
    """Keep a checkpoint whatever the retention rules say."""
    with connect(url) as platform:
        _emit_mark(checkpoint, platform.pin(checkpoint), format)


@app.command()
def unpin(checkpoint: CheckpointId, url: Url = "", format: Format = "table") -> None:
    """Leave a checkpoint to the retention rules again."""
    with connect(url) as platform:
        _emit_mark(checkpoint, platform.pin(checkpoint, pinned=False), format)


@app.command("set-ttl")
def set_ttl(
    checkpoint: CheckpointId,
    hours: Annotated[float, typer.Argument(help="from now; negative: no time to live", min=-1)],
    url: Url = "",
    format: Format = "table",
) -> None:
    """Let retention remove a checkpoint after a while."""
    with connect(url) as platform:
        mark = platform.set_ttl(checkpoint, None if hours < 0 else 3600 * hours)
    _emit_mark(checkpoint, mark, format)


@app.command()
def name(
    policy: Annotated[str, typer.Argument(help="the policy's name")],
    alias: Annotated[str, typer.Argument(help="such as best")],
    checkpoint: Annotated[str, typer.Argument(help="policy/run/step; empty: none")] = "",
    url: Url = "",
) -> None:
    """Give a checkpoint a name, or take the name away."""
    with connect(url) as platform:
        platform.name_checkpoint(alias, checkpoint or None, policy=policy)


@app.command()
def prune(
    policy: Annotated[str, typer.Argument(help="the policy's name")],
    keep_last: Annotated[int, typer.Option(min=1, help="newest valid ones of each run")] = 3,
    keep_best: Annotated[int, typer.Option(min=0, help="highest scores of each run")] = 0,
    milestone_every: Annotated[int, typer.Option(min=0, help="steps; 0: none")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it, only show")] = False,
    url: Url = "",
    format: Format = "table",
) -> None:
    """Show what the retention rules would remove, and with --yes remove it."""
    with connect(url) as platform:
        plan = platform.prune(
            policy, keep_last=keep_last, keep_best=keep_best, milestone_every=milestone_every,
            dry_run=not yes,
        )  # fmt: skip
    _emit_plans([plan], format, removed=yes)


@app.command()
def delete(
    checkpoints: Annotated[list[str], typer.Argument(help="policy/run/step, several")],
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it, only show")] = False,
    url: Url = "",
    format: Format = "table",
) -> None:
    """Remove checkpoints by id; marked ones and the last valid one of a run stay."""
    with connect(url) as platform:
        plans = platform.delete_checkpoints(checkpoints, dry_run=not yes)
    _emit_plans(plans, format, removed=yes)


def _emit_mark(checkpoint: str, mark: Mark, format: str) -> None:
    row = {"checkpoint": checkpoint, **asdict(mark)}
    emit(row, format, table_of([row]))


def _emit_plans(plans: list[RetentionPlan], format: str, *, removed: bool) -> None:
    rows = [
        {"checkpoint": one, "what": what, "reason": str(reason)}
        for plan in plans
        for what, found in (("stays", plan.stay), ("removed" if removed else "would go", plan.go))
        for one, reason in found
    ]
    emit(rows, format, table_of(rows))
