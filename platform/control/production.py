"""The producer of recorded data: demonstrations, and episodes with rewards for offline RL, into the
payload store, one training job at a time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy.typing as npt

from vla_platform import work
from vla_platform.control import dispatch
from vla_platform.control.admission import check_rl, derive_schema, open_for, split_episodes
from vla_platform.control.leases import announced, given_back, kept_alive
from vla_platform.control.offline import open_offline
from vla_platform.control.plan import Domain, Plan
from vla_platform.control.prepared import Prepared, load_prepared, prepared_key
from vla_platform.control.services import Services
from vla_platform.control.states import (
    PASSING_WAITS,
    JobState,
    WorkloadState,
    is_terminal,
    state_after,
)
from vla_platform.control.training_job import SAMPLES_TTL_S, TrainingJob
from vla_platform.control.workloads import load_spec
from vla_platform.datasets import Demonstrations, LeRobotDataset
from vla_platform.datasets.demonstrations import DEFAULT_CACHE_BYTES
from vla_platform.datasets.frames import FrameSource
from vla_platform.errors import DatasetError, LeaseLostError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.schema import Schema
from vla_platform.specs import RLSpec, SFTSpec, canonical_json
from vla_storage.errors import CodedError, ObjectExistsError

MOST_SOURCES = 16
_log = logging.getLogger(__name__)
ENDED = frozenset(str(state) for state in WorkloadState if is_terminal(state))


Told = dict[str, int | float | str]
Columns = dict[str, npt.NDArray[Any]]


class Source(Protocol):
    """The open data of one workload in this process."""

    def batch(self, position: int) -> tuple[Told, Columns]: ...

    def close(self) -> None: ...


@dataclass(kw_only=True)
class DemonstrationSource:
    """The open data of one workload in this process."""

    plan: Plan
    train: Demonstrations
    heldout: Demonstrations | None
    num_heldout: int

    def batch(self, position: int) -> tuple[Told, Columns]:
        """What the ledger is told of a position's job, and its rows."""
        place = self.plan.place(position)
        if place.domain is Domain.HELDOUT and self.heldout is not None:
            batch = self.heldout.evenly_spaced(self.num_heldout)
        else:
            batch = self.train.batch(place.first_sample, self.plan.batch_size)
        return {"sample_count": len(batch), "domain": str(place.domain)}, batch.columns

    def close(self) -> None:
        self.train.close()
        if self.heldout is not None:
            self.heldout.close()


class Sources:
    """Open sources by workload, the least recently used closed first. Thread-safe."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._open: OrderedDict[str, Source] = OrderedDict()
        # Decoded frames by dataset digest and image size, for as long as a source uses them:
        # tenants that train on the same recording decode it once.
        self._frames: WeakValueDictionary[tuple[Path, str, int], FrameSource] = (
            WeakValueDictionary()
        )
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}

    def get(self, tenant: str, run: str) -> Source:
        with self._lock:
            found = self._open.get(run)
            if found is not None:
                self._open.move_to_end(run)
                return found
            opening = self._opening.setdefault(run, threading.Lock())
        with opening:  # who comes meanwhile waits, instead of opening the same data again
            return self._get_or_load(tenant, run)

    def _get_or_load(self, tenant: str, run: str) -> Source:
        with self._lock:
            found = self._open.get(run)
            if found is not None:
                return found
        opened = self._load(tenant, run)
        with self._lock:
            found = self._open.setdefault(run, opened)
            over = [
                self._open.popitem(last=False)[1] for _ in range(len(self._open) - MOST_SOURCES)
            ]
        for source in over if found is opened else [*over, opened]:
            source.close()
        return found

    def drop(self, run: str) -> None:
        with self._lock:
            self._opening.pop(run, None)
            source = self._open.pop(run, None)
        if source is not None:
            source.close()

    def _load(self, tenant: str, run: str) -> Source:
        spec = load_spec(self._services, tenant, run)
        prepared = load_prepared(self._services, tenant, run)
        if isinstance(spec, RLSpec):
            data, digest = open_offline(self._services, tenant, spec, prepared.schema, self._shared)
            if digest != prepared.dataset_digest:
                data.close()
                raise DatasetError(
                    f"a dataset of {run} has changed since it was prepared; submit a new run"
                )
            return data
        dataset = open_for(self._services, tenant, spec.dataset)
        size = prepared.schema.image_size
        if dataset.digest != prepared.dataset_digest:
            raise DatasetError(
                f"{dataset.path} has changed since the run was prepared; submit a new run",
                path=str(dataset.path),
            )
        frames = self._shared(dataset, size)
        return DemonstrationSource(
            plan=Plan.of(spec, num_samples=prepared.num_samples, num_heldout=prepared.num_heldout),
            train=demonstrations(spec, dataset, prepared.schema, prepared.train_episodes, frames),
            heldout=demonstrations(
                spec, dataset, prepared.schema, prepared.heldout_episodes, frames
            )
            if prepared.num_heldout
            else None,
            num_heldout=prepared.num_heldout,
        )

    def _shared(self, dataset: LeRobotDataset, image_size: int) -> FrameSource:
        with self._lock:
            # By folder too: another tenant's copy is equal only until that tenant writes into it.
            key = (dataset.path, dataset.digest, image_size)
            frames = self._frames.get(key)
            if frames is None:
                frames = FrameSource(
                    dataset, image_size=image_size, cache_bytes=DEFAULT_CACHE_BYTES
                )
                self._frames[key] = frames
            return frames


def demonstrations(
    spec: SFTSpec,
    dataset: LeRobotDataset,
    schema: Schema,
    episodes: tuple[int, ...],
    frames: FrameSource | None = None,
) -> Demonstrations:
    return Demonstrations(
        dataset,
        cameras=schema.cameras,
        state_key=spec.dataset.state if schema.state_dim else None,
        action_key=spec.dataset.action,
        chunk=schema.chunk,
        image_size=schema.image_size,
        episodes=episodes,
        seed=spec.seed,
        on_bad_row=spec.dataset.on_bad_row,
        frames=frames,
    )


def prepare(services: Services, tenant: str, run: str) -> str:
    """Open and measure the data of a pending workload, then try to admit it.

    Bad data ends the workload with its place named.
    """
    if services.ledger.workload(run)["prepared"] != "1":
        try:
            spec = load_spec(services, tenant, run)
            with (
                work.on_run("prepare", tenant, run),
                announced(services.ledger, run, for_s=services.settings.lease_s),
            ):
                if isinstance(spec, RLSpec):
                    prepared, positions, steps = _interface(services, tenant, spec)
                else:
                    prepared, positions, steps = _measure(services, tenant, spec)
        except CodedError as error:
            if error.retryable or not services.ledger.knows(run):
                raise  # the reconciler sends this again
            return services.ledger.fail(run, error.to_dict())
        # It may be there already, from a worker that died before it could say so.
        with contextlib.suppress(ObjectExistsError):
            services.objects.put(prepared_key(tenant, run), prepared.to_json(), if_absent=True)
        services.ledger.prepared(run, total_positions=positions, total_steps=steps)
        _log.info(
            "action=prepared tenant=%s workload=%s samples=%d steps=%d",
            *(tenant, run, prepared.num_samples, steps),
        )
    return admit(services, tenant, run)


def admit(services: Services, tenant: str, run: str) -> str:
    answer = services.ledger.admit(run, max_running=services.settings.max_running_per_tenant)
    if answer == "running":
        dispatch.produce(services.ledger.workload(run))
    return answer


def _interface(services: Services, tenant: str, spec: RLSpec) -> tuple[Prepared, int, int]:
    """That of the checkpoint that the run begins from; its data are made by rollouts, or were."""
    described = spec.environment.model_dump(mode="json") if spec.environment else {}
    found = check_rl(services, tenant, spec)
    digest = hashlib.sha256(canonical_json(described)).hexdigest()
    num_samples = num_skipped = 0
    if spec.data is not None:
        data, digest = open_offline(services, tenant, spec, found.schema)
        with contextlib.closing(data):
            num_samples, num_skipped = data.num_decisions, data.num_skipped
    prepared = replace(
        found,
        dataset_digest=digest,
        train_episodes=(),
        heldout_episodes=(),
        num_samples=num_samples,
        num_heldout=0,
        num_skipped=num_skipped,
    )
    return prepared, 0, spec.updates


def _measure(services: Services, tenant: str, spec: SFTSpec) -> tuple[Prepared, int, int]:
    dataset = open_for(services, tenant, spec.dataset)
    schema = derive_schema(services, spec, dataset)
    train, heldout = split_episodes(spec, dataset)
    with demonstrations(spec, dataset, schema, tuple(train)) as source:
        statistics, num_samples = source.statistics(), source.num_samples
        num_skipped = source.skipped.num_samples
    num_heldout = 0
    if heldout and spec.dataset.heldout_samples:
        with demonstrations(spec, dataset, schema, tuple(heldout)) as source:
            num_heldout = min(spec.dataset.heldout_samples, source.num_samples)
    prepared = Prepared(
        schema=schema,
        dataset_digest=dataset.digest,
        train_episodes=tuple(train),
        heldout_episodes=tuple(heldout),
        num_samples=num_samples,
        num_heldout=num_heldout,
        statistics=statistics,
        num_skipped=num_skipped,
        action_module=spec.action_module,
        normalization=spec.dataset.normalization,
    )
    plan = Plan.of(spec, num_samples=num_samples, num_heldout=num_heldout)
    return prepared, plan.positions, plan.steps


def produce(services: Services, sources: Sources, tenant: str, run: str) -> int:
    """Fill the workload's in-flight room for one slice; returns how many jobs became ready."""
    produced = 0
    end = time.monotonic() + services.settings.slice_s
    lease_s = services.settings.lease_s
    try:
        services.ledger.claim(run, for_s=lease_s)
        if services.ledger.workload(run)["state"] == "running":
            sources.get(tenant, run)  # before a lease is counted: opening may take long
        while time.monotonic() < end:
            services.ledger.claim(run, for_s=lease_s)
            asked_s = time.time()
            job = services.ledger.reserve(
                run, lease_s=lease_s, limits=services.settings.reserve_limits()
            )
            if isinstance(job, TrainingJob):
                work.over("reserve", job, asked_s, time.time())
                with (
                    work.on_job("produce", job),
                    given_back(services.ledger, job),
                    kept_alive(services.ledger, job, lease_s=lease_s, producing=True),
                ):
                    _produce_one(services, sources.get(tenant, run), job)
                produced += 1
            elif job in PASSING_WAITS:
                services.ledger.wait_for_room(run, timeout_s=0.5)
            else:
                if job in ENDED:
                    sources.drop(run)
                return produced
        dispatch.produce(services.ledger.workload(run))
    except LeaseLostError:
        sources.drop(run)  # cancelled, sent back or taken over: the ledger knows who goes on
    except CodedError as error:
        if error.retryable or not services.ledger.knows(run):
            raise  # the reconciler sends this again, once it has recovered a lost ledger
        services.ledger.fail(run, error.to_dict())
        sources.drop(run)
    finally:
        services.ledger.release_claim(run)
    return produced


def _produce_one(services: Services, source: Source, job: TrainingJob) -> None:
    told, columns = source.batch(job.position)
    services.payloads.clear(
        job.partition_id, job.tenant_id
    )  # what a producer left that died before `ready`
    services.payloads.put(
        job.partition_id,
        job.tenant_id,
        columns,
        ttl_s=SAMPLES_TTL_S,
        wait_s=services.settings.lease_s / 2,
    )
    reach(Failpoint.PAYLOAD_WRITTEN)
    state = state_after(job.lifecycle, JobState.RESERVED)
    hint_is_due = services.ledger.mark(job, state, **told)
    reach(Failpoint.META_PUBLISHED)
    if hint_is_due:
        dispatch.go_on(job, state)
