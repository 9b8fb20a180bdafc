"""The ledger: what is in flight, in the control Redis. The only module that changes it.

Every method is one atomic server-side function (`ledger.lua`) on server time; its docstring there
says which states it accepts. Late writes of a lost lease raise `LeaseLostError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis

from vla_platform.control.states import tables
from vla_platform.errors import (
    ConflictError,
    IllegalTransitionError,
    LeaseLostError,
    LedgerError,
    NotFoundError,
    QuotaError,
    UnavailableError,
)

_ERRORS = {
    "VLA_CONFLICT": ConflictError,
    "VLA_NOT_FOUND": NotFoundError,
    "VLA_QUOTA": QuotaError,
    "VLA_LEASE_LOST": LeaseLostError,
    "VLA_ILLEGAL": IllegalTransitionError,
}


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The descriptor that travels for one unit of training work."""

    job_id: str
    workload: str
    tenant_id: str
    policy_key: str  # tenant/policy
    task_type: str  # sft
    base_model: str
    schema_signature: str
    partition_id: str  # address of its samples in the payload store
    position: int  # place in the workload's plan, from 0
    priority: int
    fence: int  # rises with every lease; a write under an older one is refused
    attempt: int
    sample_count: int = 0
    domain: str = "train"  # train | heldout
    created_seq: int = 0
    ready_seq: int = 0
    queue_wait_ms: int = 0  # from ready to leased
    mount: bool = False  # the slot changed hands: restore it before training
    slot_fence: int = 0
    base_version: int = 0  # policy version before the workload's first step
    version: int = 1

    @classmethod
    def from_hash(cls, raw: dict[str, Any]) -> TrainingJob:
        values: dict[str, Any] = {}
        for name, kind in cls.__annotations__.items():
            if raw.get(name) is not None:
                value = raw[name]
                if kind == "int":
                    value = int(value)
                elif kind == "bool":
                    value = bool(int(value))
                values[name] = value
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a completed job leaves behind."""

    in_flight: int
    through: bool  # that was the workload's last position


@dataclass(frozen=True, kw_only=True)
class Due:
    """What the ledger says is due and no live message carries."""

    prepare: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    produce: tuple[str, ...] = ()
    train: tuple[str, ...] = ()


def library_source() -> str:
    """The function library with the state tables in place."""
    source = resources.files("vla_platform.control").joinpath("ledger.lua").read_text()
    return source.replace("local TABLES = @TABLES@", f"local TABLES = {_lua(tables())}")


def _lua(value: dict[str, Any] | list[str]) -> str:
    """A Lua table constructor: the JSON library is not there yet when functions are loaded."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{json.dumps(k)}] = {_lua(v)}" for k, v in value.items()) + "}"
    return "{" + ", ".join(json.dumps(item) for item in value) + "}"


class Ledger:
    """Workloads, training jobs, leases, slots."""

    def __init__(self, client: redis.Redis) -> None:
        # With decode_responses replies are str, which redis-py's types do not say.
        self._redis: Any = client

    @classmethod
    def connect(cls, url: str) -> Ledger:
        client = redis.Redis.from_url(
            url, decode_responses=True, socket_timeout=15, health_check_interval=15
        )
        return cls(client)

    @property
    def client(self) -> Any:
        """The connection, for reading."""
        return self._redis

    def close(self) -> None:
        self._redis.close()

    def load(self) -> None:
        """Put the function library on the server, replacing an older one."""
        self._redis.function_load(library_source(), replace=True)

    def _call(self, name: str, *args: Any) -> Any:
        try:
            try:
                return self._redis.fcall(f"vla_{name}", 0, *args)
            except redis.ResponseError as error:
                if "Function not found" not in str(error):
                    raise
                self.load()
                return self._redis.fcall(f"vla_{name}", 0, *args)
        except redis.ResponseError as error:
            code, _, text = str(error).partition(" ")
            kind = _ERRORS.get(code, LedgerError)
            raise kind(text or code, operation=name) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise _unavailable(error) from error

    # --- workloads ---

    def submit(self, workload: str, fields: dict[str, Any], *, max_pending: int) -> bool:
        """Record a pending workload. False: the same one is already there."""
        return bool(self._call("submit", workload, json.dumps(fields), max_pending))

    def prepared(self, workload: str, *, total_positions: int, total_steps: int) -> None:
        self._call("prepared", workload, total_positions, total_steps)

    def admit(self, workload: str, *, max_running: int) -> str:
        """`running`, or why it waits."""
        return str(self._call("admit", workload, max_running))

    def checkpointed(self, workload: str, *, position: int, checkpoint: str, step: int) -> None:
        self._call("checkpointed", workload, position, checkpoint, step)

    def finish(self, workload: str) -> None:
        self._call("finish", workload)

    def fail(self, workload: str, reason: dict[str, Any]) -> str:
        """Returns the state it ended in, which an earlier end has decided."""
        return str(self._call("fail", workload, json.dumps(reason, default=str)))

    def cancel(self, workload: str, reason: str = "") -> str:
        return str(self._call("cancel", workload, reason))

    def workload(self, workload: str) -> dict[str, str]:
        with _answers():
            found: dict[str, str] = self._redis.hgetall(f"vla:w:{workload}")
        if not found:
            raise NotFoundError(f"no run {workload}", workload=workload)
        return found

    def steps(self, workload: str) -> dict[int, dict[str, Any]]:
        """The step log: optimizer step to what it did. No gap, no duplicate."""
        with _answers():
            raw = self._redis.hgetall(f"vla:w:{workload}:steps")
        return {int(step): json.loads(text) for step, text in sorted(raw.items(), key=_step)}

    # --- training jobs ---

    def reserve(self, workload: str, *, lease_s: float) -> TrainingJob | str:
        """The next position to produce, or why there is none now."""
        answer = json.loads(self._call("reserve", workload, int(lease_s * 1000)))
        return TrainingJob.from_hash(answer["job"]) if "job" in answer else str(answer["wait"])

    def mark_ready(self, job: TrainingJob, *, sample_count: int, domain: str) -> bool:
        """True: a training task should be sent, for nobody is draining."""
        return bool(self._call("mark_ready", job.job_id, job.fence, sample_count, domain))

    def lease_group(
        self, worker: str, base_model: str, *, max_jobs: int, lease_s: float
    ) -> list[TrainingJob]:
        answer = self._call("lease_group", worker, base_model, max_jobs, int(lease_s * 1000))
        return [TrainingJob.from_hash(raw) for raw in json.loads(answer)]

    def heartbeat(self, worker: str, *, lease_s: float, jobs: tuple[str, ...] = ()) -> list[str]:
        """Keep everything `worker` holds. Returns those of `jobs` that are its own no longer."""
        answer = json.loads(self._call("heartbeat", worker, int(lease_s * 1000), *jobs))
        return [str(job) for job in answer]

    def leave(self, worker: str, policy_key: str = "") -> int:
        """Give back every slot of a worker, or that of one policy; returns how many."""
        return int(self._call("leave", worker, policy_key))

    def owns_slot(self, job: TrainingJob) -> bool:
        """Whether the job's workload still runs, and its slot has not changed hands."""
        with _answers():
            state = self._redis.hget(f"vla:w:{job.workload}", "state")
            fence = self._redis.hget(f"vla:policy:{job.policy_key}", "slot_fence")
        return state == "running" and int(fence or 0) == job.slot_fence

    def rewind(
        self, job: TrainingJob, *, position: int, step: int, samples_lost: bool = False
    ) -> bool:
        """True: work after `position` was lost and will be redone; drop `job`."""
        force = int(samples_lost)
        return bool(self._call("rewind", job.workload, job.slot_fence, position, step, force))

    def wait_for_ready(self, base_model: str, *, timeout_s: float) -> bool:
        """Block until a job of the base model becomes ready; False after `timeout_s`."""
        with _answers():
            return self._redis.blpop([f"vla:wake:{base_model}"], timeout=timeout_s) is not None

    def wait_for_room(self, workload: str, *, timeout_s: float) -> bool:
        """Block until a job of the workload completes; False after `timeout_s`."""
        with _answers():
            return self._redis.blpop([f"vla:room:{workload}"], timeout=timeout_s) is not None

    def producing(self, workload: str, *, for_s: float) -> None:
        """Tell the reaper that somebody produces for this workload; 0 ends it."""
        with _answers():
            if for_s:
                self._redis.set(f"vla:producing:{workload}", 1, px=int(for_s * 1000))
            else:
                self._redis.delete(f"vla:producing:{workload}")

    def draining_ends(self, base_model: str) -> None:
        """Nobody drains this base model any more: the next ready job sends a hint."""
        with _answers():
            self._redis.delete(f"vla:draining:{base_model}", f"vla:hint:training:{base_model}")

    def first_ready(self, base_model: str) -> TrainingJob | None:
        """The job at the head of the queue, for a hint to name."""
        for job_id in self._redis.zrange(f"vla:ready:{base_model}", 0, 0):
            raw = self._redis.hgetall(f"vla:j:{job_id}")
            return TrainingJob.from_hash(raw) if raw else None
        return None

    def register_base_model(self, name: str, facts: dict[str, Any]) -> None:
        """What admission needs to know of a base model: digest, image size, width."""
        self._redis.hset("vla:bases", name, json.dumps(facts))

    def base_models(self) -> dict[str, dict[str, Any]]:
        with _answers():
            found = self._redis.hgetall("vla:bases")
        return {name: json.loads(raw) for name, raw in found.items()}

    def complete(self, job: TrainingJob, *, step: int, result: dict[str, Any]) -> Progress:
        answer = self._call(
            "complete", job.job_id, job.fence, job.slot_fence, step, json.dumps(result)
        )
        return Progress(**json.loads(answer))

    # --- versions for inference ---

    def publish_version(self, policy_key: str, version: int, *, base_model: str) -> int:
        """Make a version the current one unless a newer one is; returns the current one."""
        return int(self._call("publish_version", policy_key, version, base_model))

    def current_version(self, policy_key: str) -> int | None:
        """What inference serves by default; None where nothing was published yet."""
        with _answers():
            found = self._redis.hget(f"vla:policy:{policy_key}", "current_version")
        return None if found is None else int(found)

    def base_model_of(self, tenant: str, policy: str) -> str:
        """Raises `NotFoundError`, the same for another tenant's policy."""
        with _answers():
            found = self._redis.hget(f"vla:t:{tenant}:policies", policy)
        if found is None:
            raise NotFoundError(f"no policy {tenant}/{policy}", policy_key=f"{tenant}/{policy}")
        return str(found)

    def wait_for_published(
        self, after: str = "$", *, timeout_s: float
    ) -> tuple[str, list[tuple[str, int]]]:
        """Notices of new versions after `after`, and where to go on from there."""
        with _answers():
            found = self._redis.xread({"vla:published": after}, block=int(timeout_s * 1000))
        entries = found[0][1] if found else []
        last = entries[-1][0] if entries else after
        return last, [(fields["policy"], int(fields["version"])) for _, fields in entries]

    def release(self, job: TrainingJob) -> None:
        self._call("release", job.job_id, job.fence)

    def reap(self) -> Due:
        raw = json.loads(self._call("reap"))
        return Due(**{name: tuple(values) for name, values in raw.items()})

    def take_cleared(self, count: int = 256) -> list[tuple[str, str]]:
        """`(partition_id, tenant_id)` of ended jobs; whoever takes them clears their payload."""
        with _answers():
            lines = self._redis.lpop("vla:clear", count) or []
        return [tuple(line.split(" ", 1)) for line in lines]


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    """Reads, like writes, tell a Redis that is down by the platform's own error."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> UnavailableError:
    return UnavailableError(f"the control Redis does not answer: {error}")


def workload_id(tenant: str, kind: str, key: str) -> str:
    """A run's id follows from its idempotency key: a retried submit cannot make a second run."""
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()
    return f"{kind}-{digest[:20]}"


def _step(item: tuple[str, str]) -> int:
    return int(item[0])
