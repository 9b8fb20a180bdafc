"""What lies in `var/` before the supervisor starts: its configuration, environments, users."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from vla_platform.stack import info as stack_info
from vla_platform.stack import supervisor
from vla_platform.stack.arena import prepare_arena
from vla_platform.stack.credentials import (
    Credentials,
    load_or_create,
    signing_key_file,
    user_of,
    write_acl,
    write_private,
)
from vla_platform.stack.info import StackInfo
from vla_platform.stack.ports import LOOPBACK, free_ports
from vla_platform.stack.roles import SERVERS, SINGLE_THREADED, Role
from vla_platform.stack.servers import (
    REDIS_PORTS,
    WEED_PORTS,
    Server,
    guarded,
    redis_server,
    weed_server,
)
from vla_platform.stack.supervisor import Program

# SeaweedFS may take longer with connections open; its data survive SIGKILL (measured).
_SERVER_STOP_S = 5.0


def prepare(
    var: Path,
    roles: Sequence[Role],
    environment: Mapping[str, str],
    dataset_roots: str,
    previous: StackInfo | None,
) -> StackInfo:
    """Write everything that supervisord needs into `var`; ports of `previous` are kept if free."""
    for name in (*SERVERS, "logs", "environment", "ready", "starts"):
        (var / name).mkdir(exist_ok=True, mode=0o700)
    credentials = load_or_create(var, (role.name for role in roles))
    info = stack_info.plan(
        var,
        ports=free_ports(
            (*REDIS_PORTS, *WEED_PORTS, "supervisor", *(r.name for r in roles if r.port)),
            previous=previous.ports if previous else None,
        ),
        credentials=credentials,
        signing_key=signing_key_file(var),
        roles=tuple(role.name for role in roles),
        environment=environment,
        dataset_roots=dataset_roots
        or environment.get("VLA_DATASET_ROOTS", "")
        or (previous.dataset_roots if previous else ""),
        arena=prepare_arena(var, environment),
    )
    servers = [_server_program(info, server) for server in _servers(info, credentials)]
    workers = [_worker_program(info, role, credentials) for role in roles]
    text = supervisor.configuration(info, {"servers": tuple(servers), "workers": tuple(workers)})
    write_private(var / "supervisord.conf", text)
    stack_info.save(info)
    return info


def _servers(info: StackInfo, credentials: Credentials) -> Iterator[Server]:
    for name in REDIS_PORTS:
        if name in info.roles:
            acl_file = info.var / name / "users.acl"
            write_acl(acl_file, credentials.redis)
            yield redis_server(
                name,
                info.var / name,
                info.ports[name],
                persistent=name == "redis-control",
                acl_file=acl_file,
            )
    if "s3" in info.roles:
        yield weed_server("s3", info.var / "s3", info.ports, info.s3)


def _server_program(info: StackInfo, server: Server) -> Program:
    variables = _environment_file(info.var, server.name, server.environment)
    return Program(
        name=server.name,
        command=shlex.join(
            guarded(
                server.command,
                *("--starts", str(starts_file(info.var, server.name)), "--environment", variables),
            )
        ),
        folder=server.folder,
        stop_s=_SERVER_STOP_S,
    )


def _worker_program(info: StackInfo, role: Role, credentials: Credentials) -> Program:
    ready_file = info.var / "ready" / role.name
    variables = {
        **info.environment(),
        **SINGLE_THREADED,
        **role.environment,
        "VLA_ROLE": role.name,
        "VLA_READY_FILE": str(ready_file),
    }
    for name, variable in (
        ("redis-control", "VLA_REDIS_URL"),
        ("redis-payload", "VLA_PAYLOAD_URL"),
    ):
        if name not in info.external:
            variables[variable] = as_user(
                variables[variable], user_of(role.name), credentials.redis[user_of(role.name)]
            )
    if role.port:
        variables["VLA_PORT"] = str(info.ports[role.name])
    if role.name == "flower":
        variables["FLOWER_BASIC_AUTH"] = f"{info.flower_user}:{info.flower_password}"
    if role.name == "page":
        variables["VLA_PAGE_USER"] = info.flower_user
        variables["VLA_PAGE_PASSWORD"] = info.flower_password
    waits = [f"{LOOPBACK}:{info.ports[name]}" for name in SERVERS if name in info.roles]
    return Program(
        name=role.name,
        command=shlex.join(
            guarded(
                role.command(variables),
                *("--starts", str(starts_file(info.var, role.name))),
                *("--environment", _environment_file(info.var, role.name, variables)),
                *("--clear", str(ready_file)),
                *(part for address in waits for part in ("--wait", address)),
            )
        ),
        folder=info.var,
        stop_s=role.stop_s,
    )


def starts_file(var: Path, name: str) -> Path:
    """Grows by a byte with every start of a role; emptied by `up`."""
    return var / "starts" / name


def as_user(url: str, user: str, password: str) -> str:
    """The same Redis, with another user's credentials."""
    parts = urlsplit(url)
    host = f"{user}:{quote(password, safe='')}@{parts.hostname}:{parts.port or 6379}"
    return urlunsplit(parts._replace(netloc=host))


def _environment_file(var: Path, name: str, variables: Mapping[str, str]) -> str:
    path = var / "environment" / f"{name}.json"
    write_private(path, json.dumps(dict(variables), indent=2))
    return str(path)
