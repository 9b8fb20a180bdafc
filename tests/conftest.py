"""Real services for the tests, started once per session in a temporary folder.

Locally a test whose service cannot start is skipped; with CI set it fails.
"""

from __future__ import annotations

import os

# Before anything imports torch or numpy: two cores are shared, and spinning threads only lose.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(SINGLE_THREADED)

import contextlib  # noqa: E402
import secrets  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import boto3  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import redis  # noqa: E402

from vla_platform.errors import ConfigurationError  # noqa: E402
from vla_platform.stack.ports import LOOPBACK, free_ports  # noqa: E402
from vla_platform.stack.servers import (  # noqa: E402
    REDIS_PORTS,
    WEED_PORTS,
    S3Address,
    Server,
    guarded,
    redis_ready,
    redis_server,
    s3_ready,
    server_environment,
    weed_server,
)
from vla_storage.checkpoints import Checkpoint, CheckpointHeader  # noqa: E402
from vla_storage.manifests import Lineage  # noqa: E402

START_S = 30.0


def unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def running(server: Server, is_ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, wait until it is ready, stop it and its children at the end."""
    server.folder.mkdir(parents=True, exist_ok=True)
    log = server.folder / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            guarded(server.command),
            cwd=server.folder,
            env=server_environment(server),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-1500:]
                unavailable(f"{server.name} did not start:\n{tail}")
            time.sleep(0.02)
        yield process
    finally:
        # Its data go with the folder: no need for the seconds that an orderly stop takes.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def _redis_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("redis")
    ports = free_ports(REDIS_PORTS)
    urls = {name: f"redis://{LOOPBACK}:{port}/0" for name, port in ports.items()}
    with contextlib.ExitStack() as stack:
        for name, port in ports.items():
            try:
                server = redis_server(name, folder / name, port, persistent=name == "redis-control")
            except ConfigurationError as error:
                unavailable(str(error))
            url = urls[name]
            stack.enter_context(running(server, lambda url=url: redis_ready(url)))  # type: ignore[misc]
        yield urls


def _flushed(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture
def control_redis_url(_redis_urls: dict[str, str]) -> str:
    """URL of an empty, append-only Valkey without a password."""
    return _flushed(_redis_urls["redis-control"])


@pytest.fixture
def payload_redis_url(_redis_urls: dict[str, str]) -> str:
    """URL of an empty, non-persistent Valkey, another process than the control one."""
    return _flushed(_redis_urls["redis-payload"])


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Address]:
    """A SeaweedFS with IAM for the whole session; tests that need an empty bucket take `s3`."""
    ports = free_ports(WEED_PORTS)
    address = S3Address(
        endpoint=f"http://{LOOPBACK}:{ports['s3']}",
        access_key="test-admin",
        secret_key=secrets.token_hex(20),
        bucket="vla-test",
    )
    try:
        server = weed_server("s3", tmp_path_factory.mktemp("s3"), ports, address)
    except ConfigurationError as error:
        unavailable(str(error))
    with running(server, lambda: s3_ready(address)):
        yield address


@pytest.fixture
def s3(s3_server: S3Address) -> S3Address:
    """Endpoint, admin credentials and an empty bucket of a real S3."""
    client = boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint,
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
        region_name="us-east-1",
    )
    with contextlib.closing(client):
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=s3_server.bucket):
            for item in page.get("Contents", []):
                client.delete_object(Bucket=s3_server.bucket, Key=item["Key"])
    return s3_server


@pytest.fixture
def single_threaded() -> dict[str, str]:
    """The environment that a subprocess under test has to get, on top of `os.environ`."""
    return dict(SINGLE_THREADED)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def make_checkpoint() -> Callable[..., Checkpoint]:
    """A small checkpoint whose values follow from its step (or from `value`)."""

    def make(
        step: int, *, workload: str = "w1", policy: str = "reach", value: float | None = None
    ) -> Checkpoint:
        weight = float(step) if value is None else value
        return Checkpoint(
            header=CheckpointHeader(
                policy=policy,
                workload_id=workload,
                step=step,
                policy_version=step,
                position=8 * step,
                lineage=Lineage(
                    spec_digest="s", dataset_digest="d", base_digest="b", schema_signature="g"
                ),
            ),
            module={"w": np.full((4, 3), weight, np.float32), "b": np.zeros((), np.float64)},
            optimizer={"w.exp_avg": np.full((4, 3), weight / 2, np.float32)},
            state={"step": step, "lr": 1e-4, "rng": [1, 2, 3]},
        )

    return make
