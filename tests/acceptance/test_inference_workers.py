"""Two real GPU workers serve several tenants; one is killed, the broker goes and comes back.

Every request is answered or failed by its deadline, and no answer is another tenant's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from celery import Celery

torch = pytest.importorskip("torch")

from tests.conftest import running  # noqa: E402
from tests.published import publish  # noqa: E402
from tests.unit.gpu_workers.conftest import config_maker  # noqa: E402
from tests.unit.gpu_workers.test_inference import weights_of  # noqa: E402
from tests.waiting import wait_until  # noqa: E402
from vla_platform.client.inference import InferenceProxy  # noqa: E402
from vla_platform.control.ledger import Ledger  # noqa: E402
from vla_platform.control.tenants import TENANTS_KEY  # noqa: E402
from vla_platform.envs.base import Observation  # noqa: E402
from vla_platform.errors import NotFoundError  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.inference import InferenceModelService, RunPart  # noqa: E402
from vla_platform.gpu_workers.inference_metrics import TASK_NAME  # noqa: E402
from vla_platform.gpu_workers.module_source import MemoryModuleSource  # noqa: E402
from vla_platform.gpu_workers.module_versions import ModuleVersions  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.weights import Weights  # noqa: E402
from vla_platform.inference.protocol import Prediction, PredictRequest, RowShape  # noqa: E402
from vla_platform.specs import FlowMatchingModule  # noqa: E402
from vla_platform.stack.ports import LOOPBACK, free_ports  # noqa: E402
from vla_platform.stack.servers import S3Address, redis_ready, redis_server  # noqa: E402
from vla_storage.checkpoints import CheckpointStore  # noqa: E402
from vla_storage.objects import S3ObjectStore  # noqa: E402

pytestmark = [pytest.mark.services, pytest.mark.slow]
BASE = "tiny-random"
READY_S = 90.0


@dataclasses.dataclass
class Platform:
    """Services, tenants with a policy each, and workers that may be killed."""

    environment: dict[str, str]
    folder: Path
    ledger: Ledger
    objects: S3ObjectStore
    signing_key: bytes
    configs: list[SlotConfig]
    backbone: Backbone
    proxy: InferenceProxy
    payload: PayloadServer
    workers: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def publish(self, config: SlotConfig, weights: Weights) -> None:
        store = CheckpointStore(
            objects=self.objects,
            tenant_id=config.policy_key.partition("/")[0],
            signing_key=self.signing_key,
        )
        publish(store, self.ledger, config, weights)

    def start_worker(self) -> subprocess.Popen[bytes]:
        number = len(self.workers)
        ready = self.folder / f"ready-{number}"
        with (self.folder / f"worker-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                (
                    *(sys.executable, "-m", "celery", "-A", "vla_platform.app:app", "worker"),
                    *("--queues", "none", "--hostname", f"gpu{number}@%h", "--pool", "threads"),
                    *("--concurrency", "1", "--loglevel", "INFO", "--without-mingle"),
                ),
                env={**os.environ, **self.environment, "VLA_READY_FILE": str(ready)},
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.workers.append(process)
        wait_until(lambda: ready.exists() or process.poll() is not None, READY_S)
        assert process.poll() is None, (self.folder / f"worker-{number}.log").read_text()[-3000:]
        return process

    def log(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("worker-*.log"))


class PayloadServer:
    def __init__(self, folder: Path) -> None:
        self.port = free_ports(("redis",))["redis"]
        self.url = f"redis://{LOOPBACK}:{self.port}/0"
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        server = redis_server("payload", self._folder, self.port, persistent=False)
        self._stack.enter_context(running(server, lambda: redis_ready(self.url)))

    def kill(self) -> None:
        self._stack.close()


@pytest.fixture
def platform(
    tmp_path: Path, control_redis_url: str, s3: S3Address, single_threaded: dict[str, str]
) -> Iterator[Platform]:
    torch.set_num_threads(1)
    payload = PayloadServer(tmp_path / "payload")
    payload.start()
    key_file = tmp_path / "signing.key"
    key_file.write_text(secrets.token_hex(32))
    environment = {
        **single_threaded,
        "VLA_REDIS_URL": control_redis_url,
        "VLA_PAYLOAD_URL": payload.url,
        "VLA_S3_ENDPOINT": s3.endpoint,
        "VLA_S3_ACCESS_KEY": s3.access_key,
        "VLA_S3_SECRET_KEY": s3.secret_key,
        "VLA_S3_BUCKET": s3.bucket,
        "VLA_SIGNING_KEY_FILE": str(key_file),
        "VLA_ROLE": "gpu",
        "VLA_GPU_ROLES": "inference",
        "VLA_BASE_MODELS": BASE,
        "VLA_VAR": str(tmp_path),
    }
    objects = s3.objects()
    ledger = Ledger.connect(control_redis_url)
    ledger.load()
    backbone = Backbone.load(BASE)
    make = config_maker(backbone)
    flow = FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2)
    configs = [
        make("acme", seed=1),
        make("zeta", seed=2),
        make("flow", module=flow, cameras=("top", "wrist"), action_dim=5, seed=3),
    ]
    proxy = InferenceProxy.connect(payload.url, ledger.base_model_of)
    found = Platform(
        environment, tmp_path, ledger, objects, key_file.read_bytes(), configs, backbone, proxy,
        payload,
    )  # fmt: skip
    for config in configs:
        found.publish(config, weights_of(config, backbone))
        ledger.client.sadd(TENANTS_KEY, config.policy_key.partition("/")[0])
    yield found
    proxy.close()
    for worker in found.workers:
        worker.kill()
        worker.wait()
    payload.kill()
    ledger.close()
    objects.close()


def observation(config: SlotConfig, number: int) -> Observation:
    rng = np.random.default_rng(number)
    images = {
        name: rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for name in config.schema.cameras
    }
    return Observation(images, rng.uniform(-1, 1, 2).astype(np.float32), "reach the block")


def expected_actions(platform: Platform, count: int) -> dict[tuple[str, int], np.ndarray[Any, Any]]:
    """What each tenant would get alone, computed here."""
    source = MemoryModuleSource()
    for config in platform.configs:
        source.put(config.policy_key, weights_of(config, platform.backbone))
    versions = ModuleVersions(
        source,
        base_digest=platform.backbone.digest,
        feature_dim=platform.backbone.hidden_dim,
        device=platform.backbone.device,
    )
    service = InferenceModelService(platform.backbone, versions)
    found = {}
    for config in platform.configs:
        tenant, _, policy = config.policy_key.partition("/")
        for number in range(count):
            seen = observation(config, number)
            shape = RowShape(cameras=tuple((name, 64, 64) for name in seen.images), state_dim=2)
            request = PredictRequest(
                request_id="r", policy=policy, version=1, tasks=(seen.task,), row=shape,
                timeout_s=1.0, place=(0, -1),
            )  # fmt: skip
            raw = np.concatenate(
                [*(image.reshape(-1) for image in seen.images.values()), seen.state.view(np.uint8)]
            )
            prepared = service.prepare(tenant, "c" * 32, request, raw)
            if isinstance(prepared, Future):
                prepared.result(30)
                prepared = service.prepare(tenant, "c" * 32, request, raw)
            assert not isinstance(prepared, Future)
            outcome = service.run([RunPart(prepared, 0, 1)])[0][0]
            assert isinstance(outcome, Prediction)
            found[tenant, number] = outcome.actions
    versions.close()
    return found


class Load:
    """Closed-loop clients of all tenants; every answer is compared with what it has to be."""

    def __init__(self, platform: Platform, *, per_tenant: int = 3, timeout_s: float = 30.0) -> None:
        self.expected = expected_actions(platform, 4)
        self.answered = 0
        self.last_answer = 0.0
        self.wrong: list[str] = []
        self.failed: list[Exception] = []
        self._platform, self._timeout_s = platform, timeout_s
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(config, number))
            for config in platform.configs
            for number in range(per_tenant)
        ]
        for thread in self._threads:
            thread.start()

    def _client(self, config: SlotConfig, number: int) -> None:
        tenant, _, policy = config.policy_key.partition("/")
        seen = observation(config, number % 4)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                found = self._platform.proxy.predict(
                    seen, tenant=tenant, policy=policy, timeout_s=self._timeout_s
                )
            except Exception as error:
                self.failed.append(error)
                continue
            late = time.monotonic() - began - self._timeout_s
            expected = self.expected[tenant, number % 4]
            if late > 1.0 or np.abs(expected - found.actions).max() > 1e-5:
                self.wrong.append(f"{tenant} {number} late {late:.1f} s")
            self.answered += 1
            self.last_answer = time.monotonic()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def test_a_killed_worker_and_a_restarted_broker_cost_no_answer(platform: Platform):
    platform.start_worker()
    platform.start_worker()
    load = Load(platform)
    wait_until(lambda: load.answered > 30, 60)
    os.kill(platform.workers[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    before = load.answered
    wait_until(lambda: load.answered > before + 60, 60)
    recovered = time.monotonic() - killed
    platform.payload.kill()
    time.sleep(0.5)
    platform.payload.start()
    restarted = time.monotonic()
    before = load.answered
    wait_until(lambda: load.answered > before + 20, 60)
    served_again = time.monotonic() - restarted
    for _ in range(10):  # flapping
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(platform.payload.url) as c:
            c.client_kill_filter(_type="normal", skipme=True)
        time.sleep(0.3)
    flapped, before = time.monotonic(), load.answered
    wait_until(lambda: load.answered > before + 20, 60)
    served_after_flapping = time.monotonic() - flapped
    load.stop()
    assert load.wrong == []
    assert load.failed == []
    assert recovered < 15.0
    assert served_again < 10.0
    assert served_after_flapping < 10.0


def test_new_versions_are_served_unknown_ones_are_errors_and_celery_sees_the_batches(
    platform: Platform,
):
    worker = platform.start_worker()
    config = platform.configs[0]
    seen = observation(config, 0)

    def ask(**options: Any) -> Prediction:
        return platform.proxy.predict(seen, tenant="acme", policy="task", timeout_s=20.0, **options)

    assert ask().policy_version == 1
    with pytest.raises(NotFoundError):
        ask(version=7)
    with pytest.raises(NotFoundError):
        platform.proxy.predict(seen, tenant="nobody", policy="task")
    two = weights_of(config, platform.backbone, version=2)
    platform.publish(config, two)
    assert two.digest == ask(version=2).module_digest
    wait_until(lambda: ask().policy_version == 2, 20)
    assert ask(version=1).policy_version == 1

    app = Celery(broker=platform.environment["VLA_REDIS_URL"], set_as_current=False)
    seen_events: list[str] = []

    with app.connection_for_read() as connection:

        def collect(event: dict[str, Any]) -> None:
            if event.get("name") == TASK_NAME or event["type"] == "task-succeeded":
                seen_events.append(event["type"])
            receiver.should_stop = "task-succeeded" in seen_events

        receiver = app.events.Receiver(connection, handlers={"*": collect})
        listening = threading.Thread(
            target=lambda: receiver.capture(limit=None, timeout=None, wakeup=False)
        )
        listening.start()
        end = time.monotonic() + 30
        while listening.is_alive() and time.monotonic() < end:
            ask()
            time.sleep(0.1)
        receiver.should_stop = True
        listening.join(10)
        assert {"task-received", "task-succeeded"} <= set(seen_events)
        assert len(app.control.inspect(timeout=5.0).ping() or {}) == 1
    app.close()
    worker.terminate()
    assert worker.wait(60) == 0, platform.log()
