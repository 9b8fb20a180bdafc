"""An object store on S3 or anything that speaks it with conditional writes, through boto3.

Bodies go out in one PUT (S3 takes up to 5 GB) with a digest that the store checks, so an object is
either absent or whole, and a writer that dies leaves no open multipart upload. The newer default
checksums (CRC32 trailers) and the payload signature are off: both copy and hash the body again, and
stores that do not know trailers alter it (boto/boto3#4398, #4435).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from vla_storage.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StorageAccessError,
    StorageError,
    StorageUnavailableError,
)
from vla_storage.names import check_key
from vla_storage.objects.base import Body, ObjectInfo, ObjectStore

_NOT_FOUND = {"404", "NoSuchKey", "NotFound"}
_CONDITION = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_BUSY = {"SlowDown", "RequestTimeout", "ServiceUnavailable", "InternalError", "BadDigest"}
_CHUNK = 1 << 20
_READ_BYTES = 4 << 20


def s3_client(
    service: str,
    *,
    endpoint: str | None,
    access_key: str | None,
    secret_key: str | None,
    attempts: int = 4,
) -> Any:
    """A boto3 client with bounded waits: 5 s to connect, 60 s between bytes."""
    return boto3.client(
        service,
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",  # AWS names a bucket's own, and botocore goes there
        config=Config(
            connect_timeout=5,
            read_timeout=60,
            retries={"mode": "standard", "total_max_attempts": attempts},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
            signature_version="s3v4" if service == "s3" else None,
            max_pool_connections=16,
        ),
    )


class S3ObjectStore(ObjectStore):
    """One bucket with one set of credentials; `None` means boto3's own search for them."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        attempts: int = 6,  # a store that has just started answers 500 for some seconds
    ) -> None:
        self.bucket = bucket
        self._client = s3_client(
            "s3",
            endpoint=endpoint,
            access_key=access_key,
            secret_key=secret_key,
            attempts=attempts,
        )

    def put(
        self,
        key: str,
        data: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        sha256: str | None = None,
    ) -> str:
        check_key(key)
        condition: dict[str, str] = {}
        if if_absent:
            condition["IfNoneMatch"] = "*"
        if if_match is not None:
            condition["IfMatch"] = if_match
        with contextlib.ExitStack() as stack, _translated(key, if_match is not None):
            body: Any = data
            if isinstance(data, Path):
                body = stack.enter_context(_LargeReads(io.FileIO(data)))
            reply = self._client.put_object(
                Bucket=self.bucket, Key=key, Body=body, **_digest(data, sha256), **condition
            )
        return str(reply["ETag"])

    def get_with_etag(self, key: str, *, max_bytes: int | None = None) -> tuple[bytes, str]:
        with _translated(key):
            reply = self._client.get_object(Bucket=self.bucket, Key=key)
            with contextlib.closing(reply["Body"]) as body:
                if max_bytes is not None and reply["ContentLength"] > max_bytes:
                    raise ObjectTooLargeError(f"{key} is larger than {max_bytes} bytes", key=key)
                return body.read(), str(reply["ETag"])

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        wanted = f"bytes={start}-{start + size_bytes - 1}"
        with _translated(key):
            try:
                reply = self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)
            except ClientError as error:
                if error.response["Error"]["Code"] == "InvalidRange":
                    return b""
                raise
            with contextlib.closing(reply["Body"]) as body:
                return bytes(body.read())

    def head(self, key: str) -> ObjectInfo:
        with _translated(key):
            reply = self._client.head_object(Bucket=self.bucket, Key=key)
        return ObjectInfo(
            key=key,
            size=reply["ContentLength"],
            etag=str(reply["ETag"]),
            modified=reply["LastModified"].timestamp(),
        )

    def chunks(self, key: str, *, size_bytes: int = 1 << 20) -> Iterator[bytes]:
        with _translated(key):
            reply = self._client.get_object(Bucket=self.bucket, Key=key)
            with contextlib.closing(reply["Body"]) as body:
                yield from body.iter_chunks(size_bytes)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        start = {"StartAfter": after} if after else {}
        with _translated(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=prefix, **start):
                for item in page.get("Contents", []):
                    yield ObjectInfo(
                        key=item["Key"],
                        size=item["Size"],
                        etag=item["ETag"],
                        modified=item["LastModified"].timestamp(),
                    )

    def presigned_url(self, key: str, *, expires_s: int) -> str:
        """A link with which anybody can read this one object until `expires_s` are over."""
        with _translated(key):
            return str(
                self._client.generate_presigned_url(
                    "get_object",
                    Params={"Bucket": self.bucket, "Key": check_key(key)},
                    ExpiresIn=expires_s,
                )
            )

    def delete(self, key: str) -> None:
        with _translated(key):
            self._client.delete_object(Bucket=self.bucket, Key=check_key(key))

    def close(self) -> None:
        self._client.close()


class _LargeReads(io.BufferedReader):
    """A file that answers reads of any size with up to 4 MB.

    The HTTP client asks for 16 KB at a time, and every time it takes the interpreter lock from
    the thread that trains.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or size < 0 else max(size, _READ_BYTES))


def _digest(data: Body, sha256: str | None) -> dict[str, str]:
    """The header by which the store checks what arrives; a known SHA-256 saves hashing again."""
    if sha256 is not None:
        return {"ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode()}
    digest = hashlib.md5(usedforsecurity=False)
    if isinstance(data, Path):
        with data.open("rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
    else:
        digest.update(data)
    return {"ContentMD5": base64.b64encode(digest.digest()).decode()}


@contextlib.contextmanager
def _translated(key: str, compared: bool = False) -> Iterator[None]:
    """boto3's errors as ours; `compared`: the request carried `If-Match`."""
    try:
        yield
    except ClientError as error:
        code = str(error.response["Error"]["Code"])
        status = error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
        if code in _CONDITION or (compared and code in _NOT_FOUND):
            if compared:
                raise ObjectChangedError(f"{key} has changed", key=key) from error
            raise ObjectExistsError(f"{key} exists already", key=key) from error
        if code in _NOT_FOUND:
            raise ObjectNotFoundError(f"no object {key}", key=key) from error
        if status == 403:
            raise StorageAccessError(f"no access to {key}: {code}", key=key) from error
        if status >= 500 or code in _BUSY:
            raise StorageUnavailableError(f"{key}: the store says {code}", key=key) from error
        raise StorageError(f"{key}: {code}", key=key) from error
    except BotoCoreError as error:
        raise StorageUnavailableError(f"{key}: {error}", key=key) from error
