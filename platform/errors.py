"""Errors of `vla_platform`.

CodedError (vla_storage.errors)
└── PlatformError
    ├── SpecError                 client, admission: the spec is wrong; names the field (user)
    ├── AccessError               client: user or password of the URL are refused (user)
    ├── NotFoundError             client: unknown id, or another tenant's id: same answer (user)
    ├── ConflictError             client: same idempotency key, other payload (user)
    ├── QuotaError                client: a limit of the tenant is reached; retry later (user)
    ├── TenantError               operator: tenant name refused, exists, or is unknown (user)
    ├── DatasetError              loader: names the file, episode and frame (user)
    ├── DataError                 worker: NaN or malformed training data, with its place (user)
    ├── ModuleLoadError           worker: base model or action module does not fit (user)
    ├── DivergedError             worker: loss or gradient is not finite on finite data (user)
    ├── SimulatorError            worker: an environment failed; its session is lost, no other
    ├── UnsoundWorkerError        worker: its numbers cannot be trusted any more; it is restarted
    │   ├── BackboneChangedError  worker: the frozen base model is not what was loaded
    │   ├── DeviceLostError       worker: the accelerator fails whatever comes next
    │   └── RankLostError         worker: a process of its training has died, hangs or differs
    ├── RankFailedError           worker: another rank could not do its part; that one says why
    ├── WorkloadFailedError       client: the run ended in `failed`; carries the reason
    ├── WorkloadCancelledError    client: the run ended in `cancelled` (user)
    ├── ResultTimeoutError        client: not finished in time; the run goes on; retry helps
    ├── InferenceError
    │   ├── RequestError          client: the request itself is malformed (user)
    │   ├── UnsupportedError      client: the policy's module cannot give what is asked for (user)
    │   ├── DeadlineError         client: no answer within its timeout; retry helps
    │   ├── QueueFullError        client: too many of the tenant's requests wait; retry later
    │   ├── HistoryLostError      proxy: the session's window is gone; it sends the whole window
    │   ├── PixelsUnreachableError proxy: worker on another host; it sends the bytes themselves
    │   ├── PixelsLostError       proxy: the slot was used again; it sends the call again
    │   └── PoisonError           client: the request ended several workers; it is set aside
    ├── UnavailableError          client: broker or store does not answer; retry helps
    ├── ConfigurationError        start-up: settings or services break a rule; says which
    └── LedgerError
        ├── IllegalTransitionError  control: a state change that the table does not allow
        └── LeaseLostError          worker: the fence has moved on; drop the work, write nothing
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vla_storage.errors import CodedError, Fault

__all__ = [
    "AccessError",
    "BackboneChangedError",
    "ConfigurationError",
    "ConflictError",
    "DataError",
    "DatasetError",
    "DeadlineError",
    "DeviceLostError",
    "DivergedError",
    "Fault",
    "HistoryLostError",
    "IllegalTransitionError",
    "InferenceError",
    "LeaseLostError",
    "LedgerError",
    "ModuleLoadError",
    "NotFoundError",
    "PixelsLostError",
    "PixelsUnreachableError",
    "PlatformError",
    "PoisonError",
    "QueueFullError",
    "QuotaError",
    "RankFailedError",
    "RankLostError",
    "RequestError",
    "ResultTimeoutError",
    "SimulatorError",
    "SpecError",
    "TenantError",
    "UnavailableError",
    "UnsoundWorkerError",
    "UnsupportedError",
    "WorkloadCancelledError",
    "WorkloadFailedError",
    "to_error",
]


class PlatformError(CodedError):
    """Base of everything `vla_platform` raises."""

    code = "platform"


class SpecError(PlatformError):
    """`details["problems"]` lists `{"field", "value", "problem", "hint"}`."""

    code = "spec_invalid"
    fault = Fault.USER


class AccessError(PlatformError):
    code = "access_denied"
    fault = Fault.USER


class NotFoundError(PlatformError):
    code = "not_found"
    fault = Fault.USER


class ConflictError(PlatformError):
    code = "conflict"
    fault = Fault.USER


class QuotaError(PlatformError):
    code = "quota"
    fault = Fault.USER
    retryable = True


class TenantError(PlatformError):
    code = "tenant"
    fault = Fault.USER


class DatasetError(PlatformError):
    """`details` name `path` and, where known, `episode`, `frame`, `feature`."""

    code = "dataset"
    fault = Fault.USER


class DataError(PlatformError):
    """`details` name `episode`, `frame` and `column`."""

    code = "data"
    fault = Fault.USER


class ModuleLoadError(PlatformError):
    code = "module_load"
    fault = Fault.USER


class DivergedError(PlatformError):
    """`details` name `policy_key` and `step`; nothing of the step was applied."""

    code = "diverged"
    fault = Fault.USER


class SimulatorError(PlatformError):
    """`details` name `env_id`, `failure` (`vla_platform.envs.failures`), `seed`, `step`, and
    whether the session was `rebuilt`, so that a reset goes on."""

    code = "simulator"


class UnsoundWorkerError(PlatformError):
    """No number of this process can be trusted any more: it has to be started anew."""

    code = "unsound_worker"


class BackboneChangedError(UnsoundWorkerError):
    """`details` hold the `expected` and the `found` digest."""

    code = "backbone_changed"


class DeviceLostError(UnsoundWorkerError):
    """The accelerator's context is broken: whatever comes next fails on it, whoever asks."""

    code = "device_lost"


class RankLostError(UnsoundWorkerError):
    """The ranks of this worker no longer train together: one is gone, late, or has other numbers
    than the rest."""

    code = "rank_lost"


class RankFailedError(PlatformError):
    """What a rank raises that is well itself; rank 0 puts the other's own error in its place."""

    code = "rank_failed"


class WorkloadFailedError(PlatformError):
    """`details["reason"]` is the wire form of the error that ended the run."""

    code = "workload_failed"


class WorkloadCancelledError(PlatformError):
    code = "workload_cancelled"
    fault = Fault.USER


class ResultTimeoutError(PlatformError):
    code = "result_timeout"
    retryable = True


class InferenceError(PlatformError):
    """Base of what `predict` raises; `details["request_id"]` names the request."""

    code = "inference"


class RequestError(InferenceError):
    code = "request_invalid"
    fault = Fault.USER


class UnsupportedError(InferenceError):
    code = "unsupported"
    fault = Fault.USER


class DeadlineError(InferenceError):
    code = "deadline"
    retryable = True


class QueueFullError(InferenceError):
    code = "queue_full"
    retryable = True


class HistoryLostError(InferenceError):
    code = "history_lost"
    retryable = True


class PixelsUnreachableError(InferenceError):
    code = "pixels_unreachable"
    retryable = True


class PixelsLostError(InferenceError):
    code = "pixels_lost"
    retryable = True


class PoisonError(InferenceError):
    """`details["attempts"]` counts the deliveries."""

    code = "poison"


class UnavailableError(PlatformError):
    code = "unavailable"
    retryable = True


class ConfigurationError(PlatformError):
    code = "configuration"


class LedgerError(PlatformError):
    code = "ledger"


class IllegalTransitionError(LedgerError):
    code = "illegal_transition"


class LeaseLostError(LedgerError):
    code = "lease_lost"


def to_error(wire: Mapping[str, Any]) -> CodedError:
    """The typed error again; an unknown code becomes a `PlatformError` that carries it."""
    message, details = str(wire.get("message")), dict(wire.get("details") or {})
    kind = _kinds().get(str(wire.get("code")))
    if kind is None:
        return PlatformError(message, wire_code=wire.get("code"), **details)
    return kind(message, **details)


@functools.cache
def _kinds() -> dict[str, type[CodedError]]:
    found: dict[str, type[CodedError]] = {}
    pending: list[type[CodedError]] = [CodedError]
    while pending:
        kind = pending.pop()
        found.setdefault(kind.code, kind)
        pending.extend(kind.__subclasses__())
    return found
