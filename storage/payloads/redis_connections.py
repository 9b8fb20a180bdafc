"""Connections to payload Redis instances: large values without copies, errors as our own.

redis-py collects a bulk reply from 64 KB reads in a buffer that it copies twice. Here a large one
is received in place, as an array.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import redis
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from vla_storage.errors import (
    PayloadError,
    PayloadFullError,
    PayloadNotFoundError,
    StorageAccessError,
    StorageUnavailableError,
)
from vla_storage.payloads.segments import Key

T = TypeVar("T")
_LARGE_BYTES = 64 << 10
_RETRIES = 5


class _LargeReads(SocketBuffer):
    def read(self, length: int, timeout: Any = None) -> Any:
        if length < _LARGE_BYTES:
            return super().read(length)
        found = np.empty(length, np.uint8)
        early = self._buffer.read(length)
        found[: len(early)] = np.frombuffer(early, np.uint8)
        view, at = found.data, len(early)
        while at < length:
            try:
                count = self._sock.recv_into(view[at:])
            except TimeoutError as error:
                raise redis.TimeoutError("Timeout reading from socket") from error
            if count == 0:
                raise redis.ConnectionError("Connection closed by server.")
            at += count
        super().read(0)  # the line's end
        return found


class _Parser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = _LargeReads(
            connection._sock, self.socket_read_size, connection.socket_timeout
        )


class Shard:
    """One payload Redis."""

    def __init__(self, url: str, *, timeout_s: float = 15.0) -> None:
        self.pool: Any = redis.ConnectionPool.from_url(
            url,
            parser_class=_Parser,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=5.0,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), _RETRIES),
        )
        # Replies are bytes, or arrays where they are large, which redis-py's types do not say.
        self.client: Any = redis.Redis(connection_pool=self.pool)
        self._fill = (0.0, 0.0)  # when it was asked, and the answer

    def fill(self) -> float:
        """Used share of the server's memory limit, at most half a second old; 0 without one."""
        asked, share = self._fill
        if time.monotonic() - asked > 0.5:
            info = self.client.info("memory")
            limit = int(info.get("maxmemory", 0))
            share = int(info["used_memory"]) / limit if limit else 0.0
            self._fill = (time.monotonic(), share)
        return share

    def call(self, *parts: str | bytes | int) -> Any:
        """One command, without what redis-py does around it."""
        command = head(*parts)
        return self.stream(lambda: iter((command,)), 1)[0]

    def stream(self, commands: Callable[[], Iterator[Any]], num_replies: int) -> list[Any]:
        """Send packed commands as they are made, then read their replies; retried as a whole.

        A broken exchange takes its connection along: nobody gets the replies it left behind.
        """
        for attempt in range(_RETRIES + 1):
            connection = self.pool.get_connection()
            try:
                connection.send_packed_command(commands())
                replies = [self._reply(connection) for _ in range(num_replies)]
            except (redis.ConnectionError, redis.TimeoutError):
                connection.disconnect()
                if attempt == _RETRIES:
                    raise
                time.sleep(random.uniform(0.5, 1.0) * min(1.0, 0.05 * 2**attempt))
            except BaseException:
                connection.disconnect()
                raise
            else:
                for reply in replies:
                    if isinstance(reply, Exception):
                        raise reply
                return replies
            finally:
                self.pool.release(connection)
        raise AssertionError("unreachable")

    @staticmethod
    def _reply(connection: Any) -> Any:
        try:
            return connection.read_response()
        except redis.ResponseError as error:
            return error  # the replies behind it are read first

    def reset(self) -> None:
        self.pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        self.client.close()
        self.pool.disconnect()


class Shards:
    """Several payload Redis instances; a partition lies on one of them, by the hash of its key.

    All processes name the same instances in the same order. Changing the list moves partitions:
    drain the platform before.
    """

    def __init__(self, urls: Iterable[str], *, timeout_s: float = 15.0) -> None:
        self.all = [Shard(url, timeout_s=timeout_s) for url in urls]

    def of(self, key: Key) -> Shard:
        if len(self.all) == 1:
            return self.all[0]
        digest = hashlib.blake2b(str(key).encode(), digest_size=8).digest()
        return self.all[int.from_bytes(digest, "little") % len(self.all)]

    def reset(self) -> None:
        for shard in self.all:
            shard.reset()

    def close(self) -> None:
        for shard in self.all:
            shard.close()


def head(*parts: str | bytes | int, last_bytes: int | None = None) -> bytes:
    """A packed command; with `last_bytes`, all of it but one more argument of that size."""
    count = len(parts) + (last_bytes is not None)
    out = [b"*%d\r\n" % count]
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    if last_bytes is not None:
        out.append(b"$%d\r\n" % last_bytes)
    return b"".join(out)


@contextlib.contextmanager
def translated(key: Key | None = None) -> Iterator[None]:
    """redis-py's errors as ours."""
    where = {} if key is None else {"tenant_id": key.tenant_id, "partition_id": key.partition_id}
    try:
        yield
    except redis.OutOfMemoryError as error:
        raise PayloadFullError(
            "payload store: full", reason="tier", tier="redis", **where
        ) from error
    except redis.exceptions.NoPermissionError as error:
        raise StorageAccessError(f"payload store: {error}", **where) from error
    except redis.AuthenticationError as error:
        raise StorageAccessError(f"payload store: {error}", **where) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise StorageUnavailableError(f"payload store: {error}", **where) from error
    except redis.RedisError as error:
        text = str(error)
        if text.startswith("VLA_FULL"):
            raise PayloadFullError(
                f"payload store: {text.removeprefix('VLA_FULL ')}", reason="quota", **where
            ) from error
        if text.startswith("VLA_NOT_FOUND"):
            raise PayloadNotFoundError(
                f"payload store: {text.removeprefix('VLA_NOT_FOUND ')}", columns=[], **where
            ) from error
        if "OOM" in text:  # a function says it in the middle of its error
            raise PayloadFullError(
                "payload store: full", reason="tier", tier="redis", **where
            ) from error
        raise PayloadError(f"payload store: {error}", **where) from error


def as_bytes(reply: Any) -> bytes:
    """A bulk reply of any size."""
    return reply.tobytes() if isinstance(reply, np.ndarray) else bytes(reply)


def as_array(reply: Any) -> np.ndarray[Any, Any]:
    return reply if isinstance(reply, np.ndarray) else np.frombuffer(bytearray(reply), np.uint8)


__all__ = ["Shard", "Shards", "as_array", "as_bytes", "head", "translated"]
