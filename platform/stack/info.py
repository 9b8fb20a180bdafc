"""What a stack is made of: addresses, written to `var/stack.json` for whoever needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from vla_platform.errors import ConfigurationError
from vla_platform.stack.credentials import ADMIN, Credentials, user_of, write_private
from vla_platform.stack.ports import LOOPBACK
from vla_platform.stack.roles import SERVERS
from vla_platform.stack.servers import S3Address

BUCKET = "vla"


class ProcessState(StrEnum):
    """A role as the supervisor sees it."""

    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    """It ended soon after its start and is about to be started again."""
    FATAL = "fatal"
    """It flapped and is not started again before the next `vla up`."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    EXITED = "exited"
    UNKNOWN = "unknown"
    EXTERNAL = "external"
    """A service that somebody else runs."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    role: str
    state: ProcessState
    pid: int | None = None
    uptime_s: float = 0.0
    restarts: int = 0  # since `up`; a role that keeps dying shows here
    detail: str = ""  # exit status or spawn error, where there is one
    log: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StackInfo:
    """Addresses and the operator's credentials of a stack; not to be shown to tenants."""

    var: Path
    redis_url: str
    payload_url: str
    s3: S3Address
    flower_url: str
    flower_user: str
    flower_password: str
    metrics_url: str
    signing_key_file: Path
    dataset_roots: str
    roles: tuple[str, ...]  # started here, servers first
    external: tuple[str, ...]  # servers that somebody else runs
    ports: dict[str, int]
    supervisor_password: str
    page_url: str = ""  # the same user and password as Flower's
    arena: Path | None = None  # shared memory of its processes

    def environment(self) -> dict[str, str]:
        """The variables with which a process on this machine joins the stack as operator."""
        variables = {
            "VLA_VAR": str(self.var),
            "VLA_REDIS_URL": self.redis_url,
            "VLA_PAYLOAD_URL": self.payload_url,
            "VLA_S3_ENDPOINT": self.s3.endpoint,
            "VLA_S3_ACCESS_KEY": self.s3.access_key,
            "VLA_S3_SECRET_KEY": self.s3.secret_key,
            "VLA_S3_BUCKET": self.s3.bucket,
            "VLA_SIGNING_KEY_FILE": str(self.signing_key_file),
            "VLA_DATASET_ROOTS": self.dataset_roots,
            "VLA_ARENA": str(self.arena or ""),
        }
        return {name: value for name, value in variables.items() if value}


def plan(
    var: Path,
    *,
    ports: dict[str, int],
    credentials: Credentials,
    signing_key: Path,
    roles: tuple[str, ...],
    environment: Mapping[str, str],
    dataset_roots: str,
    arena: Path | None = None,
) -> StackInfo:
    """The stack for this machine; services named in `environment` are used, not started.

    Raises `ConfigurationError` where an external service is named in part.
    """
    user = user_of(ADMIN)
    password = credentials.redis[user]

    def embedded(name: str) -> str:
        return f"redis://{user}:{password}@{LOOPBACK}:{ports[name]}/0"

    endpoint = environment.get("VLA_S3_ENDPOINT")
    if endpoint and not (
        environment.get("VLA_S3_ACCESS_KEY") and environment.get("VLA_S3_SECRET_KEY")
    ):
        raise ConfigurationError(
            "VLA_S3_ENDPOINT is set: set VLA_S3_ACCESS_KEY and VLA_S3_SECRET_KEY too"
        )
    given = {
        "redis-control": environment.get("VLA_REDIS_URL"),
        "redis-payload": environment.get("VLA_PAYLOAD_URL"),
        "s3": endpoint,
    }
    external = tuple(name for name in SERVERS if given[name])
    return StackInfo(
        var=var,
        redis_url=given["redis-control"] or embedded("redis-control"),
        payload_url=given["redis-payload"] or embedded("redis-payload"),
        s3=S3Address(
            endpoint=endpoint or f"http://{LOOPBACK}:{ports['s3']}",
            access_key=environment["VLA_S3_ACCESS_KEY"] if endpoint else credentials.s3_access_key,
            secret_key=environment["VLA_S3_SECRET_KEY"] if endpoint else credentials.s3_secret_key,
            bucket=environment.get("VLA_S3_BUCKET", BUCKET),
        ),
        flower_url=f"http://{LOOPBACK}:{ports['flower']}" if "flower" in ports else "",
        flower_user=credentials.flower_user,
        flower_password=credentials.flower_password,
        page_url=f"http://{LOOPBACK}:{ports['page']}" if "page" in ports else "",
        metrics_url=f"http://{LOOPBACK}:{ports['metrics']}" if "metrics" in ports else "",
        signing_key_file=signing_key,
        dataset_roots=dataset_roots,
        roles=(*(name for name in SERVERS if name not in external), *roles),
        external=external,
        ports=ports,
        supervisor_password=credentials.supervisor_password,
        arena=arena,
    )


def save(info: StackInfo) -> None:
    write_private(info.var / "stack.json", json.dumps(asdict(info), default=str, indent=2))


def load(var: Path) -> StackInfo | None:
    """The stack that was started last in this folder, whether or not it runs now."""
    try:
        raw = json.loads((var.resolve() / "stack.json").read_text())
    except FileNotFoundError:
        return None
    try:
        return StackInfo(
            **{
                **raw,
                "var": Path(raw["var"]),
                "s3": S3Address(**raw["s3"]),
                "signing_key_file": Path(raw["signing_key_file"]),
                "roles": tuple(raw["roles"]),
                "external": tuple(raw["external"]),
                "arena": Path(raw["arena"]) if raw.get("arena") else None,
            }
        )
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{var / 'stack.json'} is of another release: run `vla down`, then delete it"
        ) from error
