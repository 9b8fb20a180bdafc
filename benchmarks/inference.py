"""Inference under closed-loop load, ours against other servers and a bare loop, interleaved.

    python benchmarks/inference.py [--quick] [--seconds 3] [--rounds 5]

One 224 x 224 x 3 picture and 8 numbers a request; a stand-in model that takes about 5 ms at batch 1
and 20 ms at batch 32, and the tiny backbone. The bare loop calls the same model in one process on
full batches: no transport, no clients. `in_process` adds clients that wait for their answers, and
sends nothing anywhere: the most that a server could reach. A lone client is compared with a forward
on a device that was idle before, as it is for it; the difference to the loop's is in the details.
All servers stay up; those that are not measured are stopped (SIGSTOP). Ratios are of one round
each, so that other load on the machine hits both sides; the medians over the rounds are reported.

mosec, LitServe, celery-batches and plain Celery run in an environment of their own under
`var/benchmarks/peers`, which is made on demand and uses this environment's torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
from inference_rows import observation
from inference_standin import StandIn
from result_line import print_result, target

from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.servers import guarded, redis_ready, redis_server

HERE = Path(__file__).parent
PEERS = HERE.parent / "var" / "benchmarks" / "peers"
PACKAGES = (
    "mosec==0.9.*", "litserve==0.2.*", "celery-batches==0.11.*", "celery[redis]<5.7", "aiohttp",
    "pyzmq",
)  # fmt: skip
CLIENTS = (1, 8, 32, 64)
BATCH = 32
ROUND_TRIP_S = 0.0015
SINGLE = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "C_FORCE_ROOT": "1",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def peers_python() -> str:
    """The peers' environment; its own packages come first, torch and numpy from ours."""
    python = PEERS / "bin" / "python"
    marker = PEERS / ".ready"
    if not marker.exists():
        say(f"making {PEERS} (once)")
        subprocess.run((sys.executable, "-m", "venv", PEERS), check=True)
        subprocess.run((python, "-m", "pip", "install", "-q", *PACKAGES), check=True)
        ours = Path(torch.__file__).parent.parent
        (site,) = (PEERS / "lib").glob("python*/site-packages")
        (site / "zz_ours.pth").write_text(f"{ours}\n")
        marker.touch()
    return str(python)


class Server:
    """A process group that is stopped while others are measured."""

    def __init__(self, name: str, command: tuple[str, ...], folder: Path) -> None:
        self.name = name
        self._log = (folder / f"{name}.log").open("wb")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **SINGLE},
            cwd=HERE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def cpu_s(self) -> float:
        total = 0.0
        root = psutil.Process(self.process.pid)
        for one in (root, *root.children(recursive=True)):
            try:
                times = one.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
        self._log.close()


class Bench:
    def __init__(self, folder: Path, *, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        ports = free_ports(("redis", "celery-redis", "mosec", "litserve"))
        self.ports = ports
        self.url = f"redis://{LOOPBACK}:{ports['redis']}/0"
        self.celery_url = f"redis://{LOOPBACK}:{ports['celery-redis']}/0"
        self.servers: dict[str, Server] = {}
        self.model = StandIn()
        self.rows = [observation(number) for number in range(64)]
        self._redis = []
        for name, port in (("redis", ports["redis"]), ("celery-redis", ports["celery-redis"])):
            server = redis_server(name, folder / name, port, persistent=False)
            server.folder.mkdir()
            self._redis.append(
                subprocess.Popen(
                    guarded(server.command), cwd=server.folder, stdout=subprocess.DEVNULL
                )
            )
        while not (redis_ready(self.url) and redis_ready(self.celery_url)):
            time.sleep(0.05)

    def start_ours(self, engine: str, num_tenants: int) -> None:
        command = (sys.executable, "inference_server.py", self.url, engine, str(num_tenants))
        name = f"ours-{engine}"
        self.servers[name] = Server(name, command, self.folder)
        log = self.folder / f"{name}.log"
        while b"ready" not in log.read_bytes():
            if self.servers[name].process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        self.servers[name].signal(signal.SIGSTOP)

    def start_peer(self, name: str, python: str) -> None:
        port = str(self.ports.get(name, 0))
        command: tuple[str, ...] = (python, f"inference_{name}.py", port)
        if name.startswith("celery"):
            command = (python, "inference_peers.py", "serve", name, "0", self.celery_url, "16")
        self.servers[name] = Server(name, command, self.folder)
        if name in ("mosec", "litserve"):
            path = "/metrics" if name == "mosec" else "/health"
            _wait_http(f"http://127.0.0.1:{port}{path}")
        else:
            time.sleep(4.0)
        self.servers[name].signal(signal.SIGSTOP)

    def bare(self, clients: int, num_tenants: int) -> float:
        """Requests a second of full batches in this process."""
        size = min(clients, BATCH)
        tenants = [number % num_tenants for number in range(size)]
        done, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < self.seconds:
            self.model(self.rows[:size], tenants)
            done += size
        return done / passed

    def lone_forward_ms(self) -> float:
        """Median time of a forward of one row, with the device idle for a moment before each: what
        a lone client's requests meet, for nobody else keeps its caches warm."""
        took, end = [], time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            time.sleep(ROUND_TRIP_S)
            began = time.perf_counter()
            self.model(self.rows[:1], [0])
            took.append(time.perf_counter() - began)
        return 1e3 * statistics.median(took)

    def load(
        self, name: str, clients: int, num_tenants: int, *, python: str, engine: str = ""
    ) -> dict[str, float]:
        server = self.servers[f"ours-{engine}" if name == "ours" else name]
        address = {
            "ours": self.url,
            "mosec": str(self.ports["mosec"]),
            "litserve": str(self.ports["litserve"]),
        }.get(name, self.celery_url)
        # A request of Celery's takes a second at 64 clients.
        seconds = max(self.seconds, 4.0) if name.startswith("celery") else self.seconds
        server.signal(signal.SIGCONT)
        before = server.cpu_s()
        found = self._clients(python, name, address, clients, seconds, num_tenants, engine or "-")
        used = server.cpu_s() - before
        server.signal(signal.SIGSTOP)
        warmed = seconds + min(1.0, seconds / 3)
        found["server_cpu_ms"] = 1e3 * used / max(1.0, found["rps"] * warmed)
        return found

    def in_process(self, clients: int, num_tenants: int) -> dict[str, float]:
        return self._clients(
            sys.executable, "in_process", "-", clients, self.seconds, num_tenants, "-"
        )

    def _clients(self, python: str, name: str, *arguments: object) -> dict[str, float]:
        done = subprocess.run(
            (python, "inference_peers.py", "load", name, *map(str, arguments)),
            cwd=HERE,
            env={**os.environ, **SINGLE},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    def close(self) -> None:
        for server in self.servers.values():
            server.end()
        for process in self._redis:
            process.terminate()
            process.wait()


def _wait_http(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} never answered")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter rounds; same result names")
    parser.add_argument("--seconds", type=float, help="of one measurement")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only-ours", action="store_true", help="no peers; for profiling")
    options = parser.parse_args()
    seconds = options.seconds or (1.5 if options.quick else 4.0)
    rounds = options.rounds or (3 if options.quick else 7)
    python = sys.executable if options.only_ours else peers_python()
    found: dict[str, list[float]] = defaultdict(list)
    shown: dict[str, list[float]] = defaultdict(list)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), seconds=seconds)
        try:
            bench.start_ours("standin", 16)
            bench.start_ours("tiny-random", 8)
            peers: dict[int, tuple[str, ...]] = {}
            if not options.only_ours:
                for name in ("mosec", "litserve", "celery_batches", "celery"):
                    bench.start_peer(name, python)
                peers = {
                    1: ("mosec",),
                    8: ("mosec",),
                    32: ("mosec", "litserve"),
                    64: ("mosec", "litserve", "celery_batches", "celery"),
                }
            for number in range(rounds):
                for clients in CLIENTS:
                    _round(bench, clients, peers.get(clients, ()), python, found, shown)
                _tenants(bench, found, shown)
                say(f"round {number + 1}/{rounds} done")
        finally:
            bench.close()

    medians = {name: statistics.median(values) for name, values in found.items()}
    goals = {
        "vs_bare_c32": (0.85, "requests/s over the bare loop's"),
        "vs_bare_c64": (0.85, "requests/s over the bare loop's"),
        "vs_mosec_c32": (1.0, "requests/s over mosec's"),
        "vs_mosec_c64": (1.0, "requests/s over mosec's"),
        "vs_litserve_c64": (2.0, "requests/s over LitServe's"),
        "lone_client_overhead_ms": (1.5, "ms above a forward of its own, at most"),
        "tenants_8_over_1": (1.1, "time at the same load, at most"),
    }
    targets = {
        name: target(medians[name], goal, unit)
        for name, (goal, unit) in goals.items()
        if name in medians
    }
    details = {name: round(statistics.median(values), 3) for name, values in sorted(shown.items())}
    details |= {name: round(value, 3) for name, value in medians.items() if name not in goals}
    print_result("inference", targets, details)


def _round(
    bench: Bench,
    clients: int,
    peers: tuple[str, ...],
    python: str,
    found: dict[str, list[float]],
    shown: dict[str, list[float]],
) -> None:
    bare = bench.bare(clients, 1)
    lone_ms = bench.lone_forward_ms() if clients == 1 else 0.0
    results: dict[str, dict[str, Any]] = {
        "ours": bench.load("ours", clients, 1, python=sys.executable, engine="standin")
    }
    for name in peers:
        results[name] = bench.load(name, clients, 1, python=python)
    results["in_process"] = bench.in_process(clients, 1)
    bare = (bare + bench.bare(clients, 1)) / 2
    ours = results["ours"]
    shown[f"bare_c{clients}_rps"].append(bare)
    for name, result in results.items():
        for key in ("rps", "p50_ms", "p95_ms", "server_cpu_ms"):
            if key in result:
                shown[f"{name}_c{clients}_{key}"].append(result[key])
        shown[f"{name}_c{clients}_vs_bare"].append(result["rps"] / bare)
        if name not in ("ours", "in_process"):
            found[f"vs_{name}_c{clients}"].append(ours["rps"] / max(result["rps"], 0.1))
    found[f"vs_bare_c{clients}"].append(ours["rps"] / bare)
    if clients == 1:
        lone_ms = (lone_ms + bench.lone_forward_ms()) / 2
        found["lone_client_overhead_ms"].append(ours["p50_ms"] - lone_ms)
        shown["lone_client_over_hot_loop_ms"].append(ours["p50_ms"] - 1e3 / bare)
    say(
        f"c{clients}: bare {bare:.0f}/s, "
        + ", ".join(
            f"{name} {r['rps']:.0f}/s ({r['rps'] / bare:.2f})" for name, r in results.items()
        )
    )


def _tenants(bench: Bench, found: dict[str, list[float]], shown: dict[str, list[float]]) -> None:
    """The same load of one tenant and of eight, on the stand-in and on the tiny backbone."""
    for engine, clients in (("standin", 64), ("tiny-random", 32)):
        one, eight = (
            bench.load("ours", clients, tenants, python=sys.executable, engine=engine)
            for tenants in (1, 8)
        )
        ratio = one["rps"] / eight["rps"]
        found["tenants_8_over_1" if engine == "standin" else "tenants_8_over_1_tiny"].append(ratio)
        shown[f"{engine}_one_tenant_rps"].append(one["rps"])
        shown[f"{engine}_eight_tenants_rps"].append(eight["rps"])
        say(f"{engine}: 1 tenant {one['rps']:.0f}/s, 8 tenants {eight['rps']:.0f}/s")


if __name__ == "__main__":
    main()
