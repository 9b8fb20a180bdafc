"""One contender of `payloads.py`, in an environment of its own: a producer and a consumer process.

    python payload_contenders.py {ours_local,ours_redis,transferqueue,ray,celery} ROWS [ADDRESS...]

Reads `OPERATION PARTITION` a line, answers with the operation's time and the memory it took, JSON a
line. The consumer is another process than the producer: a Ray actor for Ray and TransferQueue, a
spawned one for the others. Times are taken in the process that does the work.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OPERATIONS = ("put", "list", "column", "all", "clear")
SMALL = "logprob"


def batch(rows: int) -> dict[str, np.ndarray]:
    """77 MB for 64 rows: 8 frames, state, action chunk, log-probabilities of a chunk."""
    rng = np.random.default_rng(0)
    return {
        "images": rng.integers(0, 255, (rows, 8, 224, 224, 3), dtype=np.uint8),
        "state": rng.normal(size=(rows, 8)).astype(np.float32),
        "actions": rng.normal(size=(rows, 16, 7)).astype(np.float32),
        "logprob": rng.normal(size=(rows, 16)).astype(np.float32),
    }


def touched(array: np.ndarray) -> int:
    """Reads every byte; equal arrays give equal sums."""
    flat = array.reshape(-1).view(np.uint8)
    return int(flat[: flat.size // 8 * 8].view(np.uint64).sum(dtype=np.uint64))


def expected_sum(columns: dict[str, np.ndarray]) -> int:
    return sum(touched(array) for array in columns.values()) % 2**64


def peak_bytes() -> int:
    """The process's own memory at its highest since `reset_peak`; shared pages do not count."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared = int(fields["RssShmem"].split()[0])
    return (int(fields["VmHWM"].split()[0]) - shared) << 10


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(call: Callable[[], Any]) -> tuple[float, int, Any]:
    """Milliseconds, bytes of growth, and the result."""
    reset_peak()
    before = peak_bytes()
    started = time.perf_counter()
    result = call()
    spent_ms = (time.perf_counter() - started) * 1000
    return spent_ms, max(0, peak_bytes() - before), result


class Ours:
    """`addresses`: URL of a payload Redis, and an arena for the local one."""

    def __init__(self, addresses: list[str]) -> None:
        from vla_storage.payloads import ArenaTier, RedisPayloadStore

        local = [ArenaTier(Path(addresses[1]))] if len(addresses) > 1 else []
        self.store = RedisPayloadStore([addresses[0]], local=local)

    def put(self, partition: str, columns: dict[str, Any]) -> None:
        infos = self.store.put(partition, "bench", columns, ttl_s=600)
        wanted = "arena" if "arena" in self.store._tiers else "redis"
        assert {info.tiers for info in infos.values()} == {(wanted,)}

    def list(self, partition: str) -> int:
        return len(self.store.metadata(partition, "bench")["images"].rows)

    def column(self, partition: str) -> int:
        return touched(self.store.arrays(partition, "bench", [SMALL])[SMALL])

    def all(self, partition: str) -> int:
        return expected_sum(self.store.arrays(partition, "bench"))

    def clear(self, partition: str) -> None:
        self.store.clear(partition, "bench")


class CeleryResults:
    """Whole batches as pickled task results on the Redis backend."""

    def __init__(self, addresses: list[str]) -> None:
        from celery import Celery

        self.app = Celery("bench", backend=addresses[0], set_as_current=False)
        self.app.conf.update(
            result_serializer="pickle", result_accept_content=["pickle"], result_expires=600
        )

    def put(self, partition: str, columns: dict[str, Any]) -> None:
        self.app.backend.store_result(partition, columns, "SUCCESS")

    def _read(self, partition: str) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = self.app.AsyncResult(partition).get(timeout=60)
        return found

    def list(self, partition: str) -> int:
        return len(self._read(partition)["images"])

    def column(self, partition: str) -> int:
        return touched(self._read(partition)[SMALL])

    def all(self, partition: str) -> int:
        return expected_sum(self._read(partition))

    def clear(self, partition: str) -> None:
        self.app.AsyncResult(partition).forget()


class RayObjects:
    """One object per column. Ray's objects have no names, so an actor keeps the references of each
    partition, as any system on Ray has to; `bare_ms` is the time without asking it."""

    def __init__(self, addresses: list[str]) -> None:
        import ray

        class Directory:
            def __init__(self) -> None:
                self.refs: dict[str, dict[str, Any]] = {}

            def register(self, partition: str, refs: dict[str, Any]) -> None:
                self.refs[partition] = refs

            def lookup(self, partition: str) -> dict[str, Any]:
                return self.refs[partition]

            def clear(self, partition: str) -> None:
                self.refs.pop(partition, None)

        self.directory = (
            ray.remote(Directory)
            .options(name="directory", namespace="bench", get_if_exists=True, lifetime="detached")
            .remote()
        )
        self.bare_ms: float | None = None

    def put(self, partition: str, columns: dict[str, Any]) -> None:
        import ray

        started = time.perf_counter()
        refs = {name: ray.put(array) for name, array in columns.items()}
        self.bare_ms = (time.perf_counter() - started) * 1000
        ray.get(self.directory.register.remote(partition, refs))

    def list(self, partition: str) -> int:
        import ray

        self.bare_ms = None
        return len(ray.get(self.directory.lookup.remote(partition)))

    def _read(self, partition: str, names: list[str] | None) -> int:
        import ray

        refs = ray.get(self.directory.lookup.remote(partition))
        started = time.perf_counter()
        chosen = list(refs) if names is None else names
        arrays = ray.get([refs[name] for name in chosen])
        found = expected_sum(dict(zip(chosen, arrays, strict=True)))
        self.bare_ms = (time.perf_counter() - started) * 1000
        return found

    def column(self, partition: str) -> int:
        return self._read(partition, [SMALL])

    def all(self, partition: str) -> int:
        return self._read(partition, None)

    def clear(self, partition: str) -> None:
        import ray

        ray.get(self.directory.clear.remote(partition))


class TransferQueue:
    """SimpleStorage through `kv_batch_*`, one key per sample."""

    def __init__(self, addresses: list[str]) -> None:
        import transfer_queue

        self.queue = transfer_queue
        transfer_queue.init()
        self.keys = [f"s{number}" for number in range(int(os.environ["BENCH_ROWS"]))]

    def put(self, partition: str, columns: Any) -> None:
        self.queue.kv_batch_put(keys=self.keys, partition_id=partition, fields=columns)

    def list(self, partition: str) -> int:
        return len(self.queue.kv_list(partition)[partition])

    def _read(self, partition: str, names: list[str] | None) -> dict[str, list[np.ndarray]]:
        found = self.queue.kv_batch_get(keys=self.keys, partition_id=partition, select_fields=names)
        return {
            name: [row.numpy() for row in found[name].unbind(0)] for name in tuple(found.keys())
        }

    def column(self, partition: str) -> int:
        return sum(map(touched, self._read(partition, [SMALL])[SMALL])) % 2**64

    def all(self, partition: str) -> int:
        return (
            sum(touched(r) for rows in self._read(partition, None).values() for r in rows) % 2**64
        )

    def clear(self, partition: str) -> None:
        self.queue.kv_clear(keys=self.keys, partition_id=partition)


CONTENDERS: dict[str, Any] = {
    "ours_local": Ours,
    "ours_redis": Ours,
    "transferqueue": TransferQueue,
    "ray": RayObjects,
    "celery": CeleryResults,
}


def consume(name: str, addresses: list[str], pipe: Any) -> None:
    """The spawned consumer's loop."""
    contender = CONTENDERS[name](addresses)
    while True:
        try:
            operation, partition = pipe.recv()
        except EOFError:
            return
        work = functools.partial(getattr(contender, operation), partition)
        pipe.send((*measured(work), None))


def spawned(name: str, addresses: list[str]) -> Callable[[str, str], Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=consume, args=(name, addresses, there), daemon=True).start()

    def call(operation: str, partition: str) -> Any:
        here.send((operation, partition))
        return here.recv()

    return call


def ray_actor(name: str) -> Callable[[str, str], Any]:
    import ray

    class Consumer:
        def __init__(self, name: str, folder: str) -> None:
            sys.path.insert(0, folder)
            import payload_contenders

            self.module = payload_contenders
            self.contender = payload_contenders.CONTENDERS[name]([])

        def call(self, operation: str, partition: str) -> Any:
            work = getattr(self.contender, operation)
            answer = self.module.measured(lambda: work(partition))
            return (*answer, getattr(self.contender, "bare_ms", None))

    actor = ray.remote(Consumer).remote(name, str(Path(__file__).parent))

    def call(operation: str, partition: str) -> Any:
        return ray.get(actor.call.remote(operation, partition))

    return call


def main() -> None:
    name, rows, addresses = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    os.environ["BENCH_ROWS"] = str(rows)
    columns: Any = batch(rows)
    sums = {"all": expected_sum(columns), "column": touched(columns[SMALL])}
    if name in ("ray", "transferqueue"):
        import ray

        ray.init(
            num_cpus=4, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False,
            namespace="bench",
        )  # fmt: skip
        producer = CONTENDERS[name]([])
        consumer = ray_actor(name)
    else:
        producer = CONTENDERS[name](addresses)
        consumer = spawned(name, addresses)
    if name == "transferqueue":
        import torch
        from tensordict import TensorDict

        columns = TensorDict(
            {key: torch.from_numpy(array) for key, array in columns.items()}, batch_size=rows
        )
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        operation, partition = line.split()
        bare = None
        if operation == "put":
            spent, grown, _ = measured(lambda partition=partition: producer.put(partition, columns))
            bare = getattr(producer, "bare_ms", None)
        elif operation == "clear":
            spent, grown, _ = measured(lambda partition=partition: producer.clear(partition))
        else:
            spent, grown, result, bare = consumer(operation, partition)
            if sums.get(operation, result) != result:
                raise SystemExit(f"{name}: {operation} read other bytes than were put")
        print(json.dumps({"ms": spent, "grown": grown, "bare_ms": bare}), flush=True)
    if name == "transferqueue":
        producer.queue.close()


if __name__ == "__main__":
    main()
