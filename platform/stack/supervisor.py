"""The supervisor library as the stack uses it: its configuration, its start, its remote calls."""

from __future__ import annotations

import http.client
import subprocess
import sys
import xmlrpc.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vla_platform.errors import ConfigurationError, UnavailableError
from vla_platform.stack.info import StackInfo
from vla_platform.stack.ports import LOOPBACK

MARKER = "VLA_STACK"  # in the environment of every process of a stack: its folder
_USER = "vla"
_CALL_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """One process for the supervisor."""

    name: str
    command: str  # quoted as a shell would
    folder: Path
    stop_s: float


def configuration(info: StackInfo, groups: Mapping[str, tuple[Program, ...]]) -> str:
    """The text of `supervisord.conf`. Groups start together and stop in reverse order.

    A program that ends within 3 s of its start is tried 3 times more, then it is FATAL. Paths are
    relative to `var`, where supervisord runs: it expands `%` in some of them twice.
    """
    lines = [
        "[supervisord]",
        "logfile=logs/supervisord.log",
        "pidfile=supervisord.pid",
        "logfile_maxbytes=5MB",
        "logfile_backups=2",
        "umask=077",
        "[inet_http_server]",
        f"port={LOOPBACK}:{info.ports['supervisor']}",
        f"username={_USER}",
        f"password={_literal(info.supervisor_password)}",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
    ]
    for priority, (group, programs) in enumerate(groups.items(), start=1):
        for program in programs:
            lines += [
                f"[program:{program.name}]",
                f"command={_literal(program.command)}",
                f"directory={program.folder.relative_to(info.var)}",
                "autorestart=true",
                "startsecs=3",
                "startretries=3",
                f"stopwaitsecs={round(program.stop_s)}",
                "killasgroup=true",
                "redirect_stderr=true",
                f"stdout_logfile=logs/{program.name}.log",
                "stdout_logfile_maxbytes=10MB",
                "stdout_logfile_backups=3",
            ]
        if programs:
            names = ",".join(program.name for program in programs)
            lines += [f"[group:{group}]", f"programs={names}", f"priority={100 * priority}"]
    return "\n".join(lines) + "\n"


def start(conf: Path, environment: Mapping[str, str]) -> None:
    """Start supervisord as a daemon of its own session. Raises `ConfigurationError`."""
    done = subprocess.run(
        (sys.executable, "-m", "supervisor.supervisord", "-c", conf.name),
        cwd=conf.parent,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise ConfigurationError(f"the supervisor did not start: {done.stdout}{done.stderr}")


def daemon(var: Path) -> psutil.Process | None:
    """The live supervisord of this folder; a stale pid file or a recycled pid is none."""
    try:
        process = psutil.Process(int((var / "supervisord.pid").read_text()))
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and process.environ().get(MARKER) == str(var) else None
    except (FileNotFoundError, ValueError, psutil.Error):
        return None


@contextmanager
def connect(info: StackInfo) -> Iterator[Any]:
    """The supervisor's remote interface. Raises `UnavailableError` where it does not answer."""
    url = f"http://{_USER}:{info.supervisor_password}@{LOOPBACK}:{info.ports['supervisor']}/RPC2"
    try:
        with xmlrpc.client.ServerProxy(url, transport=_Transport()) as proxy:
            yield proxy.supervisor
    except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
        raise UnavailableError(f"the supervisor does not answer: {error}") from error


class _Transport(xmlrpc.client.Transport):
    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        connection = super().make_connection(host)
        connection.timeout = _CALL_S
        return connection


def _literal(text: str) -> str:
    """supervisord expands `%(name)s` in its configuration."""
    return text.replace("%", "%%")
