"""Workers: listed, drained and taken back, with a real one on a real Valkey."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from tests.waiting import wait_until
from vla_platform.broker import queue
from vla_platform.errors import NotFoundError, UnavailableError
from vla_platform.operators.workers import Workers

pytestmark = pytest.mark.services

APP = """
import time
from celery import Celery
from vla_platform.broker import queue
app = Celery("w", broker={url!r}, backend={url!r})
app.conf.update(task_queues=[queue("one"), queue("two")], task_default_queue="one",
                worker_prefetch_multiplier=1, task_acks_late=True)
@app.task(name="slow")
def slow(seconds):
    time.sleep(seconds)
    return seconds
"""


@pytest.fixture
def worker(control_redis_url: str, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "module_w.py").write_text(APP.format(url=control_redis_url))
    process = subprocess.Popen(
        (sys.executable, "-m", "celery", "-A", "module_w", "worker", "-Q", "one,two", "-n",
         "w@%h", "--pool", "threads", "-c", "1", "--without-mingle"),
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield control_redis_url
    process.send_signal(signal.SIGTERM)
    process.wait(20)


def test_a_drained_worker_ends_its_task_and_takes_no_other(worker: str) -> None:
    with redis.Redis.from_url(worker, decode_responses=True) as client:
        workers = Workers(worker, client, timeout_s=1.0)

        def there() -> bool:
            try:
                return len(workers.rows()) == 1
            except UnavailableError:
                return False

        wait_until(there)
        (row,) = workers.rows()
        assert (row.state, row.queues, row.active) == ("online", ("one", "two"), ())
        app = Celery("sender", broker=worker, backend=worker, set_as_current=False)
        first = app.send_task("slow", args=[8.0], queue=queue("one"))
        wait_until(lambda: workers.rows()[0].active == ("slow",))
        assert workers.drain("w") == ["one", "two"]
        assert workers.drain("w") == []
        assert workers.rows()[0].state == "drained"
        later = app.send_task("slow", args=[0.0], queue=queue("two"))
        assert first.get(timeout=20) == 8.0
        wait_until(lambda: workers.is_idle("w"))
        assert not later.ready()
        assert workers.undrain("w") == ["one", "two"]
        assert later.get(timeout=20) == 0.0
        assert workers.rows()[0].state == "online"
        with pytest.raises(NotFoundError, match="there are w@"):
            workers.drain("nobody")
        app.close()
        workers.close()


def test_nobody_there_is_told(control_redis_url: str) -> None:
    with redis.Redis.from_url(control_redis_url, decode_responses=True) as client:
        workers = Workers(control_redis_url, client, timeout_s=0.2)
        with pytest.raises(UnavailableError, match="no worker answers"):
            workers.rows()
        workers.close()
