"""The training queue's rate: reserve, ready, lease, complete, with few and with many tenants.

    python benchmarks/scheduler.py [--quick]

Every tenant has one running workload; one client serves them in turn, one training job at a time.
The populations live in databases of one Valkey, and blocks of cycles alternate between them and the
bare limit: the same number of calls of a server-side function that does nothing. Medians of blocks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from result_line import print_result, target

from vla_platform.control.ledger import Ledger
from vla_platform.control.states import JobState
from vla_platform.control.training_job import TrainingJob
from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.servers import guarded, redis_ready, redis_server, server_environment

POPULATIONS = (10, 1_000, 10_000)
CALLS_PER_CYCLE = 4
BASE = "tiny"
BARE = "#!lua name=bare\nredis.register_function('bare', function() return 1 end)"


@contextmanager
def control_redis(folder: Path) -> Iterator[str]:
    """An append-only Valkey of our own, as `vla up` starts it."""
    (port,) = free_ports(("redis",)).values()
    server = redis_server("redis", folder, port, persistent=True)
    process = subprocess.Popen(
        guarded(server.command), env=server_environment(server),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"redis://{LOOPBACK}:{port}"
    try:
        while not redis_ready(f"{url}/0"):
            time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


class Population:
    """Tenants of one database, served in turn."""

    def __init__(self, url: str, size: int) -> None:
        self.ledger = Ledger.connect(url)
        self.ledger.load()
        self.ledger.register_base_model(BASE, {})
        names = [f"tenant-{number}" for number in range(size)]
        for name in names:
            fields = {
                "tenant": name, "policy": "p", "policy_key": f"{name}/p", "kind": "sft",
                "lifecycle": "sft", "target": "positions", "base_model": BASE,
                "schema_signature": "s" * 64, "spec_digest": "d" * 64, "priority": 0,
                "max_in_flight": 4,
            }  # fmt: skip
            self.ledger.submit(name, fields, max_pending=10)
            self.ledger.prepared(name, total_positions=10**9, total_steps=10**9)
            self.ledger.admit(name, max_running=1)
        self._turns = itertools.cycle(names)

    def cycles(self, count: int) -> float:
        """Seconds per cycle."""
        begun = time.perf_counter()
        for _ in range(count):
            job = self.ledger.reserve(next(self._turns), lease_s=60)
            assert isinstance(job, TrainingJob)
            self.ledger.mark(job, JobState.READY, sample_count=8, domain="train")
            (leased,) = self.ledger.lease_group("worker", BASE, max_jobs=1, lease_s=60)
            self.ledger.complete(
                leased, step=leased.position + 1, result={"loss": 0.5}, cost_s=0.1, samples=8
            )
        return (time.perf_counter() - begun) / count


def bare_cycles(client: redis.Redis, count: int) -> float:
    """Seconds per cycle of as many calls that do nothing."""
    begun = time.perf_counter()
    for _ in range(count * CALLS_PER_CYCLE):
        client.fcall("bare", 0, "argument")
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks; about a minute")
    blocks, block = (9, 150) if parser.parse_args().quick else (25, 400)
    with tempfile.TemporaryDirectory() as folder, control_redis(Path(folder)) as url:
        populations = {}
        for number, size in enumerate(POPULATIONS):
            print(f"making {size} tenants", file=sys.stderr)
            populations[size] = Population(f"{url}/{number}", size)
        client = redis.Redis.from_url(f"{url}/9")
        client.function_load(BARE)
        seconds: dict[str, list[float]] = {"bare": []} | {str(size): [] for size in POPULATIONS}
        for number in range(blocks):
            seconds["bare"].append(bare_cycles(client, block))
            for size, population in populations.items():
                seconds[str(size)].append(population.cycles(block))
            print(f"block {number + 1}/{blocks}", file=sys.stderr)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    few, _, many = (median[str(size)] for size in POPULATIONS)
    for name, found in median.items():
        print(f"{name:>8}: {1 / found:8.0f} cycles/s, {found * 1e6:8.0f} us each")
    print_result(
        "scheduler",
        {
            "slowdown_10_to_10000_tenants": target(many / few, 1.5, "ratio"),
            "vs_bare_round_trips": target(few / median["bare"], 3.0, "ratio"),
        },
        {"cycles_per_s": {name: round(1 / found) for name, found in median.items()}},
    )


if __name__ == "__main__":
    main()
