"""How long the operators' page takes with 10 000 workloads in the ledger.

    python benchmarks/operators_page.py [--quick]

Of the workloads 9 900 wait and 100 run, of 100 tenants, each with a month of usage. One client asks
the served page over HTTP, in turn the first, a middle and the last part of the list; the median of
all. In the details: with 100 workloads, and the bare limit, a PING of the same Redis over the same
server. Populations alternate.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import uvicorn
from result_line import print_result, target
from scheduler import control_redis

from vla_platform.control import usage
from vla_platform.control.ledger import Ledger
from vla_platform.operators.page import create_page

USER, PASSWORD = "admin", "benchmark"
NUM_TENANTS = 100


def fill(ledger: Ledger, count: int) -> None:
    today = usage.today(ledger.client)
    for number in range(count):
        tenant = f"t{number % NUM_TENANTS}"
        fields = {
            "tenant": tenant, "policy": f"p{number}", "policy_key": f"{tenant}/p{number}",
            "kind": "sft", "base_model": "tiny", "schema_signature": "s", "spec_digest": "d",
            "priority": number % 3, "max_in_flight": 2, "max_seconds": 0, "display_name": "",
            "lifecycle": "sft", "target": "positions",
        }  # fmt: skip
        run = f"sft-{number:08d}"
        ledger.submit(run, fields, max_pending=1_000_000)
        if number % 100 == 0:
            ledger.prepared(run, total_positions=10, total_steps=10)
            ledger.admit(run, max_running=1000)
    ledger.register_base_model("tiny", {"digest": "d", "image_size": 64})
    with ledger.client.pipeline(transaction=False) as pipe:
        for number in range(NUM_TENANTS):
            pipe.sadd("vla:tenants", f"t{number}")
            amounts = {str(what): 1.5 for what in usage.Use}
            usage.count(pipe, f"t{number}", today, policy="p", workload="w", amounts=amounts)
        pipe.execute()


class Served:
    def __init__(self, url: str) -> None:
        self.ledger = Ledger.connect(url)
        self.ledger.load()
        # As servers make them: asyncio switches the wait for fuller packets off by the protocol.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        page = create_page(self.ledger, user=USER, password=PASSWORD)
        self._server = uvicorn.Server(uvicorn.Config(page, log_level="error"))
        threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        ).start()
        while not self._server.started:
            time.sleep(0.01)
        self._client = http.client.HTTPConnection("127.0.0.1", self._listener.getsockname()[1])
        token = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}"}

    def ask(self, path: str) -> float:
        started = time.perf_counter()
        self._client.request("GET", path, headers=self._headers)
        answer = self._client.getresponse()
        body = answer.read()
        took = time.perf_counter() - started
        assert answer.status == 200, body[:200]
        return 1000 * took

    def close(self) -> None:
        self._server.should_exit = True
        self.ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; same result names")
    rounds = 30 if parser.parse_args().quick else 200
    with tempfile.TemporaryDirectory() as folder, control_redis(Path(folder)) as url:
        few, many = Served(f"{url}/0"), Served(f"{url}/1")
        print("filling the ledgers", file=sys.stderr)
        fill(few.ledger, 100)
        fill(many.ledger, 10_000)
        paths = ("/?state=pending", "/?state=pending&page=100", "/?state=pending&page=198", "/")
        for path in paths:
            few.ask(path)
            many.ask(path)
        times: dict[str, list[float]] = {"few": [], "many": [], "ping": []}
        for number in range(rounds):
            path = paths[number % len(paths)]
            times["many"].append(many.ask(path))
            times["few"].append(few.ask(path))
            times["ping"].append(many.ask("/healthcheck"))
        few.close()
        many.close()
    middle = {name: statistics.median(found) for name, found in times.items()}
    print(f"median ms: {middle}", file=sys.stderr)
    print_result(
        "operators_page",
        {"page_ms_10000_workloads": target(middle["many"], 100.0, "ms")},
        {
            "page_ms_100_workloads": round(middle["few"], 2),
            "healthcheck_ms": round(middle["ping"], 2),
            "p95_ms": round(statistics.quantiles(times["many"], n=20)[-1], 2),
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
