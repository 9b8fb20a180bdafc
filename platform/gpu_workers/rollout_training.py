"""What a training worker does with the rows of a rollout: fetch them, forward the actor, update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from vla_platform.control.prepared import Prepared
from vla_platform.control.services import Services
from vla_platform.control.states import DropReason
from vla_platform.control.training_job import SAMPLES_TTL_S, TrainingJob
from vla_platform.errors import DataError, LeaseLostError, PlatformError, UnsoundWorkerError
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.distillation import (
    STUDENT_COLUMNS,
    reads_pixels,
    teacher_log_probs,
)
from vla_platform.gpu_workers.normalization import Normalizer
from vla_platform.gpu_workers.ranks.commands import Source
from vla_platform.gpu_workers.rollout_samples import (
    ACTOR_COLUMNS,
    FALLBACK_COLUMNS,
    columns_of,
)
from vla_platform.gpu_workers.samples import ROW
from vla_platform.gpu_workers.slots import Slot
from vla_platform.gpu_workers.teachers import Teachers
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.gpu_workers.training_items import MISFITS, PolicyResult, TrainItem
from vla_platform.rl.packing import RowMeta, accepted, assign
from vla_platform.rl.rewards import TEACHER_LOG_PROB
from vla_platform.specs import AlgorithmSpec, TeacherSpec
from vla_storage.errors import CodedError, PayloadError, PayloadNotFoundError
from vla_storage.payloads.columns import ColumnInfo

PLANNING_COLUMNS = ("is_transition", "trained")
"""What decides which rows are read at all."""
_log = logging.getLogger(__name__)


class RolloutTraining:
    """Between payload store and Training Model Service, for RL jobs."""

    def __init__(
        self, services: Services, service: TrainingModelService, turns: DeviceTurns
    ) -> None:
        self._services = services
        self._service = service
        self._turns = turns
        self._teachers = Teachers(services, service.backbone)

    def fetch(self, job: TrainingJob, algorithm: AlgorithmSpec) -> TrainItem:
        """What an update reads: its columns, and of them the rows that train something; pixels and
        features of rejected groups stay where they are, and what other ranks train, too.

        Raises `LeaseLostError` where the samples are lost: the job is dropped, and another rollout
        takes its place.
        """
        there = self._described(job)
        wanted = columns_of(algorithm)
        num_ranks = self._service.ranks.num_ranks
        if not set(PLANNING_COLUMNS) <= there.keys():  # a tenant's own rows, to be refused by name
            if num_ranks > 1:
                missing = sorted(set(PLANNING_COLUMNS) - there.keys())[0]
                raise DataError(f"column {missing!r} is missing", column=missing)
            return TrainItem(job.policy_key, self._read(job, there, wanted))
        told = self._read(job, there, PLANNING_COLUMNS)
        # Where no features were kept, rows count alike.
        kept = there.get("feature")
        tokens = [1] * len(told["trained"]) if kept is None else [one[0] for one in kept.shapes]
        planned = accepted(told["is_transition"], told["trained"], tokens) or [
            RowMeta(row=row, tokens=tokens[row])
            for row in np.flatnonzero(told["is_transition"]).tolist()
        ]
        if not planned:
            raise DataError("the rollout has no decision", column="is_transition")
        # Who trains which rows is settled before any of them is read.
        shares = [tuple(one.row for one in mine) for mine in assign(planned, num_ranks=num_ranks)]
        columns = self._read(job, there, wanted, list(shares[0]))
        source = Source(
            partition_id=job.partition_id,
            tenant_id=job.tenant_id,
            columns=tuple(columns),
            rows=tuple(shares),
        )
        columns[ROW] = np.array(shares[0], np.int64)
        return TrainItem(job.policy_key, columns, source=source)

    def update(self, job: TrainingJob, item: TrainItem) -> PolicyResult | CodedError:
        """One update of the mounted policy. What is wrong with the rows is their tenant's error."""
        try:
            with self._turns.training():
                return self._service.train_policy(item.policy_key, item.columns, source=item.source)
        except UnsoundWorkerError:
            raise
        except CodedError as error:
            return error
        except MISFITS as error:
            self._service.check_device(error)
            return misfit(job, error)

    def forward_actor(self, job: TrainingJob, actor: Callable[[], Slot]) -> None:
        """Write what the actor says of the rows beside them. Raises what is wrong with them.

        What an earlier try wrote stays: a newer actor would say something else.
        """
        if "actor_value" in self._services.payloads.metadata(job.partition_id, job.tenant_id):
            return
        columns = self._fetch(job, ACTOR_COLUMNS)
        try:
            with self._turns.training():
                found = self._service.actor_forward(actor(), columns)
        except MISFITS as error:
            self._service.check_device(error)
            raise misfit(job, error) from error
        self._services.payloads.put(
            job.partition_id, job.tenant_id, found, ttl_s=SAMPLES_TTL_S, wait_s=5.0
        )

    def score(self, job: TrainingJob, teacher: TeacherSpec, student: Prepared) -> None:
        """Write what the teacher says of the rows beside them. Raises what is wrong with either.

        What an earlier try wrote stays: the ledger may not have heard of it.
        """
        if TEACHER_LOG_PROB in self._services.payloads.metadata(job.partition_id, job.tenant_id):
            return
        schema, backbone = student.schema, self._service.backbone
        pixels = FALLBACK_COLUMNS if reads_pixels(schema, backbone.digest) else ()
        columns = self._fetch(job, (*STUDENT_COLUMNS, *pixels))
        units = Normalizer(
            student.normalization, student.statistics["action"], dim=schema.action_dim
        )
        try:
            with self._teachers.get(job.tenant_id, teacher) as module, self._turns.training():
                found = teacher_log_probs(module, units, schema, columns, self._service.encoder)
        except MISFITS as error:
            self._service.check_device(error)
            raise misfit(job, error) from error
        self._services.payloads.put(
            job.partition_id,
            job.tenant_id,
            {TEACHER_LOG_PROB: found},
            ttl_s=SAMPLES_TTL_S,
            wait_s=5.0,
        )

    def close(self) -> None:
        self._teachers.close()

    def _fetch(self, job: TrainingJob, columns: tuple[str, ...]) -> dict[str, Any]:
        """All rows of those of `columns` that are there."""
        return self._read(job, self._described(job), columns)

    def _described(self, job: TrainingJob) -> dict[str, ColumnInfo]:
        with self._lost_is_dropped(job):
            there = self._services.payloads.metadata(job.partition_id, job.tenant_id)
            if not there:
                raise PayloadNotFoundError(f"partition {job.partition_id} is gone", columns=[])
            return there

    def _read(
        self,
        job: TrainingJob,
        there: Mapping[str, ColumnInfo],
        columns: tuple[str, ...],
        rows: list[int] | None = None,
    ) -> dict[str, Any]:
        """Those of `columns` that are there; pixels only where no features were kept."""
        training = columns != PLANNING_COLUMNS and "feature" not in there
        wanted = there.keys() & {*columns, *(FALLBACK_COLUMNS if training else ())}
        with self._lost_is_dropped(job):
            payloads = self._services.payloads
            return dict(payloads.get(job.partition_id, job.tenant_id, sorted(wanted), rows))

    def lost(self, job: TrainingJob, error: PayloadError) -> None:
        """The samples are gone: the job is dropped, and another rollout takes its place."""
        _log.warning("action=samples_lost job=%s reason=%s", job.job_id, error)
        self._services.ledger.drop(job, DropReason.SAMPLES_LOST)

    @contextmanager
    def _lost_is_dropped(self, job: TrainingJob) -> Iterator[None]:
        try:
            yield
        except PayloadError as error:
            self.lost(job, error)
            raise LeaseLostError(f"the samples of {job.job_id} are lost") from error


def misfit(job: TrainingJob, error: Exception) -> PlatformError:
    """What is wrong with one tenant's rows or records, as that tenant's error."""
    return PlatformError(
        f"the data of {job.job_id} do not fit {job.policy_key}: {error}", policy_key=job.policy_key
    )
