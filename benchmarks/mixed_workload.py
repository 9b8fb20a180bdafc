"""The mixed workload of JoyNexus at our size: three RL tenants and one SFT tenant.

    python benchmarks/mixed_workload.py [--quick]

Shared: all four at once, on one training and inference worker and one environment host. Baseline:
the same updates on the same processes, one tenant after another. Both with the rollout's features
kept (encode once) and with rows encoded again for training. `worker_time_efficiency` is the wall
time of the baseline over that of the shared run, for the same processes are held in both; a
utilisation is busy seconds over wall time. Two PPO tenants and one GRPO tenant on the built-in
simulator. The base model is the random tiny one: what is timed does not depend on its weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_line import print_result, target

from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Platform, Run
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.metrics.events import PLATFORM_STREAM
from vla_platform.stack import operate
from vla_platform.stack.roles import ROLES, environment_roles

TENANTS = ("ppo-one", "ppo-two", "grpo", "sft")
NUM_ENVS, HORIZON = 8, 6
SIMULATOR = {"max_steps": 24, "reward": "dense"}


@dataclass
class Pass:
    """What one way of running the same updates cost."""

    wall_s: float = 0.0
    training_s: float = 0.0
    inference_s: float = 0.0
    backbone_rows: int = 0  # rows that went through the backbone, for acting or for training
    rl_samples: int = 0

    @property
    def training_utilisation(self) -> float:
        return self.training_s / self.wall_s

    @property
    def inference_utilisation(self) -> float:
        return self.inference_s / self.wall_s


@dataclass
class Bench:
    admin: Operator
    platforms: dict[str, Platform]
    updates: int
    sft_steps: int
    number: int = 0
    checkpoints: dict[str, str] = field(default_factory=dict)

    def tune(self) -> None:
        """The checkpoint that each RL tenant begins from."""
        runs = {
            name: platform.submit(self._sft("start", 4))
            for name, platform in self.platforms.items()
        }
        self.checkpoints = {name: str(run.result(300).checkpoint) for name, run in runs.items()}

    def measure(self, *, shared: bool, encode_once: bool) -> Pass:
        self.number += 1
        last = self.admin.ledger.client.xrevrange(PLATFORM_STREAM, count=1)
        begun = time.monotonic()
        runs: list[Run] = []
        for name in TENANTS:
            run = self.platforms[name].submit(self._spec(name, encode_once=encode_once))
            runs.append(run)
            if not shared:
                run.result(600)
        for run in runs:
            run.result(600)
        found = Pass(wall_s=time.monotonic() - begun)
        time.sleep(2.0)  # the last metrics are on their way
        self._read(found, last[0][0] if last else "0", {run.id for run in runs})
        return found

    def _read(self, found: Pass, after: str, runs: set[str]) -> None:
        for _, fields in self.admin.ledger.client.xrange(PLATFORM_STREAM, min=f"({after}"):
            event = json.loads(fields["event"])
            values = event["values"]
            if event["kind"] == "inference":
                found.inference_s += values["backbone_s"]
                found.backbone_rows += values["samples"]
            elif event["workload"] in runs and event["kind"] in ("step", "update"):
                found.training_s += values["cost_s"]
                if event["kind"] == "update":
                    found.rl_samples += values["num_rows"]
                    found.backbone_rows += values["num_rows"] if values["backbone_forwards"] else 0

    def _spec(self, name: str, *, encode_once: bool) -> dict[str, Any]:
        policy = f"p{self.number}"
        if name == "sft":
            return self._sft(policy, self.sft_steps)
        grpo = name == "grpo"
        return {
            "kind": "rl",
            "policy": policy,
            "init_from": self.checkpoints[name],
            "environment": {"id": "tabletop/reach", "options": SIMULATOR},
            "rollout": {
                "num_envs": NUM_ENVS, "horizon": HORIZON,
                "group_size": 4 if grpo else 1, "whole_episodes": grpo,
            },
            "algorithm": {"kind": "grpo", "epochs": 2, "minibatches": 4}
            if grpo
            else {"kind": "ppo", "epochs": 2, "minibatches": 4},
            "updates": self.updates,
            "encode_once": encode_once,
        }  # fmt: skip

    def _sft(self, policy: str, steps: int) -> dict[str, Any]:
        return {
            "kind": "sft",
            "policy": policy,
            "dataset": {"path": "reach", "heldout_samples": 0},
            "steps": steps,
            "batch_size": 8,
            "action_module": {"kind": "oft", "chunk": 4},
            "limits": {"max_in_flight": 16},
            "checkpoint": {"every_steps": steps},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about five minutes")
    quick = parser.parse_args().quick
    rounds, updates, sft_steps = (1, 5, 60) if quick else (3, 20, 300)
    passes: dict[tuple[bool, bool], list[Pass]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demonstrations(folder / "data" / "reach", env=Tabletop(), episodes=12, seed=0)
        var = folder / "var"
        environment = {
            **os.environ, "VLA_BASE_MODELS": "tiny=tiny-random", "VLA_FEATURE_CACHE_BYTES": "0",
        }  # fmt: skip
        try:
            operate.up(
                var, environment=environment, dataset_roots=str(folder / "data"), timeout_s=180,
                roles=(*ROLES, *environment_roles(1, {"tabletop": 1.0}, var)),
            )  # fmt: skip
            with operator(var) as admin:
                platforms = {one: Platform(admin.add(one)) for one in TENANTS}
                bench = Bench(admin, platforms, updates, sft_steps)
                bench.tune()
                for number in range(rounds):
                    for encode_once in (True, False):
                        for shared in (True, False) if number % 2 == 0 else (False, True):
                            found = bench.measure(shared=shared, encode_once=encode_once)
                            passes.setdefault((shared, encode_once), []).append(found)
                            kind = "shared" if shared else "one by one"
                            print(f"{kind}, encode once {encode_once}: {found}", file=sys.stderr)
                for platform in platforms.values():
                    platform.close()
        finally:
            operate.down(var)
    report(passes)


def report(passes: dict[tuple[bool, bool], list[Pass]]) -> None:
    def ratio(of: str, *, encode_once: bool, inverse: bool = False) -> float:
        """Median over rounds of the shared run's number over the baseline's."""
        pairs = zip(passes[True, encode_once], passes[False, encode_once], strict=True)
        each = [getattr(shared, of) / getattr(alone, of) for shared, alone in pairs]
        return 1 / statistics.median(each) if inverse else statistics.median(each)

    kept = passes[True, True]
    forwards = statistics.median(one.backbone_rows / max(1, one.rl_samples) for one in kept)
    efficiency = "worker_time_efficiency"
    print_result(
        "mixed_workload",
        {
            efficiency: target(ratio("wall_s", encode_once=True, inverse=True), 2.5, "ratio"),
            f"{efficiency}_recompute": target(
                ratio("wall_s", encode_once=False, inverse=True), 1.39, "ratio"
            ),
            "training_utilisation_gain": target(
                ratio("training_utilisation", encode_once=True), 1.99, "ratio"
            ),
            "inference_utilisation_gain": target(
                ratio("inference_utilisation", encode_once=True), 1.33, "ratio"
            ),
            "backbone_forwards_per_sample": target(forwards, 1.05, "rows per RL sample"),
        },
        {
            f"{'shared' if shared else 'alone'}_{'once' if once else 'again'}_s": round(
                statistics.median(one.wall_s for one in found), 2
            )
            for (shared, once), found in passes.items()
        },
    )


if __name__ == "__main__":
    main()
