"""The payload store against TransferQueue, Ray's object store and pickled Celery results.

    python benchmarks/payloads.py [--quick]

A partition of 77 MB (64 rows: 8 frames 224x224x3 uint8, state, action chunk, log-probabilities) is
put by one process and read by another: one small column, all with every byte touched, the listing.
All contenders take turns in every round, in changing order, so that other load hits each of them.
Baselines run in environments of their own below `var/benchmarks/`, made on demand.

Ratios are of median times, the other's over ours: above 1 we are faster. `ray` includes asking the
actor that knows a partition's objects, which have no names; `ray_bare` in the details does not.
`small_column_share` is the small column's time over the time of all, through one payload Redis;
through shared memory, where both are mostly fixed cost, it is in the details.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from payload_contenders import OPERATIONS
from result_line import print_result, target

from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.servers import redis_ready, redis_server
from vla_storage.payloads.arena_file import create_arena

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("payload_contenders.py")
BASELINE_PACKAGES = ("torch==2.13.0", "transferqueue==0.1.11", "ray==2.60.0")
NAMES = ("ours_local", "ours_redis", "transferqueue", "ray", "celery")


def baseline_python() -> str:
    """The environment of TransferQueue and Ray; torch first, so that nothing pulls a larger one."""
    folder = ROOT / "var" / "benchmarks" / "transferqueue"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print(f"creating {folder}", file=sys.stderr, flush=True)
        bootstrap = (
            "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
            "import bootstrap; bootstrap.create(Path(sys.argv[2]))"
        )
        if not python.exists():
            subprocess.run(
                [sys.executable, "-c", bootstrap, str(ROOT / "deploy"), str(folder)], check=True
            )
        for package in BASELINE_PACKAGES:
            subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
        (folder / ".ready").touch()
    return str(python)


class Contender:
    def __init__(self, name: str, python: str, rows: int, addresses: list[str]) -> None:
        self.name = name
        variables = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [python, str(SCRIPT), name, str(rows), *addresses],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=variables,
        )  # fmt: skip
        self._answer()

    def call(self, operation: str, partition: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{operation} {partition}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.name} ended: run {SCRIPT.name} by hand to see why")


@contextlib.contextmanager
def payload_redis() -> Iterator[tuple[str, int]]:
    """URL and process id of a server with the platform's own settings."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(["payload"])["payload"]
        server = redis_server("payload", Path(folder), port, persistent=False)
        variables = {**os.environ, **server.environment}
        process = subprocess.Popen(
            server.command, cwd=folder, env=variables, stdout=subprocess.DEVNULL
        )
        url = f"redis://{LOOPBACK}:{port}/0"
        try:
            while not redis_ready(url):
                time.sleep(0.05)
            yield url, process.pid
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; same result names")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--only", default=",".join(NAMES), help="contenders, by comma")
    options = parser.parse_args()
    rounds = 10 if options.quick else 25
    names = options.only.split(",")
    arena = Path(f"/dev/shm/vla-bench-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(payload_redis())
        celery_url, _ = stack.enter_context(payload_redis())
        create_arena(arena, 512 << 20)
        stack.callback(arena.unlink)
        addresses = {"ours_local": [url, str(arena)], "ours_redis": [url], "celery": [celery_url]}
        contenders = []
        for name in names:
            is_ours = name in addresses
            python = sys.executable if is_ours else baseline_python()
            contender = Contender(name, python, options.rows, addresses.get(name, []))
            stack.callback(contender.close)
            contenders.append(contender)
            print(f"{name} is up", file=sys.stderr, flush=True)
        times, grown = measure(contenders, rounds)
    report(times, grown)


Samples = dict[str, dict[str, list[float]]]


def measure(contenders: list[Contender], rounds: int) -> tuple[Samples, Samples]:
    times: Samples = {c.name: {operation: [] for operation in OPERATIONS} for c in contenders}
    grown: Samples = {c.name: {operation: [] for operation in OPERATIONS} for c in contenders}
    order = random.Random(0)
    for number in range(-1, rounds):
        # Turns in any order: who comes after a large one finds the caches full of its bytes.
        for contender in order.sample(contenders, len(contenders)):
            for operation in OPERATIONS:
                answer = contender.call(operation, f"p{number + 1}")
                if number >= 0:  # the first round warms up
                    times[contender.name][operation].append(answer["ms"])
                    grown[contender.name][operation].append(answer["grown"] / 1e6)
                    if answer["bare_ms"] is not None:
                        bare = times.setdefault(f"{contender.name}_bare", {})
                        bare.setdefault(operation, []).append(answer["bare_ms"])
        line = "  ".join(
            f"{name} " + "/".join(f"{times[name][o][-1]:.1f}" for o in OPERATIONS[:-1])
            for name in grown
            if number >= 0
        )
        print(f"round {number + 1}/{rounds}: {line}", file=sys.stderr, flush=True)
    return times, grown


def report(times: Samples, grown: Samples) -> None:
    medians = {
        name: {operation: statistics.median(values) for operation, values in of.items()}
        for name, of in times.items()
    }

    def ratio(other: str, ours: str, operation: str) -> float:
        if other not in medians or ours not in medians:
            return float("nan")
        return medians[other][operation] / medians[ours][operation]

    goals = (
        ("put_vs_transferqueue_local", "transferqueue", "ours_local", "put", 5.0),
        ("get_vs_transferqueue_local", "transferqueue", "ours_local", "all", 5.0),
        ("put_vs_transferqueue_redis", "transferqueue", "ours_redis", "put", 0.5),
        ("get_vs_transferqueue_redis", "transferqueue", "ours_redis", "all", 0.8),
        ("put_vs_ray_local", "ray", "ours_local", "put", 1.0),
        ("get_vs_ray_local", "ray", "ours_local", "all", 1.0),
    )
    targets = {
        name: target(ratio(other, ours, operation), goal, "ratio of times, higher is better")
        for name, other, ours, operation, goal in goals
    }
    share = {
        name: medians[name]["column"] / medians[name]["all"]
        for name in ("ours_redis", "ours_local")
        if name in medians
    }
    targets["small_column_share"] = target(
        share.get("ours_redis", float("nan")), 0.02, "ratio of times, lower is better"
    )
    print_result(
        "payloads",
        targets,
        {
            "median_ms": {
                name: {o: round(v, 3) for o, v in of.items()} for name, of in medians.items()
            },
            "peak_growth_mb": {
                name: {o: round(statistics.median(v), 1) for o, v in of.items()}
                for name, of in grown.items()
            },
            "small_column_share_local": round(share.get("ours_local", float("nan")), 4),
        },
    )


if __name__ == "__main__":
    main()
