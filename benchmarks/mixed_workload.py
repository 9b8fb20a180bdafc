"""The mixed workload of JoyNexus at our size: three RL tenants and one SFT tenant.

    python benchmarks/mixed_workload.py [--quick]

Shared: all four at once, on one training and inference worker and one environment host. Baseline:
the same updates on the same processes, one tenant after another. Both with the rollout's features
kept (encode once) and with rows encoded again for training.

There the simulators have devices of their own, and a single tenant's workers idle while they step.
Here two simulators (reach and push) run as servers behind the WebSocket protocol, in real time at
20 Hz, the control rate of ManiSkill and LIBERO; the details show that the baseline's workers are
about as idle as theirs were (training 20.8 %, inference 28.1 %). Two PPO tenants and one GRPO
tenant. The base model is the random tiny one: what is timed does not depend on its weights.

The same processes are held in both, so worker time is wall time. `worker_time_efficiency` is the
baseline that encodes again over the shared run that does not, for the one is what a tenant has
without this platform and the other what it has with it; `..._recompute` has both encode again, and
the details give the ratio with both encoding once. A utilisation is busy seconds over wall time.

`backbone_forwards_per_sample` counts every sample that a rollout made, also those of groups that
the filter drops afterwards for equal rewards: each was encoded to act, and encode-once is about how
often it is encoded again. The details have the same over the samples that were trained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_line import print_result, target

from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Platform, Run
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.envs.tabletop_push import TabletopPush
from vla_platform.metrics.events import PLATFORM_STREAM
from vla_platform.stack import operate
from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.roles import ROLES, environment_roles

PACED = Path(__file__).with_name("paced_simulators.py")
TENANTS = ("ppo-one", "ppo-two", "grpo", "sft")
SIMULATORS = {"ppo-one": "reach", "ppo-two": "push", "grpo": "reach"}
CONTROL_HZ = 20.0
NUM_ENVS, HORIZON = 8, 16


@dataclass
class Pass:
    """What one way of running the same updates cost."""

    wall_s: float = 0.0
    training_s: float = 0.0
    inference_s: float = 0.0
    backbone_rows: int = 0  # rows that went through the backbone, for acting or for training
    rl_samples: int = 0  # that rollouts made
    rl_trained: int = 0  # of them, those that a group filter did not drop

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
    addresses: dict[str, str]  # simulator to host:port
    updates: int
    sft_steps: int
    number: int = 0
    checkpoints: dict[str, str] = field(default_factory=dict)

    def tune(self) -> None:
        """The checkpoint that each RL tenant begins from."""
        runs = {
            name: platform.submit(self._sft("start", 4, SIMULATORS.get(name, "reach")))
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
                    found.rl_trained += values["num_rows"]
                    found.backbone_rows += values["num_rows"] if values["backbone_forwards"] else 0
        ledger = self.admin.ledger.client
        for key in ledger.scan_iter("vla:j:*"):
            workload, kind, samples = ledger.hmget(key, "workload", "task_type", "sample_count")
            if workload in runs and kind == "rl":
                found.rl_samples += int(samples or 0)

    def _spec(self, name: str, *, encode_once: bool) -> dict[str, Any]:
        policy = f"p{self.number}"
        if name == "sft":
            return self._sft(policy, self.sft_steps, "reach")
        grpo = name == "grpo"
        return {
            "kind": "rl",
            "policy": policy,
            "init_from": self.checkpoints[name],
            "environment": {
                "id": f"external/{SIMULATORS[name]}",
                "options": {"url": f"ws://{self.addresses[SIMULATORS[name]]}"},
            },
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

    def _sft(self, policy: str, steps: int, dataset: str) -> dict[str, Any]:
        return {
            "kind": "sft",
            "policy": policy,
            "dataset": {"path": dataset, "heldout_samples": 0},
            "steps": steps,
            "batch_size": 8,
            "action_module": {"kind": "oft", "chunk": 4},
            "limits": {"max_in_flight": 16},
            "checkpoint": {"every_steps": steps},
        }


@contextlib.contextmanager
def simulators() -> Iterator[dict[str, str]]:
    """Address of each."""
    ports = free_ports(("reach", "push"))
    running = []
    try:
        for name, port in ports.items():
            command = (sys.executable, str(PACED), str(port), name, str(CONTROL_HZ))
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert (running[-1].stdout or sys.stdin).readline() == "listening\n"
        yield {name: f"{LOOPBACK}:{port}" for name, port in ports.items()}
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about five minutes")
    quick = parser.parse_args().quick
    rounds, updates, sft_steps = (1, 5, 60) if quick else (3, 20, 300)
    passes: dict[tuple[bool, bool], list[Pass]] = {}
    with tempfile.TemporaryDirectory() as name, simulators() as addresses:
        folder = Path(name)
        make_demonstrations(folder / "data" / "reach", env=Tabletop(), episodes=12, seed=0)
        make_demonstrations(folder / "data" / "push", env=TabletopPush(), episodes=12, seed=0)
        var = folder / "var"
        environment = {
            **os.environ,
            "VLA_BASE_MODELS": "tiny=tiny-random",
            "VLA_FEATURE_CACHE_BYTES": "0",
            "VLA_EXTERNAL_HOSTS": ",".join(addresses.values()),
        }
        try:
            operate.up(
                var, environment=environment, dataset_roots=str(folder / "data"), timeout_s=180,
                roles=(*ROLES, *environment_roles(1, {"external": 1.0}, var)),
            )  # fmt: skip
            with operator(var) as admin:
                platforms = {one: Platform(admin.add(one)) for one in TENANTS}
                bench = Bench(admin, platforms, addresses, updates, sft_steps)
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
    def gain(of: str, shared: bool, alone: bool, *, inverse: bool = False) -> float:
        """Median over rounds of the shared run's number over the baseline's; the arguments say
        which of them encodes once."""
        pairs = zip(passes[True, shared], passes[False, alone], strict=True)
        each = [getattr(one, of) / getattr(other, of) for one, other in pairs]
        return 1 / statistics.median(each) if inverse else statistics.median(each)

    def middle(of: str, found: list[Pass]) -> float:
        return round(statistics.median(getattr(one, of) for one in found), 3)

    kept = passes[True, True]
    forwards = statistics.median(one.backbone_rows / max(1, one.rl_samples) for one in kept)
    trained = statistics.median(one.backbone_rows / max(1, one.rl_trained) for one in kept)
    efficiency = "worker_time_efficiency"
    training, inference = "training_utilisation", "inference_utilisation"
    details: dict[str, Any] = {
        f"{'shared' if shared else 'alone'}_{'once' if once else 'again'}": {
            of: middle(of, found) for of in ("wall_s", training, inference)
        }
        for (shared, once), found in passes.items()
    }
    details[f"{efficiency}_both_once"] = round(gain("wall_s", True, True, inverse=True), 3)
    details["backbone_forwards_per_trained_sample"] = round(trained, 3)
    print_result(
        "mixed_workload",
        {
            efficiency: target(gain("wall_s", True, False, inverse=True), 2.5, "ratio"),
            f"{efficiency}_recompute": target(
                gain("wall_s", False, False, inverse=True), 1.39, "ratio"
            ),
            f"{training}_gain": target(gain(training, True, True), 1.99, "ratio"),
            f"{inference}_gain": target(gain(inference, True, True), 1.33, "ratio"),
            "backbone_forwards_per_sample": target(forwards, 1.05, "rows per RL sample"),
        },
        details,
    )


if __name__ == "__main__":
    main()
