"""Starting, stopping and watching the platform on one machine: what `vla up` and friends call.

    var/stack.json  credentials.json  signing.key  supervisord.{conf,pid}
    var/{redis-control,redis-payload,s3}/  var/logs/<role>.log  var/{environment,ready,starts}/

supervisord runs as a daemon: whoever started it may die at any time. It restarts what dies; the
kernel kills its children when it dies itself; `up` and `down` end whatever escaped both.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import xmlrpc.client
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from vla_platform.errors import ConfigurationError, UnavailableError
from vla_platform.stack import info as stack_info
from vla_platform.stack import supervisor
from vla_platform.stack.info import ProcessState, ProcessStatus, StackInfo
from vla_platform.stack.layout import prepare, starts_file
from vla_platform.stack.probes import is_ready
from vla_platform.stack.roles import CLUSTER_LIKE, ROLES, Role
from vla_platform.stack.sweep import sweep

Progress = Callable[[str, str], None]
"""`on_progress(role, "starting" | "ready")`."""

_TAIL_LINES = 30
_LOG_LINES = 400
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception)\b: ")
"""The line of a traceback that says what was wrong."""
_MAX_RESTARTS = 2


def up(
    var: Path,
    *,
    roles: Sequence[Role] = ROLES,
    environment: Mapping[str, str] | None = None,
    dataset_roots: str = "",
    timeout_s: float = 120.0,
    on_progress: Progress | None = None,
) -> StackInfo:
    """Start the stack in `var`, or what is missing of one that runs; returns when all is ready.

    `environment` (default: this process's) may name external services: `VLA_REDIS_URL`,
    `VLA_PAYLOAD_URL`, `VLA_S3_ENDPOINT` with its keys; those are not started. Raises
    `ConfigurationError` naming the role that does not start, with the end of its log; the rest
    keeps running for a look at it.
    """
    var = var.resolve()
    var.mkdir(parents=True, exist_ok=True, mode=0o700)
    report = on_progress or (lambda role, state: None)
    given = dict(os.environ if environment is None else environment)
    with _exclusive(var):
        info = stack_info.load(var)
        if info is not None and supervisor.daemon(var) is not None:
            if dataset_roots and dataset_roots != info.dataset_roots:
                raise ConfigurationError(
                    f"the stack runs with the dataset roots {info.dataset_roots or 'none'}; "
                    "`vla down` first: they are read at the start"
                )
            _start_stopped(info)
        else:
            sweep(var)
            # Marks of an earlier life would tell that a role works before it has begun.
            for mark in (*(var / "starts").glob("*"), *(var / "ready").glob("*")):
                mark.unlink()
            info = prepare(var, roles, given, dataset_roots, info)
            supervisor.start(var / "supervisord.conf", {**given, supervisor.MARKER: str(var)})
        for name in info.roles:
            report(name, "starting")
        _wait_ready(info, {role.name: role for role in roles}, timeout_s, report)
    return info


def down(var: Path, *, timeout_s: float = 90.0) -> int:
    """Stop everything: workers first, then servers; returns how many leftovers had to be ended.

    Also right after a crash of the supervisor, and when nothing runs. Data stay.
    """
    var = var.resolve()
    if not var.exists():
        return 0
    with _exclusive(var):
        process, info = supervisor.daemon(var), stack_info.load(var)
        if process is not None and info is not None:
            with suppress(UnavailableError), supervisor.connect(info) as remote:
                remote.shutdown()
            with suppress(psutil.TimeoutExpired):
                process.wait(timeout_s)
        left = sweep(var)
        (var / "supervisord.pid").unlink(missing_ok=True)
    return left


def status(var: Path) -> list[ProcessStatus]:
    """Every role, servers first. Empty where no stack was ever started."""
    var = var.resolve()
    info = stack_info.load(var)
    if info is None:
        return []
    external = [ProcessStatus(role=name, state=ProcessState.EXTERNAL) for name in info.external]
    found: dict[str, ProcessStatus] = {}
    if supervisor.daemon(var) is not None:
        with supervisor.connect(info) as remote:
            for raw in remote.getAllProcessInfo():
                found[raw["name"]] = _status(info, raw)
    return external + [
        found.get(name, ProcessStatus(role=name, state=ProcessState.STOPPED, log=_log(var, name)))
        for name in info.roles
    ]


def logs(var: Path, role: str, *, follow: bool = False, lines: int = 200) -> Iterator[str]:
    """The last lines of a role's log, then new ones as they come (`follow`), across rotation.

    Raises `ConfigurationError` for an unknown role.
    """
    path = _log(var.resolve(), role)
    known = stack_info.load(var)
    if known is None or role not in (*known.roles, "supervisord"):
        names = ", ".join(known.roles) if known else "none: no stack was started here"
        raise ConfigurationError(f"no role {role!r} here (roles: {names})")
    yield from _tail(path, lines)
    while follow:
        with path.open(errors="replace") as file:
            file.seek(0, os.SEEK_END)
            while path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                line = file.readline()
                if line:
                    yield line.rstrip("\n")
                else:
                    time.sleep(0.2)


def logs_of_run(var: Path, run: str, *, follow: bool = False) -> Iterator[str]:
    """The lines of all processes that name one run, oldest first, then new ones (`follow`).

    Raises `ConfigurationError` where no stack was started here.
    """
    var = var.resolve()
    known = stack_info.load(var)
    if known is None:
        raise ConfigurationError(f"no stack in {var}; name its folder with --var")
    named = re.compile(rf"(?<![\w-]){re.escape(run)}(?![\w])")
    places = dict.fromkeys(known.roles, 0)
    while True:
        found = []
        for role in places:
            path = _log(var, role)
            if not path.exists():
                continue
            if path.stat().st_size < places[role]:
                places[role] = 0  # it was rotated
            with path.open("rb") as file:
                file.seek(places[role])
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # the rest of the line is still to come
                    places[role] += len(raw)
                    line = raw.decode(errors="replace").rstrip("\n")
                    if named.search(line):
                        found.append((_time_of(line), role, line))
        for _, role, line in sorted(found, key=lambda one: one[0]):
            yield f"{role:<12} {line}"
        if not follow:
            return
        time.sleep(0.3)


def _time_of(line: str) -> str:
    """Of all forms: `2026-01-01 12:00:00,000`, `[2026-01-01 12:00:00,000: INFO/...]`, and JSON's
    `{"time": "2026-01-01T12:00:00.000Z"`."""
    stamp = re.search(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d{3}", line[:40])
    return stamp.group().replace(".", ",").replace("T", " ") if stamp else ""


def restart_role(var: Path, role: str, *, timeout_s: float = 120.0) -> None:
    """Stop one role in order, start it, and wait until it is ready.

    Raises `ConfigurationError` for an unknown role or one that does not come back.
    """
    var = var.resolve()
    info = stack_info.load(var)
    if info is None or role not in info.roles:
        raise ConfigurationError(f"no role {role!r} here; see `vla status`")
    known = {one.name: one for one in (*ROLES, *CLUSTER_LIKE)}
    with _exclusive(var), supervisor.connect(info) as remote:
        (group,) = (raw["group"] for raw in remote.getAllProcessInfo() if raw["name"] == role)
        with suppress(xmlrpc.client.Fault):
            remote.stopProcess(f"{group}:{role}", False)  # it may be down already
        deadline = time.monotonic() + timeout_s
        while _status(info, remote.getProcessInfo(f"{group}:{role}")).pid is not None:
            if time.monotonic() > deadline:
                raise ConfigurationError(f"{role} does not stop", role=role)
            time.sleep(0.1)
        (var / "ready" / role).unlink(missing_ok=True)
        starts_file(var, role).unlink(missing_ok=True)
        remote.startProcess(f"{group}:{role}", False)
        deadline = time.monotonic() + timeout_s
        while not is_ready(info, role, known.get(role)):
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{role} is not ready after {timeout_s:.0f} s: `vla logs {role}`", role=role
                )
            time.sleep(0.05)


def _start_stopped(info: StackInfo) -> None:
    with supervisor.connect(info) as remote:
        for raw in remote.getAllProcessInfo():
            starts_file(info.var, str(raw["name"])).unlink(missing_ok=True)
            if _status(info, raw).state in (
                ProcessState.FATAL,
                ProcessState.STOPPED,
                ProcessState.EXITED,
            ):
                remote.startProcess(f"{raw['group']}:{raw['name']}", False)


def _wait_ready(
    info: StackInfo, roles: Mapping[str, Role], timeout_s: float, report: Progress
) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(info.roles)
    while waiting:
        for name in list(waiting):
            if is_ready(info, name, roles.get(name)):
                waiting.remove(name)
                report(name, "ready")
        fatal = [
            item.role
            for item in status(info.var)
            if item.state is ProcessState.FATAL
            # The supervisor calls a start a success after 3 s; loading a model may fail later.
            or (
                item.role in waiting
                and item.restarts >= _MAX_RESTARTS
                and item.state is ProcessState.RUNNING
            )
        ]
        late = waiting if waiting and time.monotonic() > deadline else []
        for name in fatal or late:
            problem = "does not stay up" if fatal else f"is not ready after {timeout_s:.0f} s"
            log = _tail(_log(info.var, name), _LOG_LINES)
            tail = "\n".join(log[-_TAIL_LINES:])
            # The supervisor may have begun the next try, whose banner hides why the last one ended.
            reason = next((line for line in reversed(log) if _ERROR.search(line)), "")
            raise ConfigurationError(
                f"{name} {problem}{': ' if reason else ''}{reason.strip()}\n"
                f"What runs is left for a look: `vla logs {name}`, then `vla down`. "
                f"The end of its log:\n{tail}",
                role=name,
            )
        time.sleep(0.05)


def _status(info: StackInfo, raw: dict[str, str | int]) -> ProcessStatus:
    state = ProcessState(str(raw["statename"]).lower())
    running = state in (ProcessState.RUNNING, ProcessState.STARTING)
    name = str(raw["name"])
    counter = starts_file(info.var, name)
    starts = counter.stat().st_size if counter.exists() else 0
    return ProcessStatus(
        role=name,
        state=state,
        pid=int(raw["pid"]) or None,
        uptime_s=float(raw["now"]) - float(raw["start"]) if running else 0.0,
        restarts=max(0, starts - 1),
        detail=str(raw["spawnerr"]),
        log=_log(info.var, name),
    )


def _log(var: Path, role: str) -> Path:
    return var / "logs" / f"{role}.log"


def _tail(path: Path, lines: int) -> list[str]:
    try:
        with path.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
    except FileNotFoundError:
        return []


@contextmanager
def _exclusive(var: Path) -> Iterator[None]:
    """One `up` or `down` per folder at a time; the kernel frees the lock of a killed one."""
    with (var / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
