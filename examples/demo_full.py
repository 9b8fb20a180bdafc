"""Reinforcement learning in a real simulator: `make demo-full`. One tenant, PushCube-v1.

ManiSkill simulates. Its scripted expert shows how; a short fine-tuning learns part of it, from
pixels and the task's state; PPO goes on from there by the task's own success alone. Success is
evaluated before and after on scenes that no rollout draws. Curves and films lie in var/demo-full.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import learning
from demo import follow
from learning import Learned, Lesson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vla_platform.cli.tenants import operator
from vla_platform.client import Platform, Run
from vla_platform.client.report import write_report
from vla_platform.envs.installs import install
from vla_platform.stack import operate
from vla_platform.stack.roles import ROLES, environment_roles

console = Console(highlight=False)
TENANT = "push-lab"
ENVIRONMENT = "maniskill/PushCube-v1"
DATASET = "push"
OPTIONS: dict[str, Any] = {
    # With the poses of cube and goal: the tiny backbone was pretrained on other pictures.
    "observations": "rgb+state",
    "control_mode": "pd_ee_delta_pos",
    "image_size": 128,
    "max_steps": 20,  # the expert needs ten
    "reward_mode": "sparse",  # a dense one pays for every step before success ends the episode
}
MODULE = {"kind": "oft", "chunk": 4, "initial_log_std": -1.2}
LESSON = Lesson(
    environment=ENVIRONMENT,
    options=OPTIONS,
    fine_tuning={
        "kind": "sft",
        "policy": "push-demos",
        "dataset": {"path": DATASET, "heldout_samples": 16},
        "steps": 60,  # more of them leave nothing to learn by reward
        "batch_size": 16,
        "action_module": MODULE,
        "optimizer": {"lr": 1e-3, "schedule": {"kind": "cosine", "warmup_steps": 10}},
    },
    learning={
        "policy": "push",
        "rollout": {"num_envs": 48, "horizon": 5},
        "algorithm": {"kind": "ppo", "epochs": 4, "minibatches": 4, "gamma": 0.9},
        "optimizer": {"lr": 2e-4, "schedule": {"kind": "linear", "min_lr": 4e-5}},
        "updates": 36,
    },
    episodes=128,
    num_envs=32,
    timeout_s=3600.0,
)
HOST_LIMITS = {"VLA_MAX_SESSIONS": "64", "VLA_MAX_SESSIONS_PER_TENANT": "64"}


def demonstrate(folder: Path, python: Path, episodes: int) -> None:
    """The expert's episodes, with disturbed motions, so that they show how to come back."""
    options = {name: value for name, value in OPTIONS.items() if name != "max_steps"}
    command = (str(python), "-m", "vla_platform.envs.demonstrate", ENVIRONMENT, str(folder))
    arguments = ("--episodes", str(episodes), "--seed", "3", "--noise", "0.3")
    subprocess.run(
        (*command, *arguments, "--options", json.dumps(options)),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--var", type=Path, default=Path("var"), help="where results go")
    parser.add_argument(
        "--envs", type=Path, default=Path("var"), help="where `vla env install` put the simulators"
    )
    parser.add_argument("--demonstrations", type=int, default=80, help="of the expert")
    parser.add_argument("--steps", type=int, default=LESSON.fine_tuning["steps"])
    parser.add_argument("--updates", type=int, default=LESSON.learning["updates"])
    parser.add_argument("--num-envs", type=int, default=LESSON.learning["rollout"]["num_envs"])
    parser.add_argument("--episodes", type=int, default=LESSON.episodes, help="of an evaluation")
    arguments = parser.parse_args()
    rollout = {**LESSON.learning["rollout"], "num_envs": arguments.num_envs}
    lesson = replace(
        LESSON,
        fine_tuning={**LESSON.fine_tuning, "steps": arguments.steps},
        learning={**LESSON.learning, "updates": arguments.updates, "rollout": rollout},
        episodes=arguments.episodes,
        num_envs=min(LESSON.num_envs, arguments.num_envs),
    )
    out, stack = arguments.var / "demo-full", arguments.var / "demo-full-stack"
    operate.down(stack)
    for folder in (out, stack):
        shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True)
    python = install("maniskill", arguments.envs, say=console.print)
    console.print(f"making {arguments.demonstrations} demonstrations of {ENVIRONMENT}")
    demonstrate(stack / "datasets" / DATASET, python, arguments.demonstrations)
    try:
        console.print("starting the stack")
        operate.up(
            stack,
            dataset_roots=str((stack / "datasets").resolve()),
            timeout_s=240,
            environment={**os.environ, **HOST_LIMITS},
            roles=ROLES + environment_roles(1, {"maniskill": 1.0}, arguments.envs),
            on_progress=lambda role, state: console.print(f"  {role}: {state}"),
        )
        run_demo(stack, out, lesson)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)
    finally:
        console.print("stopping the stack")
        operate.down(stack)


def run_demo(stack: Path, out: Path, lesson: Lesson) -> None:
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with operator(stack) as admin, Platform(admin.add(TENANT)) as platform:
        with Progress(*columns, console=console) as progress:

            def begun(run: Run) -> None:
                total = int(run.spec().get("updates") or run.spec()["steps"])
                task = progress.add_task(run.id, total=total)
                # A daemon: an interrupt need not wait for it.
                threading.Thread(target=follow, args=(run, progress, task), daemon=True).start()

            learned = learning.learn(admin, platform, lesson, begun)
        report = learning.report_of(admin, platform, learned)
    paths = write_report(out, [report])
    for number, video in enumerate(report.videos):
        (out / f"{number}-{video.caption.split(',')[0]}.mp4").write_bytes(video.mp4)
    seconds = round(time.monotonic() - started, 1)
    numbers = {**report.summary, "seconds_in_all": seconds}
    (out / "report.json").write_text(json.dumps(numbers, indent=2) + "\n")
    show(learned, numbers)
    console.print(f"report: {paths.html}, numbers: {out / 'report.json'}")


def show(learned: Learned, numbers: Mapping[str, Any]) -> None:
    for when, record in (("fine-tuned", learned.before), ("after PPO", learned.after)):
        console.print(
            f"{when}: success {record.success_rate:.2f} "
            f"({record.interval_low:.2f} to {record.interval_high:.2f}) "
            f"in {record.num_episodes} episodes"
        )
    console.print(
        f"{numbers['updates']} updates, {numbers['episodes']} episodes, "
        f"{numbers['seconds_in_all']} s in all"
    )


if __name__ == "__main__":
    main()
