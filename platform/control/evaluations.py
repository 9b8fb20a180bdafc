"""Evaluations under way, whoever asked for them: a schedule, or a run that evaluates itself.

    vla:t:<tenant>:evaluations    hash  evaluation id -> `Outstanding`; the tenant may read it
    vla:w:<run>:evaluated         set   steps of which the run's own evaluation was begun

What is noted here is sent until its record is in the object store. The checkpoints that these
evaluations act with, that runs begin from and that teach them are in use: no rule removes them.
"""

from __future__ import annotations

import contextlib
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import groupby
from typing import Any

import redis

from vla_platform.control import dispatch, usage
from vla_platform.control.services import Services
from vla_platform.envs.evaluation_records import EvaluationArchive, EvaluationRecord
from vla_platform.errors import UnavailableError
from vla_platform.specs import WorkloadSpec
from vla_platform.specs.evaluation import EpisodesSpec
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import CheckpointError
from vla_storage.manifests import Manifest
from vla_storage.retention import set_mark

RESEND_S = 900.0
"""An evaluation of which nothing was heard for so long is sent again; it plays what is missing."""
MOST_SENDS = 3
_REMEMBERED_S = 7 * 86400
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outstanding:
    """An evaluation under way."""

    evaluation_id: str
    policy: str
    policy_version: int
    suite: str
    due: float
    sent: float  # last time; seconds since the epoch, server's clock; 0: not yet
    num_sends: int = 1
    checkpoint: str = ""  # that the version is of, where it is of one
    schedule: str = ""
    run: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)  # an `EpisodesSpec`

    @classmethod
    def from_json(cls, text: str) -> Outstanding:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def evaluations_key(tenant: str) -> str:
    return f"vla:t:{tenant}:evaluations"


def asked_of(spec: EpisodesSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", include=set(EpisodesSpec.model_fields))


def send(tenant: str, known: Outstanding) -> bool:
    """To whichever environment host is free. False: the broker is away. Raises
    `pydantic.ValidationError`."""
    spec = EpisodesSpec.model_validate_json(json.dumps(known.asked))
    return dispatch.evaluate(
        suite_name=spec.suite,
        evaluation_id=known.evaluation_id,
        tenant=tenant,
        policy_key=f"{tenant}/{known.policy}",
        version=known.policy_version,
        policy="inference",
        episodes=spec.episodes,
        seed=spec.seed,
        options=dict(spec.options),
        num_envs=spec.num_envs,
        execute_steps=spec.execute_steps,
        num_videos=spec.videos,
    )


def begin(services: Services, tenant: str, known: Outstanding) -> None:
    """Send what is on record as not sent yet; what cannot be sent now, the reconciler sends."""
    if send(tenant, known):
        with contextlib.suppress(redis.RedisError):
            heard(services, tenant, known.evaluation_id)


def heard(services: Services, tenant: str, evaluation_id: str) -> None:
    """An evaluation makes progress."""
    client = services.ledger.client
    at = now(client)
    changed(client, tenant, evaluation_id, lambda known: replace(known, sent=at))


def changed(
    client: Any,
    tenant: str,
    evaluation_id: str,
    change: Callable[[Outstanding], Outstanding | None],
) -> Outstanding | None:
    """Compare-and-swap of what is noted of an evaluation; returns what became of it. None: it has
    ended, which stays so, or `change` left it as it is."""
    key = evaluations_key(tenant)

    def swap(pipe: Any) -> Outstanding | None:
        raw = pipe.hget(key, evaluation_id)
        known = None if raw is None else change(Outstanding.from_json(raw))
        pipe.multi()
        if known is not None:
            pipe.hset(key, evaluation_id, known.to_json())
        return known

    found: Outstanding | None = client.transaction(swap, key, value_from_callable=True)
    return found


def begin_if_due(
    services: Services, tenant: str, run: str, spec: WorkloadSpec, manifest: Manifest
) -> str | None:
    """The run's own evaluation of a published checkpoint, where its spec asks for one; returns its
    id where this call began it.

    Safe to repeat: whoever publishes, mounts or settles a run calls it, and each version is
    evaluated once. Training does not wait for it. Raises `UnavailableError`.
    """
    asked = spec.evaluation
    if asked is None or manifest.step == 0 or manifest.step % asked.every_updates:
        return None
    evaluation_id = f"{run}-{manifest.step}"
    if EvaluationArchive(services.objects, tenant, evaluation_id).record() is not None:
        return None
    client = services.ledger.client
    with answering():
        known = Outstanding(
            evaluation_id=evaluation_id,
            policy=manifest.policy,
            policy_version=manifest.policy_version,
            suite=asked.suite,
            due=now(client),
            sent=0.0,
            checkpoint=manifest.checkpoint_id,
            run=run,
            asked=asked_of(asked),
        )
        if not _note(client, tenant, run, manifest.step, known):
            return None
    begin(services, tenant, known)
    return evaluation_id


def _note(client: Any, tenant: str, run: str, step: int, known: Outstanding) -> bool:
    """False: it was begun before."""
    seen = f"vla:w:{run}:evaluated"
    with client.pipeline() as pipe:
        while True:
            pipe.watch(seen)
            if pipe.sismember(seen, step):
                pipe.unwatch()
                return False
            pipe.multi()
            pipe.sadd(seen, step)
            pipe.expire(seen, _REMEMBERED_S)
            pipe.hset(evaluations_key(tenant), known.evaluation_id, known.to_json())
            try:
                pipe.execute()
            except redis.WatchError:
                continue
            return True


def keep_score(services: Services, record: EvaluationRecord) -> None:
    """Let retention know how well the evaluated checkpoint did; the latest evaluation counts.

    Raises what the store raises; a checkpoint that is gone or damaged needs no score.
    """
    raw = services.ledger.client.hget(evaluations_key(record.tenant), record.evaluation_id)
    checkpoint = Outstanding.from_json(raw).checkpoint if raw is not None else ""
    if not checkpoint:
        return
    store = services.checkpoints(record.tenant)
    try:
        set_mark(store, checkpoint, score=record.success_rate)
    except CheckpointError as error:
        _log.warning("action=score_not_kept checkpoint=%s reason=%s", checkpoint, error)


def take_off(
    client: Any, tenant: str, evaluation_id: str, record: EvaluationRecord | None = None
) -> None:
    """An evaluation is under way no longer; what its record used is charged in the same step."""
    key, day = evaluations_key(tenant), usage.today(client)

    def end(pipe: Any) -> None:
        is_known = pipe.hexists(key, evaluation_id)
        pipe.multi()
        if is_known:
            pipe.hdel(key, evaluation_id)
            if record is not None:
                charge(pipe, record, day)

    client.transaction(end, key)


def charge(pipe: Any, record: EvaluationRecord, day: date) -> None:
    """On a pipeline or a client."""
    usage.count(
        pipe, record.tenant, day, policy=record.policy_key.partition("/")[2],
        workload=record.evaluation_id, amounts={usage.Use.SIMULATOR_S: record.seconds},
    )  # fmt: skip


def in_use(client: Any, tenant: str) -> set[str]:
    """Ids of the checkpoints that evaluations under way act with, that runs begin from, or that
    teach them.

    Raises `UnavailableError`.
    """
    states = ("pending", "running", "paused")
    with answering():
        found = {
            Outstanding.from_json(raw).checkpoint for raw in client.hvals(evaluations_key(tenant))
        }
        runs = client.sunion([f"vla:tenant:{tenant}:{state}" for state in states])
        with client.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hmget(f"vla:w:{run}", "init_from", "teacher")
            found.update(*pipe.execute())
    return {one for one in found if one}


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """An outage of the control Redis as the platform's own error: whoever publishes tries again."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise UnavailableError(f"the control Redis does not answer: {error}") from error


def checkpoint_of(store: CheckpointStore, policy: str, version: int) -> str:
    """The newest checkpoint of a version; empty where it was published without one.

    Versions never fall within a run, so few of its manifests are read.
    """
    found: list[Manifest] = []
    for _, of_run in groupby(store.list(policy), key=lambda ref: ref.workload_id):
        refs = list(of_run)
        try:
            at = bisect_right(refs, version, key=lambda ref: store.manifest(ref.id).policy_version)
            if at and (manifest := store.manifest(refs[at - 1].id)).policy_version == version:
                found.append(manifest)
        except CheckpointError:
            continue  # removed meanwhile, or damaged
    newest = max(found, key=lambda one: (one.created, one.step), default=None)
    return newest.checkpoint_id if newest is not None else ""


def now(client: Any) -> float:
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6
