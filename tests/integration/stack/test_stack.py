"""The stack under its supervisor: starts, restarts, stops, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import redis
from typer.testing import CliRunner

from vla_platform.cli.main import app
from vla_platform.errors import ConfigurationError
from vla_platform.stack import ProcessState, StackInfo, down, logs, status, supervisor, up
from vla_platform.stack.info import load
from vla_platform.stack.roles import Ready, Role
from vla_platform.stack.servers import S3Address
from vla_platform.stack.sweep import leftovers
from vla_storage.payloads import ArenaTier

pytestmark = pytest.mark.services

READY = (
    "import os,pathlib,time; print('hello from', os.environ['VLA_ROLE'], flush=True); "
    "pathlib.Path(os.environ['VLA_READY_FILE']).touch(); time.sleep(3600)"
)
LISTEN = (
    "import os, http.server as h; address = ('127.0.0.1', int(os.environ['VLA_PORT'])); "
    "h.HTTPServer(address, h.SimpleHTTPRequestHandler).serve_forever()"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(flush=True); time.sleep(3600)"
)


def role(name: str, code: str, *, ready: Ready = Ready.FILE, port: bool = False) -> Role:
    return Role(
        name=name,
        command=lambda _: (sys.executable, "-c", code),
        ready=ready,
        port=port,
        stop_s=2.0,
    )


ROLES = (role("control", READY), role("metrics", LISTEN, ready=Ready.TCP, port=True))


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("VLA_")}


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def pids(var: Path) -> dict[str, int | None]:
    return {item.role: item.pid for item in status(var)}


@pytest.fixture
def var(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "a folder with spaces and 100% signs"
    yield folder
    down(folder)
    assert leftovers(folder.resolve()) == []


@pytest.fixture
def stack(var: Path) -> StackInfo:
    return up(var, roles=ROLES, environment=clean_environment())


def kill_supervisor(var: Path) -> None:
    process = supervisor.daemon(var.resolve())
    assert process is not None
    process.kill()
    psutil.wait_procs([process], timeout=5)


def test_up_starts_all_and_up_again_changes_nothing(var: Path) -> None:
    progress: list[tuple[str, str]] = []
    first = up(
        var,
        roles=ROLES,
        environment=clean_environment(),
        on_progress=lambda *event: progress.append(event),
    )
    before = pids(var)
    again = up(var, roles=ROLES, environment=clean_environment())

    names = ["redis-control", "redis-payload", "s3", "control", "metrics"]
    assert names == list(before)
    assert {(name, state) for name in names for state in ("starting", "ready")} == set(progress)
    assert (first, before) == (again, pids(var))
    assert first == load(var)
    with redis.Redis.from_url(first.redis_url) as client:
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    with closing(first.s3.objects()) as objects:
        assert objects.put("a/x", b"x", if_absent=True)


def test_every_process_carries_the_marker(var: Path, stack: StackInfo) -> None:
    daemon = supervisor.daemon(var.resolve())
    assert daemon is not None
    expected = {daemon.pid, *(pid for pid in pids(var).values() if pid)}

    assert expected == {process.pid for process in leftovers(var.resolve())}


def test_secrets_are_for_the_owner_only(stack: StackInfo) -> None:
    names = ["stack.json", "credentials.json", "signing.key", "supervisord.conf"]
    files = [stack.var / name for name in names] + list((stack.var / "environment").iterdir())

    assert {0o600} == {path.stat().st_mode & 0o777 for path in files}
    command_lines = " ".join(
        " ".join(process.cmdline()) for process in leftovers(stack.var) if process.is_running()
    )
    for secret in (stack.s3.secret_key, stack.flower_password, stack.redis_url.split("@")[0]):
        assert secret not in command_lines


def test_the_brokers_users(stack: StackInfo) -> None:
    parts = stack.redis_url.split("@")[1]
    with redis.Redis.from_url(f"redis://{parts}") as anonymous, pytest.raises(redis.RedisError):
        anonymous.ping()
    variables = json.loads((stack.var / "environment" / "metrics.json").read_text())
    with redis.Redis.from_url(variables["VLA_REDIS_URL"]) as client:
        client.set("x", 1)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.flushall()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.config_set("maxmemory-policy", "allkeys-lru")


def test_a_killed_process_is_started_again_with_its_data(var: Path, stack: StackInfo) -> None:
    with redis.Redis.from_url(stack.redis_url) as client:
        client.set("kept", "yes")
    before = pids(var)
    for name in ("redis-control", "control"):
        os.kill(before[name] or 0, signal.SIGKILL)

    def back() -> bool:
        now = pids(var)
        return all(now[n] not in (None, before[n]) for n in ("redis-control", "control"))

    assert eventually(back)
    up(var, roles=ROLES, environment=clean_environment())
    with redis.Redis.from_url(stack.redis_url) as client:
        assert client.get("kept") == b"yes"


def test_the_arena_lives_as_long_as_the_stack(var: Path, stack: StackInfo) -> None:
    """Also after the supervisor was killed: `down` and the next `up` remove what is left."""
    assert stack.arena is not None
    assert stack.environment()["VLA_ARENA"] == str(stack.arena)
    ArenaTier(stack.arena).close()
    up(var, roles=ROLES, environment=clean_environment())
    assert stack.arena.exists()
    kill_supervisor(var)
    assert stack.arena.exists()
    down(var)
    assert not stack.arena.exists()


def test_down_stops_all_and_keeps_data_ports_and_secrets(var: Path, stack: StackInfo) -> None:
    with closing(stack.s3.objects()) as objects:
        objects.put("a/x", b"kept")
    with redis.Redis.from_url(stack.redis_url) as client:
        client.execute_command("ACL", "SETUSER", "tenant", "on", ">pw", "~t:*", "+get")
        client.execute_command("ACL", "SAVE")

    assert [down(var) for _ in range(2)] == [0, 0]
    assert leftovers(var.resolve()) == []
    assert {ProcessState.STOPPED} == {item.state for item in status(var)}

    again = up(var, roles=ROLES, environment=clean_environment())
    assert stack == again
    with closing(again.s3.objects()) as objects:
        assert objects.get("a/x") == b"kept"
    with redis.Redis.from_url(again.redis_url) as client:
        assert "tenant" in client.acl_users()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_killed_supervisor_takes_its_children_along(var: Path, stack: StackInfo) -> None:
    kill_supervisor(var)

    assert eventually(lambda: leftovers(var.resolve()) == [])
    again = up(var, roles=ROLES, environment=clean_environment())
    assert {ProcessState.RUNNING, ProcessState.STARTING} >= {s.state for s in status(again.var)}


def test_down_and_up_sweep_what_escaped_the_supervisor(var: Path, stack: StackInfo) -> None:
    environment = {**os.environ, supervisor.MARKER: str(var.resolve())}
    escaped = subprocess.Popen(
        (sys.executable, "-c", STUBBORN),
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert escaped.stdout is not None
    with escaped.stdout:
        escaped.stdout.readline()
    kill_supervisor(var)

    assert down(var) >= 1
    escaped.wait(5)
    assert not psutil.pid_exists(escaped.pid)


def test_the_launcher_may_be_killed(var: Path, tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(
        "import sys; from pathlib import Path; from vla_platform.stack import up\n"
        "from vla_platform.stack.roles import Role\n"
        f"role = Role(name='control', command=lambda _: (sys.executable, '-c', {READY!r}))\n"
        "up(Path(sys.argv[1]), roles=(role,))\n"
    )
    launcher = subprocess.Popen(
        (sys.executable, str(script), str(var)), env=clean_environment(), start_new_session=True
    )
    assert eventually(lambda: var.exists() and supervisor.daemon(var.resolve()) is not None)
    launcher.kill()
    launcher.wait()

    info = up(var, roles=ROLES[:1], environment=clean_environment())
    assert {"redis-control", "redis-payload", "s3", "control"} == set(info.roles)
    assert eventually(
        lambda: {ProcessState.RUNNING} == {item.state for item in status(var)}, timeout_s=30
    )


def test_a_role_that_flaps_is_named_with_its_log_and_shown_as_fatal(var: Path) -> None:
    broken = role("sft", "print('no such model: tinny'); raise SystemExit(3)")
    with pytest.raises(ConfigurationError, match="no such model: tinny") as caught:
        up(var, roles=(ROLES[0], broken), environment=clean_environment(), timeout_s=60)

    states = {item.role: item.state for item in status(var)}
    assert caught.value.details["role"] == "sft"
    assert (states["sft"], states["control"]) == (ProcessState.FATAL, ProcessState.RUNNING)


def test_a_role_that_dies_late_again_and_again_is_named(var: Path) -> None:
    late = role("gpu", "import time; print('loading', flush=True); time.sleep(3.5); 1 / 0")
    with pytest.raises(ConfigurationError, match="ZeroDivisionError") as caught:
        up(var, roles=(late,), environment=clean_environment(), timeout_s=60)

    shown = CliRunner().invoke(app, ["status", "--var", str(var), "--format", "json"])
    restarts = {row["role"]: row["restarts"] for row in json.loads(shown.output)}
    assert caught.value.details["role"] == "gpu"
    assert (restarts["gpu"] >= 2, restarts["s3"]) == (True, 0)


def test_a_role_that_never_gets_ready_is_named(var: Path) -> None:
    silent = role("sft", "import time; print('still loading', flush=True); time.sleep(3600)")
    with pytest.raises(ConfigurationError, match=r"sft is not ready after 3 s(.|\n)*still loading"):
        up(var, roles=(silent,), environment=clean_environment(), timeout_s=3)


def test_external_services_are_used_and_not_started(
    var: Path, control_redis_url: str, payload_redis_url: str, s3: S3Address
) -> None:
    environment = {
        **clean_environment(),
        "VLA_REDIS_URL": control_redis_url,
        "VLA_PAYLOAD_URL": payload_redis_url,
        "VLA_S3_ENDPOINT": s3.endpoint,
        "VLA_S3_ACCESS_KEY": s3.access_key,
        "VLA_S3_SECRET_KEY": s3.secret_key,
        "VLA_S3_BUCKET": s3.bucket,
    }
    info = up(var, roles=ROLES[:1], environment=environment)

    assert (("control",), s3) == (info.roles, info.s3)
    assert (control_redis_url, payload_redis_url) == (info.redis_url, info.payload_url)
    states = {item.role: item.state for item in status(var)}
    assert {"redis-control", "redis-payload", "s3"} == {
        name for name, state in states.items() if state is ProcessState.EXTERNAL
    }


def test_an_external_store_without_keys_is_refused(var: Path) -> None:
    environment = {**clean_environment(), "VLA_S3_ENDPOINT": "http://127.0.0.1:9"}
    with pytest.raises(ConfigurationError, match="VLA_S3_ACCESS_KEY"):
        up(var, roles=(), environment=environment)


def test_logs_and_status_of_unknown_things(var: Path, stack: StackInfo, tmp_path: Path) -> None:
    assert list(logs(var, "control")) == ["hello from control"]
    with pytest.raises(ConfigurationError, match="roles: redis-control"):
        list(logs(var, "gpu"))
    assert status(tmp_path / "nowhere") == []
    assert down(tmp_path / "nowhere") == 0


def test_logs_follow_what_is_written_and_survive_rotation(var: Path, stack: StackInfo) -> None:
    lines = logs(var, "control", follow=True)
    assert next(lines) == "hello from control"
    path = var / "logs" / "control.log"

    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text + "\n")

    timer = threading.Timer(0.3, append, args=("second",))
    timer.start()
    assert next(lines) == "second"
    timer.join()
