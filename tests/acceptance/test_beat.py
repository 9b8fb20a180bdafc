"""F67: two real beats; the leader is killed, the standby takes over, no tick comes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

pytestmark = pytest.mark.services
LOCK_S = 4

APP = """
from celery import Celery
app = Celery("b", broker={url!r})
app.conf.update(
    redbeat_redis_url={url!r}, redbeat_key_prefix="vla:beat:", redbeat_lock_timeout={lock},
    redbeat_redis_options={{}}, beat_max_loop_interval=1, timezone="UTC",
    beat_schedule={{"tick": {{"task": "tick", "schedule": 1.0}}}},
)
"""


Starts = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start_beat(control_redis_url: str, tmp_path: Path) -> Iterator[Starts]:
    (tmp_path / "module_b.py").write_text(APP.format(url=control_redis_url, lock=LOCK_S))
    command = (
        *(sys.executable, "-m", "celery", "-A", "module_b", "beat"),
        *("-S", "vla_platform.control.beat.Scheduler", "--pidfile="),
    )
    found = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        found.append(process)
        return process

    yield start
    for process in found:
        process.kill()
        process.wait()


def test_f67_the_standby_takes_over_within_the_lock_timeout(
    start_beat: Starts, control_redis_url: str
) -> None:
    with redis.Redis.from_url(control_redis_url) as client:

        def wait_for(count: int, *, timeout_s: float) -> float:
            started = time.monotonic()
            while client.llen("celery") < count:
                assert time.monotonic() - started < timeout_s
                time.sleep(0.02)
            return time.monotonic() - started

        leader = start_beat()
        wait_for(2, timeout_s=40)
        start_beat()  # waits for the lock
        before = client.llen("celery")
        took_s = wait_for(before + 8, timeout_s=40)
        assert took_s > 6.0  # one tick a second, although there are two
        leader.send_signal(signal.SIGKILL)
        leader.wait()
        before = client.llen("celery")
        assert wait_for(before + 1, timeout_s=40) < LOCK_S + 2
        assert wait_for(before + 6, timeout_s=40) > 3.0
