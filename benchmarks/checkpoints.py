"""Share of training time that saving every 50 steps costs, on a real S3.

    python benchmarks/checkpoints.py [--quick]

A plain loop of matrix products stands for training (float32, one thread); the same loop saves a
slot of `--megabytes` (module + AdamW state) every 50 steps through `CheckpointWriter`.
`checkpoint_stall` is the share of the run that passes inside `save`. Two details say what the
background work takes from the same cores: `cpu_share`, processor time of this process beside that
of the plain loop, and `wall_cost`, the plain loop's wall time against the saving one's, in which
the object store's own work on this machine and any other load count too. Rounds alternate; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

for _name, _value in {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items():
    os.environ.setdefault(_name, _value)

import numpy as np  # noqa: E402

from vla_platform.stack.ports import LOOPBACK, free_ports  # noqa: E402
from vla_platform.stack.servers import (  # noqa: E402
    WEED_PORTS,
    S3Address,
    guarded,
    s3_ready,
    server_environment,
    weed_server,
)
from vla_storage.checkpoints import Checkpoint, CheckpointHeader, CheckpointStore  # noqa: E402
from vla_storage.manifests import Lineage  # noqa: E402
from vla_storage.objects import S3ObjectStore  # noqa: E402
from vla_storage.retention import apply_retention  # noqa: E402
from vla_storage.staging import CheckpointWriter  # noqa: E402

SAVE_EVERY = 50
GOAL = 0.02


@contextmanager
def object_store(folder: Path) -> Iterator[S3ObjectStore]:
    """The S3 that `VLA_S3_ENDPOINT` names, or a SeaweedFS of our own for the time being."""
    if endpoint := os.environ.get("VLA_S3_ENDPOINT"):
        with S3ObjectStore(
            os.environ.get("VLA_S3_BUCKET", "vla"),
            endpoint=endpoint,
            access_key=os.environ["VLA_S3_ACCESS_KEY"],
            secret_key=os.environ["VLA_S3_SECRET_KEY"],
        ) as store:
            yield store
        return
    ports = free_ports(WEED_PORTS)
    address = S3Address(
        endpoint=f"http://{LOOPBACK}:{ports['s3']}",
        access_key="benchmark",
        secret_key=secrets.token_hex(16),
        bucket="bench",
    )
    server = weed_server("s3", folder, ports, address)
    process = subprocess.Popen(
        guarded(server.command),
        cwd=folder,
        env=server_environment(server),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not s3_ready(address):
            if process.poll() is not None:
                raise SystemExit("SeaweedFS did not start")
            time.sleep(0.05)
        with S3ObjectStore(
            address.bucket,
            endpoint=address.endpoint,
            access_key=address.access_key,
            secret_key=address.secret_key,
        ) as store:
            yield store
    finally:
        process.kill()
        process.wait()


def slot(megabytes: float) -> dict[str, np.ndarray]:
    """Eight weight matrices and their two AdamW moments, `megabytes` in all."""
    side = max(8, int((megabytes * (1 << 20) / 4 / 24) ** 0.5))
    rng = np.random.default_rng(0)
    return {
        f"{kind}.{i}": rng.standard_normal((side, side), np.float32)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for i in range(8)
    }


def checkpoint(tensors: dict[str, np.ndarray], workload: str, step: int) -> Checkpoint:
    return Checkpoint(
        header=CheckpointHeader(
            policy="bench",
            workload_id=workload,
            step=step,
            policy_version=step,
            position=8 * step,
            lineage=Lineage(
                spec_digest="s", dataset_digest="d", base_digest="b", schema_signature="g"
            ),
        ),
        module={n: a for n, a in tensors.items() if n.startswith("weight")},
        optimizer={n: a for n, a in tensors.items() if not n.startswith("weight")},
        state={"step": step},
    )


class Training:
    """`step` takes about `step_ms`: as many products of one size as that needs here."""

    def __init__(self, step_ms: float) -> None:
        self._a = np.random.default_rng(1).standard_normal((192, 192), np.float32) / 14
        self._x = self._a.copy()
        started = time.perf_counter()
        for _ in range(50):
            self._product()
        per_product_s = (time.perf_counter() - started) / 50
        self._products = max(1, round(step_ms / 1000 / per_product_s))

    def _product(self) -> None:
        self._x = np.tanh(self._a @ self._x)

    def step(self) -> None:
        for _ in range(self._products):
            self._product()


def run(
    training: Training,
    steps: int,
    tensors: dict[str, np.ndarray],
    workload: str,
    writer: CheckpointWriter | None,
    store: CheckpointStore,
) -> tuple[float, float]:
    """Seconds of the whole loop, and of the calls to `save` in it."""
    stalled = 0.0
    started = time.perf_counter()
    for step in range(1, steps + 1):
        training.step()
        tensors["weight.0"] += 1e-3
        if writer is not None and step % SAVE_EVERY == 0:
            before = time.perf_counter()
            writer.save(store, checkpoint(tensors, workload, step))
            stalled += time.perf_counter() - before
    return time.perf_counter() - started, stalled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; same result names")
    parser.add_argument("--megabytes", type=float, default=20.0, help="module + optimizer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one training step")
    options = parser.parse_args()
    rounds, steps = (5, 400) if options.quick else (9, 400)

    tensors = slot(options.megabytes)
    stalls, costs, cpu_shares, save_ms, publish_ms = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder, object_store(Path(folder)) as objects:
        store = CheckpointStore(objects=objects, tenant_id="bench", signing_key=b"benchmark")
        training = Training(options.step_ms)
        run(training, 20, tensors, "warm-up", None, store)
        for number in range(rounds):
            cpu = time.process_time()
            plain_s, _ = run(training, steps, tensors, "none", None, store)
            plain_cpu_s = time.process_time() - cpu
            cpu = time.process_time()
            with tempfile.TemporaryDirectory() as staging:
                writer = CheckpointWriter(Path(staging))
                workload = f"w{number}"
                saving_s, stalled_s = run(training, steps, tensors, workload, writer, store)
                before = time.perf_counter()
                if not writer.close(120):
                    raise SystemExit("the object store did not keep up")
                drain_s = time.perf_counter() - before
            cpu_shares.append((time.process_time() - cpu) / plain_cpu_s - 1)
            before = time.perf_counter()
            store.publish(
                (probe := checkpoint(tensors, workload, steps + 1)).header, probe.bodies()
            )
            publish_ms.append(1000 * (time.perf_counter() - before))
            found = [ref.step for ref in store.list("bench", workload)]
            assert found == [*range(SAVE_EVERY, steps + 1, SAVE_EVERY), steps + 1], found
            apply_retention(store, "bench", keep_last=1, workload_id=workload)
            stalls.append(stalled_s / saving_s)
            save_ms.append(1000 * stalled_s * SAVE_EVERY / steps)
            costs.append(saving_s / plain_s - 1)
            print(
                f"round {number + 1}/{rounds}: plain {plain_s:.2f} s, saving {saving_s:.2f} s, "
                f"in save() {1000 * stalled_s:.0f} ms, drained in {drain_s:.2f} s",
                file=sys.stderr,
            )
    size_mb = sum(array.nbytes for array in tensors.values()) / (1 << 20)
    print(
        json.dumps(
            {
                "benchmark": "checkpoints",
                "commit": commit(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "targets": {
                    "checkpoint_stall": {
                        "value": round(statistics.median(stalls), 5),
                        "goal": GOAL,
                        "unit": "share of training time",
                    }
                },
                "details": {
                    "wall_cost": round(statistics.median(costs), 4),
                    "cpu_share": round(statistics.median(cpu_shares), 4),
                    "save_ms": round(statistics.median(save_ms), 2),
                    "publish_ms": round(statistics.median(publish_ms), 1),
                    "checkpoint_mb": round(size_mb, 1),
                    "step_ms": options.step_ms,
                    "save_every": SAVE_EVERY,
                },
            }
        )
    )


def commit() -> str:
    done = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
