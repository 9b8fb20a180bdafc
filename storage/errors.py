"""Errors of `vla_storage`, and the shape that all errors of the platform share.

CodedError
└── StorageError
    ├── ObjectNotFoundError         caller: the object is not there (user fault)
    ├── ObjectExistsError           caller: a conditional create lost the race; do not overwrite
    ├── ObjectChangedError          caller: a compare-and-swap lost the race; read again and retry
    ├── ObjectTooLargeError         caller: over the size it allows; nothing was read
    ├── StorageAccessError          caller: the credentials do not reach this key (user fault)
    ├── StorageUnavailableError     caller: the store does not answer; retry helps
    ├── StoreUnfitError             start-up: the store breaks a rule the platform needs
    ├── InvalidKeyError             caller: an id or key outside the allowed alphabet (user fault)
    ├── TensorFormatError           reader, writer: not strictly valid safetensors; says why
    ├── CheckpointError
    │   ├── CheckpointNotFoundError loader: no such checkpoint for this tenant (user fault)
    │   ├── ManifestInvalidError    loader, audit: malformed, foreign, unsigned or wrongly signed
    │   └── CheckpointCorruptError  loader, audit: an object is missing, altered or not finite
    └── PayloadError
        ├── PayloadExistsError      producer: a cell was written with other content; stop
        ├── PayloadFullError        producer: quota or tiers are full; wait and retry
        ├── PayloadNotFoundError    consumer: the partition or column is gone; produce it again
        └── PayloadCorruptError     consumer: bytes do not match their digest; produce it again
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar


class Fault(StrEnum):
    """Who has to act."""

    USER = "user"
    """The request itself is wrong: change it."""
    PLATFORM = "platform"
    """The platform failed: report it, or retry where `retryable` says so."""


class CodedError(Exception):
    """An error with a stable code, a culprit and a retry hint.

    `details` are plain data (ids, field names, given values) and travel with the error through
    pickle and JSON. The message says what is wrong and, where it can, what to do next.
    """

    code: ClassVar[str] = "error"
    fault: ClassVar[Fault] = Fault.PLATFORM
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        """The wire form: `{"code", "fault", "retryable", "message", "details"}`."""
        return {
            "code": self.code,
            "fault": str(self.fault),
            "retryable": self.retryable,
            "message": self.message,
            "details": self.details,
        }


def _rebuild(kind: type[CodedError], message: str, details: dict[str, Any]) -> CodedError:
    return kind(message, **details)


class StorageError(CodedError):
    """Base of everything `vla_storage` raises."""

    code = "storage"


class ObjectNotFoundError(StorageError):
    code = "object_not_found"
    fault = Fault.USER


class ObjectExistsError(StorageError):
    code = "object_exists"


class ObjectChangedError(StorageError):
    code = "object_changed"
    retryable = True


class ObjectTooLargeError(StorageError):
    code = "object_too_large"


class StorageAccessError(StorageError):
    code = "storage_access"
    fault = Fault.USER


class StorageUnavailableError(StorageError):
    code = "storage_unavailable"
    retryable = True


class StoreUnfitError(StorageError):
    code = "store_unfit"


class InvalidKeyError(StorageError):
    code = "invalid_key"
    fault = Fault.USER


class TensorFormatError(StorageError):
    """`details["reason"]` is one of the stable reasons listed in `vla_storage.tensors.decode`."""

    code = "tensors_invalid"


class CheckpointError(StorageError):
    code = "checkpoint"


class CheckpointNotFoundError(CheckpointError):
    code = "checkpoint_not_found"
    fault = Fault.USER


class ManifestInvalidError(CheckpointError):
    """`details["reason"]` is one of the stable reasons listed in `vla_storage.manifests`."""

    code = "manifest_invalid"


class CheckpointCorruptError(CheckpointError):
    code = "checkpoint_corrupt"


class PayloadError(StorageError):
    code = "payload"


class PayloadExistsError(PayloadError):
    code = "payload_exists"


class PayloadFullError(PayloadError):
    """`details["reason"]` is `quota` (the tenant's) or `tier` (no room anywhere)."""

    code = "payload_full"
    retryable = True


class PayloadNotFoundError(PayloadError):
    code = "payload_not_found"
    retryable = True


class PayloadCorruptError(PayloadError):
    code = "payload_corrupt"
    retryable = True
