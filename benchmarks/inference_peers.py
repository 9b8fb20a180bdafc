"""Celery's two servers of `benchmarks/inference.py`, and the clients of all.

Runs in the peers' own environment (`serve`, `load`), except for our own client. All get the same
rows: a byte for the tenant in front of `ROW_BYTES` bytes; all run `StandIn`.

    serve NAME PORT REDIS_URL NUM_TENANTS
    load NAME ADDRESS NUM_CLIENTS SECONDS NUM_TENANTS ENGINE

`load in_process` has no server: what is left of the bare loop where clients wait for answers and
nothing is sent anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from inference_rows import PIXEL_BYTES, ROW_BYTES, SIDE, observation

BATCH = 32
CELERY_BATCHES_WAIT_S = 0.05  # the best of 5, 50 and 300 ms


def split(body: bytes) -> tuple[int, np.ndarray]:
    return body[0], np.frombuffer(body, np.uint8, ROW_BYTES, 1)


def celery_app(url: str) -> Any:
    from celery import Celery

    app = Celery("peer", broker=url, backend=url)
    app.conf.update(
        task_serializer="pickle",
        result_serializer="pickle",
        accept_content=["pickle", "json"],
        worker_prefetch_multiplier=2 * BATCH,
        task_create_missing_queues=True,
        broker_connection_retry_on_startup=True,
        result_expires=60,
    )
    return app


def serve_celery(url: str, num_tenants: int, *, batches: bool) -> None:
    from inference_standin import StandIn

    app = celery_app(url)
    model = StandIn(num_tenants)
    if batches:
        from celery_batches import Batches

        @app.task(
            base=Batches, flush_every=BATCH, flush_interval=CELERY_BATCHES_WAIT_S, name="predict"
        )
        def predict_all(requests: list[Any]) -> None:
            rows = [split(request.args[0]) for request in requests]
            found = model([row for _, row in rows], [tenant for tenant, _ in rows])
            for request, actions in zip(requests, found, strict=True):
                app.backend.mark_as_done(request.id, actions.tobytes(), request=request)

    else:

        @app.task(name="predict")
        def predict(body: bytes) -> bytes:
            tenant, row = split(body)
            return model([row], [tenant])[0].tobytes()

    queue = "batches" if batches else "plain"
    app.worker_main(
        ["worker", "--pool", "solo", "--queues", queue, "--loglevel", "ERROR", "--without-gossip",
         "--without-mingle", "--without-heartbeat", "--hostname", f"{queue}@peer"]
    )  # fmt: skip


class Measured:
    """Closed-loop clients for a while, after a second of warming up."""

    def __init__(self, seconds: float) -> None:
        now = time.perf_counter()
        self.begin, self.end = now + min(1.0, seconds / 3), now + min(1.0, seconds / 3) + seconds
        self.latencies: list[float] = []
        self.cpu_s = 0.0

    def note(self, started: float) -> bool:
        """Whether to go on."""
        now = time.perf_counter()
        if self.begin <= now <= self.end:
            self.latencies.append(now - started)
        return now < self.end

    def report(self) -> dict[str, float]:
        found = sorted(self.latencies) or [0.0]
        return {
            "rps": len(self.latencies) / (self.end - self.begin),
            "p50_ms": 1e3 * found[len(found) // 2],
            "p95_ms": 1e3 * found[int(0.95 * (len(found) - 1))],
        }


async def _asyncio_load(call: Callable[[int], Any], num_clients: int, measured: Measured) -> None:
    async def client(number: int) -> None:
        while True:
            started = time.perf_counter()
            await call(number)
            if not measured.note(started):
                return

    await asyncio.gather(*(client(number) for number in range(num_clients)))


def load_http(name: str, port: str, clients: int, seconds: float, tenants: int) -> Measured:
    import aiohttp

    bodies = [bytes([n % tenants]) + observation(n).tobytes() for n in range(clients)]

    async def run() -> Measured:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def mosec(number: int) -> None:
                url = f"http://127.0.0.1:{port}/inference"
                async with session.post(url, data=bodies[number]) as reply:
                    assert reply.status == 200, reply.status
                    await reply.read()

            async def litserve(number: int) -> None:
                row = {"row": base64.b64encode(bodies[number]).decode()}
                url = f"http://127.0.0.1:{port}/predict"
                async with session.post(url, json=row) as reply:
                    assert reply.status == 200, reply.status
                    await reply.json()

            measured = Measured(seconds)
            await _asyncio_load(mosec if name == "mosec" else litserve, clients, measured)
            return measured

    return asyncio.run(run())


def load_celery(name: str, url: str, clients: int, seconds: float, tenants: int) -> Measured:
    measured = Measured(seconds)

    def client(number: int) -> None:
        app = celery_app(url)  # Celery's Redis result consumer is not thread-safe
        body = bytes([number % tenants]) + observation(number).tobytes()
        queue = "batches" if name == "celery_batches" else "plain"
        while True:
            started = time.perf_counter()
            app.send_task("predict", args=(body,), queue=queue).get(timeout=60, interval=0.001)
            if not measured.note(started):
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return measured


def load_in_process(clients: int, seconds: float, tenants: int) -> Measured:
    from inference_standin import StandIn

    model, size, ended = StandIn(tenants), min(clients, BATCH), threading.Event()
    rows = [observation(number) for number in range(clients)]
    waiting: queue.SimpleQueue[tuple[int, asyncio.Future[np.ndarray]]] = queue.SimpleQueue()

    def resolve(batch: list[tuple[int, asyncio.Future[np.ndarray]]], found: np.ndarray) -> None:
        for (_, future), actions in zip(batch, found, strict=True):
            if not future.done():
                future.set_result(actions)

    def device(loop: asyncio.AbstractEventLoop) -> None:
        while not ended.is_set():
            batch = []
            with contextlib.suppress(queue.Empty):  # clients leave at the end
                while len(batch) < size:
                    batch.append(waiting.get(timeout=0.05))
            if not batch:
                continue
            numbers = [number for number, _ in batch]
            found = model([rows[n] for n in numbers], [n % tenants for n in numbers])
            loop.call_soon_threadsafe(resolve, batch, found)

    async def run() -> Measured:
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(None, device, loop)

        async def call(number: int) -> None:
            future: asyncio.Future[np.ndarray] = loop.create_future()
            waiting.put((number, future))
            await future

        measured = Measured(seconds)
        await _asyncio_load(call, clients, measured)
        ended.set()
        await working
        return measured

    return asyncio.run(run())


def load_ours(url: str, clients: int, seconds: float, tenants: int, engine: str) -> Measured:
    from vla_platform.client.inference import InferenceProxy
    from vla_platform.envs.base import Observation

    rows = []
    for number in range(clients):
        row = observation(number)
        image = row[:PIXEL_BYTES].reshape(SIDE, SIDE, 3)
        state = row[PIXEL_BYTES:].view(np.float32)
        rows.append(Observation({"top": image}, state, "reach the block"))

    async def run(proxy: InferenceProxy) -> Measured:
        async def call(number: int) -> None:
            tenant = f"t{number % tenants}"
            await proxy.predict_async(rows[number], tenant=tenant, policy="bench")

        measured = Measured(seconds)
        await _asyncio_load(call, clients, measured)
        return measured

    with InferenceProxy.connect(url, lambda tenant, policy: engine) as proxy:
        return asyncio.run(run(proxy))


def main() -> None:
    verb, name = sys.argv[1:3]
    if verb == "serve":
        url, tenants = sys.argv[4], int(sys.argv[5])
        serve_celery(url, tenants, batches=name == "celery_batches")
        return
    address, clients, seconds = sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
    tenants, engine = int(sys.argv[6]), sys.argv[7]
    if name == "ours":
        measured = load_ours(address, clients, seconds, tenants, engine)
    elif name == "in_process":
        measured = load_in_process(clients, seconds, tenants)
    elif name in ("mosec", "litserve"):
        measured = load_http(name, address, clients, seconds, tenants)
    else:
        measured = load_celery(name, address, clients, seconds, tenants)
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = measured.report() | {"client_cpu_s": used.ru_utime + used.ru_stime}
    print(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("C_FORCE_ROOT", "1")
    main()
