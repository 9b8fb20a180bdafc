"""The ledger: runs, training jobs, leases and slots, in the control Redis.

Only this module changes them. Every operation on them is one atomic server-side function on server
time (`ledger_functions`); its comment in `lua/*.lua` says which states it accepts. Late writes of a
lost lease raise `LeaseLostError`, transitions that no table allows `IllegalTransitionError`.
"""

from __future__ import annotations

import json
from typing import Any

import redis

from vla_platform.control.ledger_functions import LedgerFunctions, answered
from vla_platform.control.states import JobState, Stage
from vla_platform.control.training_job import Due, Progress, ReserveLimits, TrainingJob
from vla_platform.errors import NotFoundError


class Ledger:
    """Workloads, training jobs, leases, slots."""

    def __init__(self, client: redis.Redis, *, test_clock: bool = False) -> None:
        # With decode_responses replies are str, which redis-py's types do not say.
        self._redis: Any = client
        self._functions = LedgerFunctions(client, test_clock=test_clock)
        self._call = self._functions.call

    @classmethod
    def connect(cls, url: str, *, test_clock: bool = False) -> Ledger:
        client = redis.Redis.from_url(
            url, decode_responses=True, socket_timeout=15, health_check_interval=15
        )
        return cls(client, test_clock=test_clock)

    @property
    def client(self) -> Any:
        """The connection, for reading."""
        return self._redis

    def close(self) -> None:
        self._redis.close()

    def server_id(self) -> str:
        """Changes with every start of the server."""
        with answered():
            return str(self._redis.info("server")["run_id"])

    def load(self) -> None:
        """Put the function library on the server, replacing an older one."""
        self._functions.load()

    # --- workloads ---

    def submit(self, workload: str, fields: dict[str, Any], *, max_pending: int) -> bool:
        """Record a pending workload. False: the same one is already there."""
        return bool(self._call("submit", workload, json.dumps(fields), max_pending))

    def restore(self, workload: str, fields: dict[str, Any], *, recorded: bool = False) -> bool:
        """Record a workload as the object store knows it. False: the ledger has it.

        `recorded`: its outcome is in the object store already.
        """
        return bool(self._call("restore", workload, json.dumps(fields), int(recorded)))

    def prepared(self, workload: str, *, total_positions: int, total_steps: int) -> None:
        self._call("prepared", workload, total_positions, total_steps)

    def admit(self, workload: str, *, max_running: int) -> str:
        """`running`, or why it waits."""
        return str(self._call("admit", workload, max_running))

    def pause(self, workload: str) -> bool:
        """False: it was paused before."""
        return bool(self._call("pause", workload))

    def resume(self, workload: str) -> bool:
        """False: it was running before."""
        return bool(self._call("resume", workload))

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
        with answered():
            found: dict[str, str] = self._redis.hgetall(f"vla:w:{workload}")
        if not found:
            raise NotFoundError(f"no run {workload}", workload=workload)
        return found

    def descriptor(self, job_id: str) -> dict[str, str]:
        """All fields of a training job, those of its stages too."""
        with answered():
            found: dict[str, str] = self._redis.hgetall(f"vla:j:{job_id}")
        if not found:
            raise NotFoundError(f"no training job {job_id}", job_id=job_id)
        return found

    def knows(self, workload: str) -> bool:
        """False: it never was, or the control Redis has lost it and is about to recover."""
        with answered():
            return bool(self._redis.exists(f"vla:w:{workload}"))

    def steps(self, workload: str) -> dict[int, dict[str, Any]]:
        """The step log: optimizer step to what it did. No gap, no duplicate."""
        with answered():
            raw = self._redis.hgetall(f"vla:w:{workload}:steps")
        return {int(step): json.loads(text) for step, text in sorted(raw.items(), key=_step)}

    # --- training jobs ---

    def reserve(
        self, workload: str, *, lease_s: float, limits: ReserveLimits | None = None
    ) -> TrainingJob | str:
        """The next position to produce, or why there is none now."""
        given = (limits or ReserveLimits()).to_json()
        answer = json.loads(self._call("reserve", workload, _ms(lease_s), given))
        return TrainingJob.from_hash(answer["job"]) if "job" in answer else str(answer["wait"])

    def mark(self, job: TrainingJob, state: JobState, **fields: int | float | str) -> bool:
        """The held job goes on to `state`, with `fields` written to its descriptor.

        True: a task for the next stage should be sent, for nobody is known to look.
        """
        return bool(self._call("mark", job.job_id, job.fence, state, json.dumps(fields)))

    def lease_stage(
        self, stage: Stage, worker: str, *, lease_s: float, base_model: str = ""
    ) -> TrainingJob | None:
        """The next job that waits for `stage`, of those that workers of `base_model` compute:
        the actor's forward, and a teacher's scores."""
        answer = json.loads(self._call("lease_stage", stage, worker, _ms(lease_s), base_model))
        return TrainingJob.from_hash(answer) if answer else None

    def lease_group(
        self, worker: str, base_model: str, *, max_jobs: int, lease_s: float
    ) -> list[TrainingJob]:
        """The next ready jobs, for one grouped update: highest priority first, then oldest."""
        answer = self._call("lease_group", worker, base_model, max_jobs, _ms(lease_s))
        return [TrainingJob.from_hash(raw) for raw in json.loads(answer)]

    def renew(self, job: TrainingJob, *, lease_s: float, progress: str = "") -> None:
        """Keep one job and say how far it is. Raises `LeaseLostError` once it is not ours."""
        self._call("renew", job.job_id, job.fence, _ms(lease_s), progress)

    def heartbeat(self, worker: str, *, lease_s: float, jobs: tuple[str, ...] = ()) -> list[str]:
        """Keep a training worker's slots and `jobs`. Returns those that are its own no longer."""
        answer = json.loads(self._call("heartbeat", worker, _ms(lease_s), *jobs))
        return [str(job) for job in answer]

    def complete(
        self,
        job: TrainingJob,
        *,
        step: int,
        result: dict[str, Any],
        cost_s: float = 0.0,
        samples: int = 0,
    ) -> Progress:
        """The job took effect. `cost_s`, worker-seconds, is charged to its tenant's share."""
        answer = self._call(
            "complete",
            *(job.job_id, job.fence, job.slot_fence, step, json.dumps(result), cost_s, samples),
        )
        return Progress(**json.loads(answer))

    def drop(self, job: TrainingJob, reason: str) -> None:
        """RL only: the held job's samples train nothing; it is counted under `reason`."""
        self._call("drop", job.job_id, job.fence, reason)

    def unscored(self, job: TrainingJob, why: str) -> None:
        """The held job cannot be scored: its spec's `on_failure` happens (`OnUnscored`)."""
        self._call("unscored", job.job_id, job.fence, why)

    def release(self, job: TrainingJob, *, backs_off: bool = False) -> None:
        """Give a held job back, uncounted. With `backs_off` nobody gets it for a second, and for
        twice as long each time, up to five minutes."""
        self._call("release", job.job_id, job.fence, int(backs_off))

    def leave(self, worker: str, policy_key: str = "") -> int:
        """Give back every slot of a worker, or that of one policy; returns how many."""
        return int(self._call("leave", worker, policy_key))

    def slots_of(self, worker: str) -> set[str]:
        """Policy keys whose slots the worker owns."""
        with answered():
            return set(self._redis.smembers(f"vla:slots:{worker}"))

    def owns_slot(self, job: TrainingJob) -> bool:
        """Whether the job's workload still runs, and its slot has not changed hands."""
        with answered():
            state = self._redis.hget(f"vla:w:{job.workload}", "state")
            fence = self._redis.hget(f"vla:policy:{job.policy_key}", "slot_fence")
        return state in ("running", "paused") and int(fence or 0) == job.slot_fence

    def rewind(
        self, job: TrainingJob, *, position: int, step: int, samples_lost: bool = False
    ) -> bool:
        """True: work after `position` was lost and will be redone; drop `job`."""
        force = int(samples_lost)
        return bool(self._call("rewind", job.workload, job.slot_fence, position, step, force))

    def fall_back(self, workload: str) -> bool:
        """True: steps that died with their worker were taken back; they are redone."""
        return bool(self._call("fall_back", workload))

    def wait_for_ready(self, base_model: str, *, timeout_s: float) -> bool:
        """Block until a job of the base model becomes ready; False after `timeout_s`."""
        return self._wait(f"vla:wake:{base_model}", timeout_s)

    def wait_for_stage(self, stage: Stage, *, timeout_s: float) -> bool:
        """Block until a job waits for `stage`; False after `timeout_s`."""
        return self._wait(f"vla:wake:{stage}", timeout_s)

    def wait_for_room(self, workload: str, *, timeout_s: float) -> bool:
        """Block until a reservation may be worth another try; False after `timeout_s`."""
        return self._wait(f"vla:room:{workload}", timeout_s)

    def _wait(self, key: str, timeout_s: float) -> bool:
        with answered():
            return self._redis.blpop([key], timeout=timeout_s) is not None

    def claim(self, work: str, *, for_s: float, by: str = "somebody") -> bool:
        """Be the one who is at this work, such as a run that is produced for; again, it is renewed.

        False where another is: a message that came twice has nothing to do.
        """
        return bool(self._call("claim", work, by, _ms(for_s)))

    def renew_claim(self, work: str, *, for_s: float, by: str) -> None:
        """Raises `LeaseLostError` where it ran out, whether or not another is at it."""
        self._call("renew_claim", work, by, _ms(for_s))

    def release_claim(self, work: str, *, by: str = "somebody") -> bool:
        """False: it was another's, or nobody's."""
        return bool(self._call("release_claim", work, by))

    def preparing(self, workload: str, *, for_s: float) -> None:
        """Tell the reconciler that somebody opens and measures this workload's data."""
        with answered():
            self._redis.set(f"vla:preparing:{workload}", 1, px=_ms(for_s))

    def is_prepared_by_somebody(self, workload: str) -> bool:
        with answered():
            return bool(self._redis.exists(f"vla:preparing:{workload}"))

    def draining_ends(self, base_model: str) -> None:
        """Nobody drains this base model any more: the next ready job sends a hint."""
        with answered():
            self._redis.delete(f"vla:draining:{base_model}", f"vla:hint:training:{base_model}")

    def first_ready(self, base_model: str) -> TrainingJob | None:
        """A job at the head of the queue, for a hint to name."""
        with answered():
            for queue in self._ready_queues(base_model):
                for job_id in self._redis.zrange(queue, 0, 0):
                    raw = self._redis.hgetall(f"vla:j:{job_id}")
                    return TrainingJob.from_hash(raw) if raw else None
        return None

    def ready_ahead(self, jobs: list[str], base_model: str) -> int | None:
        """How many ready jobs go before the first of `jobs`; None: none of them is next."""
        with answered():
            every: dict[str, float] = {}
            for queue in self._ready_queues(base_model):
                every |= dict(self._redis.zrange(queue, 0, -1, withscores=True))
        mine = [every[job] for job in jobs if job in every]
        return sum(rank < min(mine) for rank in every.values()) if mine else None

    def seconds_per_job(self, tenant: str) -> float | None:
        """Mean worker-seconds of the tenant's training jobs so far; None before the first."""
        with answered():
            spent, jobs = self._redis.hmget(f"vla:usage:{tenant}", "worker_s", "jobs")
        return float(spent) / int(jobs) if jobs else None

    def _ready_queues(self, base_model: str) -> list[str]:
        owners = self._redis.zrange("vla:workers", 0, -1)
        return [f"vla:ready:{base_model}", *(f"vla:ready:{base_model}:{name}" for name in owners)]

    # --- versions for inference ---

    def publish_version(self, policy_key: str, version: int, *, base_model: str) -> int:
        """Make a version the current one unless a newer one is; returns the current one."""
        return int(self._call("publish_version", policy_key, version, base_model))

    def current_version(self, policy_key: str) -> int | None:
        """What inference serves by default; None where nothing was published yet."""
        with answered():
            found = self._redis.hget(f"vla:policy:{policy_key}", "current_version")
        return None if found is None else int(found)

    def base_model_of(self, tenant: str, policy: str) -> str:
        """Raises `NotFoundError`, the same for another tenant's policy."""
        with answered():
            found = self._redis.hget(f"vla:t:{tenant}:policies", policy)
        if found is None:
            raise NotFoundError(f"no policy {tenant}/{policy}", policy_key=f"{tenant}/{policy}")
        return str(found)

    def wait_for_published(
        self, after: str = "$", *, timeout_s: float
    ) -> tuple[str, list[tuple[str, int]]]:
        """Notices of new versions after `after`, and where to go on from there."""
        with answered():
            found = self._redis.xread({"vla:published": after}, block=int(timeout_s * 1000))
        entries = found[0][1] if found else []
        last = entries[-1][0] if entries else after
        return last, [(fields["policy"], int(fields["version"])) for _, fields in entries]

    # --- for the reconciler ---

    def due(self) -> Due:
        """Return expired leases, end what is over its time, and name what should be sent."""
        self._call("expire")
        waiting = json.loads(self._call("pending"))
        produce: list[str] = []
        stranded: list[str] = []
        cursor = "0"
        while True:
            part = json.loads(self._call("review", cursor))
            produce.extend(part.get("produce", ()))
            stranded.extend(part.get("stranded", ()))
            cursor = str(part["cursor"])
            if cursor == "0":
                break
        with answered():
            bases = self._redis.hkeys("vla:bases")
            stages = [(Stage.SCORES, ""), (Stage.ADVANTAGES, "")]
            stages += [(s, base) for s in (Stage.SCORES, Stage.ACTOR_FORWARD) for base in bases]
            return Due(
                prepare=tuple(waiting.get("prepare", ())),
                admit=tuple(waiting.get("admit", ())),
                produce=tuple(produce),
                stranded=tuple(stranded),
                stages=tuple(
                    (stage, base)
                    for stage, base in stages
                    if self._redis.zcard(f"vla:stage:{stage}" + (f":{base}" if base else ""))
                ),
                train=tuple(
                    base
                    for base in bases
                    if not self._redis.exists(f"vla:draining:{base}")
                    and any(self._redis.zcard(queue) for queue in self._ready_queues(base))
                ),
            )

    def take_cleared(self, count: int = 256) -> list[tuple[str, str]]:
        """`(partition_id, tenant_id)` of ended jobs; whoever takes them clears their payload."""
        with answered():
            lines = self._redis.lpop("vla:clear", count) or []
        return [tuple(line.split(" ", 1)) for line in lines]

    def ended(self, count: int = 64) -> list[str]:
        """Workloads whose outcome is not yet in the object store; `recorded` takes them off."""
        with answered():
            return list(self._redis.lrange("vla:ended", 0, count - 1))

    def recorded(self, workload: str) -> None:
        with answered():
            self._redis.lrem("vla:ended", 1, workload)

    def register_base_model(self, name: str, facts: dict[str, Any]) -> None:
        """What admission needs to know of a base model: digest, image size, width."""
        with answered():
            self._redis.hset("vla:bases", name, json.dumps(facts))

    def base_models(self) -> dict[str, dict[str, Any]]:
        with answered():
            found = self._redis.hgetall("vla:bases")
        return {name: json.loads(raw) for name, raw in found.items()}

    def set_weight(self, tenant: str, weight: float) -> None:
        """The tenant's share of the workers beside others'; 1 by default."""
        with answered():
            self._redis.hset("vla:weights", tenant, weight)

    def live_partitions(self) -> set[tuple[str, str]]:
        """`(partition_id, tenant_id)` of all jobs that have not ended."""
        with answered():
            runs = self._redis.sunion("vla:running", "vla:paused")
            jobs = [job for run in runs for job in self._redis.zrange(f"vla:w:{run}:jobs", 0, -1)]
            with self._redis.pipeline(transaction=False) as pipe:
                for job in jobs:
                    pipe.hmget(f"vla:j:{job}", "partition_id", "tenant_id")
                found = pipe.execute()
        return {(partition, tenant) for partition, tenant in found if partition}

    def is_due(self, chore: str, *, every_s: float) -> bool:
        """True for one caller per period, of all processes."""
        with answered():
            return bool(self._redis.set(f"vla:chore:{chore}", 1, nx=True, px=int(every_s * 1000)))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _step(item: tuple[str, str]) -> int:
    return int(item[0])
