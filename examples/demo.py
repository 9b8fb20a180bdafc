"""Four tenants on one resident backbone: `make demo`. Two fine-tune, two learn by reward.

`g1-lab` trains on a recording of a Unitree G1 where it is present (`--g1 FOLDER`), otherwise on a
second set of our own; `reach-lab` on demonstrations of the built-in tabletop task. `ppo-lab` and
`grpo-lab` fine-tune briefly and then improve by reinforcement learning (see demo_rl.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import demo_rl
import learning
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from vla_platform.cli.tenants import operator
from vla_platform.client import Platform, Run
from vla_platform.client.report import ReportPaths, RunReport, write_report
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.specs import parse_spec
from vla_platform.stack import operate
from vla_platform.stack.roles import ROLES, environment_roles
from vla_storage.checkpoints import CheckpointStore

console = Console(highlight=False)
EPISODES = 200
TIMEOUT_S = 900.0


def datasets(folder: Path, g1: Path | None) -> tuple[list[Path], str]:
    """Make what we ship ourselves; returns the roots and the first tenant's dataset."""
    console.print("making demonstrations of the tabletop task")
    make_demonstrations(folder / "reach", env=Tabletop(), episodes=EPISODES, seed=1)
    if g1 is not None and g1.is_dir():
        return [folder, g1.resolve().parent], g1.name
    console.print(f"no G1 recording at {g1}: g1-lab trains on a second set of our own")
    second = Tabletop(cameras=("top",), gripper=False, sentences=("go to the {color} block",))
    make_demonstrations(folder / "go-to", env=second, episodes=EPISODES, seed=2)
    return [folder], "go-to"


def specs(first: str, steps: int) -> dict[str, dict[str, Any]]:
    shared = {"kind": "sft", "steps": steps, "batch_size": 8, "evaluate_every": max(steps // 4, 1)}
    schedule = {"kind": "cosine", "warmup_steps": min(20, steps)}
    return {
        "g1-lab": {
            **shared,
            "policy": "go-to" if first == "go-to" else "pick-bottle",
            # Clamped quantiles: joints that hardly move in training do not blow up the rest.
            "dataset": {"path": first, "normalization": "q99"},
            "optimizer": {"lr": 5e-4, "weight_decay": 0.01, "schedule": schedule},
        },
        "reach-lab": {
            **shared,
            "policy": "reach",
            "action_module": {"kind": "flow_matching"},
            "dataset": {"path": "reach"},
            "optimizer": {"lr": 1e-3, "schedule": schedule},
        },
    }


def follow(run: Run, progress: Progress, task: TaskID) -> None:
    success = 0.0
    for event in run.events():
        if event["kind"] == "rollout":
            success = event["success_rate"] or success
        elif event["kind"] == "step":
            shown = f"{run.id} training loss {event['loss']:.4f}"
            progress.update(task, completed=event["step"], description=shown)
        elif event["kind"] == "update":
            shown = f"{run.id} success, exploring {success:.2f}"
            progress.update(task, completed=event["step"], description=shown)


def tenant_report(
    run: Run, platform: Platform, store: CheckpointStore, policy: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    status, events = run.status(), run.metrics()
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    heldout = [event["heldout_loss"] for event in events if event["kind"] == "heldout"]
    manifest = store.verify(status.checkpoint or "")
    assert policy == manifest.policy
    return {
        "run": run.id,
        "steps": status.step,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "heldout_first": heldout[0],
        "heldout_last": heldout[-1],
        "policy_version": manifest.policy_version,
        "checkpoint": status.checkpoint,
        "manifest_ok": True,  # `verify` raises otherwise: signature, sizes and digests
    }, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--var", type=Path, default=Path("var"), help="where results go")
    parser.add_argument(
        "--g1",
        type=Path,
        default=Path("../shared/data/g1_pick_bottle"),
        help="a recording of the Unitree G1 in LeRobot format; default: %(default)s",
    )
    parser.add_argument("--steps", type=int, default=200, help="per fine-tuning tenant")
    parser.add_argument("--no-rl", action="store_true", help="only the fine-tuning tenants")
    arguments = parser.parse_args()
    out, stack = arguments.var / "demo", arguments.var / "demo-stack"
    # A stack of its own: whatever runs in --var is left alone.
    operate.down(stack)
    for folder in (out, stack):
        shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True)
    roots, first = datasets(stack / "datasets", arguments.g1)
    learners = () if arguments.no_rl else tuple(demo_rl.LESSONS)
    roles = ROLES
    if learners:
        demo_rl.make_dataset(stack / "datasets")
        roles += environment_roles(1, {"tabletop": 1.0}, stack)
    try:
        console.print("starting the stack")
        operate.up(
            stack,
            dataset_roots=":".join(str(root.resolve()) for root in roots),
            timeout_s=240,
            environment={**os.environ, **demo_rl.HOST_LIMITS},
            roles=roles,
            on_progress=lambda role, state: console.print(f"  {role}: {state}"),
        )
        run_demo(stack, out, specs(first, arguments.steps), arguments.steps, learners)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)
    finally:
        console.print("stopping the stack")
        operate.down(stack)


def run_demo(
    var: Path,
    out: Path,
    wanted: dict[str, dict[str, Any]],
    steps: int,
    learners: tuple[str, ...],
) -> None:
    started = time.monotonic()
    with operator(var) as admin:
        platforms = {tenant: Platform(admin.add(tenant)) for tenant in (*wanted, *learners)}
        runs = {tenant: platforms[tenant].submit(spec) for tenant, spec in wanted.items()}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console) as progress:

            def begun(run: Run) -> None:
                total = int(run.spec().get("updates") or run.spec()["steps"])
                task = progress.add_task(run.id, total=total)
                # A daemon: an interrupt need not wait for it.
                threading.Thread(target=follow, args=(run, progress, task), daemon=True).start()

            for run in runs.values():
                begun(run)
            with ThreadPoolExecutor() as pool:
                lessons = {
                    tenant: pool.submit(
                        learning.learn, admin, platforms[tenant], demo_rl.LESSONS[tenant], begun
                    )
                    for tenant in learners
                }
                for run in runs.values():
                    run.result(timeout_s=TIMEOUT_S)
                learned = {tenant: one.result() for tenant, one in lessons.items()}
        report: dict[str, Any] = {"tenants": {}}
        reports, all_events = [], []
        key = admin.info.signing_key_file.read_bytes().strip()
        for (tenant, run), spec in zip(runs.items(), wanted.values(), strict=True):
            store = CheckpointStore(objects=admin.objects, tenant_id=tenant, signing_key=key)
            summary, events = tenant_report(run, platforms[tenant], store, spec["policy"])
            report["tenants"][tenant] = summary
            all_events += events
            checkpoints = [
                {"checkpoint": one.checkpoint_id, "step": one.step, "size_bytes": one.size_bytes}
                for one in platforms[tenant].checkpoints(spec["policy"])
            ]
            reports.append(
                RunReport(
                    tenant=tenant,
                    policy=spec["policy"],
                    workload_id=run.id,
                    spec=parse_spec(spec).model_dump(mode="json"),
                    events=events,
                    checkpoints=checkpoints,
                    summary=summary,
                )
            )
        for tenant, one in learned.items():
            all_events += one.tuning.metrics()
            reports.append(learning.report_of(admin, platforms[tenant], one))
            report["tenants"][tenant] = dict(reports[-1].summary)
        report |= totals(all_events) | {"seconds": round(time.monotonic() - started, 1)}
        for platform in platforms.values():
            platform.close()
    paths = write_report(out, reports)
    for one_report in reports:
        for number, video in enumerate(one_report.videos):
            name = f"{one_report.tenant}-{number}-{video.caption.split(',')[0]}.mp4"
            (out / name).write_bytes(video.mp4)
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report, paths, out)


def totals(events: list[dict[str, Any]]) -> dict[str, int]:
    """Of the run: a group's forwards stand in the event of each of its members."""
    steps = [event for event in events if event["kind"] == "step"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for event in steps:
        groups.setdefault(event["group"], []).append(event)
    # Rows of several tenants met in one forward where more members needed one than took place.
    shared = sum(
        0 < group[0]["backbone_forwards"] < sum(event["cache_misses"] > 0 for event in group)
        for group in groups.values()
    )
    return {
        "backbone_forwards": sum(group[0]["backbone_forwards"] for group in groups.values()),
        "samples": sum(event["samples"] for event in steps),
        "grouped_forwards": shared,
    }


def show(report: dict[str, Any], paths: ReportPaths, out: Path) -> None:
    tuned = Table(title="fine-tuning, on one backbone")
    for name in ("tenant", "steps", "loss", "held-out loss", "version", "checkpoint", "manifest"):
        tuned.add_column(name, overflow="fold")
    learned = Table(title="reinforcement learning, on the same backbone")
    for name in ("tenant", "updates", "episodes", "success, evaluated", "version", "seconds"):
        learned.add_column(name, overflow="fold")
    for tenant, row in report["tenants"].items():
        if "updates" in row:
            learned.add_row(
                f"{tenant} ({row['algorithm']})",
                str(row["updates"]),
                str(row["episodes"]),
                f"{row['success_first']:.2f} → {row['success_last']:.2f}",
                str(row["policy_version"]),
                f"{row['seconds']:.0f}",
            )
            continue
        tuned.add_row(
            tenant,
            str(row["steps"]),
            f"{row['loss_first']:.4f} → {row['loss_last']:.4f}",
            f"{row['heldout_first']:.4f} → {row['heldout_last']:.4f}",
            str(row["policy_version"]),
            row["checkpoint"],
            "ok" if row["manifest_ok"] else "BAD",
        )
    console.print(tuned)
    if learned.row_count:
        console.print(learned)
    console.print(
        f"fine-tuning: {report['samples']} samples, {report['backbone_forwards']} backbone "
        f"forwards, {report['grouped_forwards']} shared by tenants; {report['seconds']} s in all"
    )
    console.print(f"report: {paths.html}, numbers: {out / 'report.json'}, curves:")
    for curve in [paths.overview, *paths.curves.values()]:
        console.print(f"  {curve}")


if __name__ == "__main__":
    main()
