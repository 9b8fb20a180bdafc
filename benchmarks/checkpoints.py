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
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

for _name, _value in {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items():
    os.environ.setdefault(_name, _value)

import numpy as np  # noqa: E402
from result_line import print_result, target  # noqa: E402

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
        with address.objects() as store:
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


@dataclass(frozen=True, kw_only=True)
class Round:
    """What saving cost beside the plain loop."""

    stall: float  # share of the saving loop
    wall_cost: float
    cpu_share: float
    save_ms: float
    publish_ms: float


def measure(
    training: Training, steps: int, tensors: dict[str, np.ndarray], store: CheckpointStore,
    workload: str,
) -> Round:  # fmt: skip
    """A plain loop and one that saves, after each other."""
    cpu = time.process_time()
    plain_s, _ = run(training, steps, tensors, "none", None, store)
    plain_cpu_s = time.process_time() - cpu
    cpu = time.process_time()
    with tempfile.TemporaryDirectory() as staging:
        writer = CheckpointWriter(Path(staging))
        saving_s, stalled_s = run(training, steps, tensors, workload, writer, store)
        before = time.perf_counter()
        if not writer.close(120):
            raise SystemExit("the object store did not keep up")
        drain_s = time.perf_counter() - before
    saving_cpu_s = time.process_time() - cpu
    before = time.perf_counter()
    probe = checkpoint(tensors, workload, steps + 1)
    store.publish(probe.header, probe.bodies())
    publish_s = time.perf_counter() - before
    found = [ref.step for ref in store.list("bench", workload)]
    assert found == [*range(SAVE_EVERY, steps + 1, SAVE_EVERY), steps + 1], found
    apply_retention(store, "bench", keep_last=1, workload_id=workload)
    print(
        f"{workload}: plain {plain_s:.2f} s, saving {saving_s:.2f} s, "
        f"in save() {1000 * stalled_s:.0f} ms, drained in {drain_s:.2f} s",
        file=sys.stderr,
    )
    return Round(
        stall=stalled_s / saving_s,
        wall_cost=saving_s / plain_s - 1,
        cpu_share=saving_cpu_s / plain_cpu_s - 1,
        save_ms=1000 * stalled_s * SAVE_EVERY / steps,
        publish_ms=1000 * publish_s,
    )


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
    with tempfile.TemporaryDirectory() as folder, object_store(Path(folder)) as objects:
        store = CheckpointStore(objects=objects, tenant_id="bench", signing_key=b"benchmark")
        training = Training(options.step_ms)
        run(training, 20, tensors, "warm-up", None, store)
        found = [
            measure(training, steps, tensors, store, f"round-{number}-of-{rounds}")
            for number in range(1, rounds + 1)
        ]
    size_mb = sum(array.nbytes for array in tensors.values()) / (1 << 20)
    stall = statistics.median(one.stall for one in found)
    print_result(
        "checkpoints",
        {"checkpoint_stall": target(stall, GOAL, "share of training time", digits=5)},
        {
            "wall_cost": round(statistics.median(one.wall_cost for one in found), 4),
            "cpu_share": round(statistics.median(one.cpu_share for one in found), 4),
            "save_ms": round(statistics.median(one.save_ms for one in found), 2),
            "publish_ms": round(statistics.median(one.publish_ms for one in found), 1),
            "checkpoint_mb": round(size_mb, 1),
            "step_ms": options.step_ms,
            "save_every": SAVE_EVERY,
        },
    )


if __name__ == "__main__":
    main()
