"""A process that trains as one more rank of a worker: it does what rank 0 says, on its own rows.

    python -m vla_platform.gpu_workers.ranks.follower FD

It has no queue, no ledger and no checkpoints. It reads its own rows from the payload store; slots
and their states come from rank 0. It ends with its connection, the file descriptor FD.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_platform.control.services import object_store, payload_store
from vla_platform.errors import RankLostError, UnsoundWorkerError
from vla_platform.gpu_workers.backbone import Backbone, digest_of
from vla_platform.gpu_workers.ranks.base import Ranks
from vla_platform.gpu_workers.ranks.commands import (
    Command,
    Digest,
    Job,
    Mount,
    TrainGroup,
    TrainPolicy,
    Unmount,
)
from vla_platform.gpu_workers.ranks.group import ProcessGroup
from vla_platform.gpu_workers.ranks.link import Begin, Do, Done, Loaded, Meet, Told
from vla_platform.gpu_workers.samples import ROW
from vla_platform.gpu_workers.training import (
    TrainingModelService,
    training_service,
    use_one_thread,
)
from vla_platform.gpu_workers.training_items import TrainItem
from vla_platform.logs import configure
from vla_storage.errors import CodedError
from vla_storage.payloads import PayloadStore

_log = logging.getLogger(__name__)
T = TypeVar("T")


class FollowerLink:
    """Rank 0's messages in order. This process ends with the connection, whatever it is doing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def receive(self) -> Any:
        return self._messages.get()

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (OSError, EOFError):
            os._exit(os.EX_OK)  # rank 0 is gone, or needs us no longer


class Following(Ranks):
    """A rank that is led."""

    def __init__(self, link: FollowerLink, group: ProcessGroup, begin: Begin) -> None:
        self.rank = begin.rank
        self.num_ranks = begin.num_ranks
        self._link = link
        self._group = group

    def exchange(self, value: T) -> list[T]:
        self._link.send(Told(value))
        message = self._link.receive()
        if not isinstance(message, Told):
            raise RankLostError(f"the ranks are out of step: {message!r}")
        told: list[T] = message.value
        return told

    def add_up(self, numbers: Tensor) -> None:
        self._group.add_up(numbers)

    def hand_out(self, numbers: Tensor) -> None:
        self._group.hand_out(numbers)


class Follower:
    """Does commands. Raises what ends this rank, and with it the worker."""

    def __init__(
        self, services: Mapping[str, TrainingModelService], payloads: PayloadStore, *, rank: int
    ) -> None:
        """`services` by base model."""
        self._services = services
        self._payloads = payloads
        self._rank = rank

    def do(self, base_model: str, command: Command) -> Any:
        """The answer to a command: see `commands`."""
        service = self._services[base_model]
        match command:
            case Mount():
                return service.follow_mount(command)
            case Unmount():
                service.unmount(command.policy_key)
            case Digest():
                return digest_of(service.slot(command.policy_key).module)
            case TrainGroup():
                outcomes = service.train_group([self._item(service, job) for job in command.jobs])
                return [one if isinstance(one, CodedError) else None for one in outcomes]
            case TrainPolicy():
                item = self._item(service, command.job)
                try:
                    service.train_policy(
                        item.policy_key, item.columns, source=item.source, problem=item.problem
                    )
                except UnsoundWorkerError:
                    raise
                except CodedError as error:
                    return error
        return None

    def _item(self, service: TrainingModelService, job: Job) -> TrainItem:
        """This rank's rows of a job."""
        if job.policy_key not in service.mounted:
            raise RankLostError(f"{job.policy_key} is not mounted on rank {self._rank}")
        columns: dict[str, Any] = {}
        problem = None
        try:
            columns = self._columns(job)
        except CodedError as error:
            problem = error
        return TrainItem(job.policy_key, columns, job.num_microbatches, job.source, problem)

    def _columns(self, job: Job) -> dict[str, Any]:
        source = job.source
        rows = source.rows[self._rank]
        if not rows:
            return {}
        found = self._payloads.get(source.partition_id, source.tenant_id, source.columns, rows)
        return {**found, ROW: np.array(rows, np.int64)}


def main(descriptor: int) -> None:
    # Rank 0 decides when we end: a signal to the whole group is for it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = FollowerLink(Connection(descriptor))
    begin: Begin = link.receive()
    settings = begin.settings
    configure(settings.log_format, process=f"{settings.role}/rank-{begin.rank}")
    try:
        follow(link, begin)
    except BaseException as error:
        _log.critical("action=rank_failed rank=%d", begin.rank, exc_info=error)
        os._exit(os.EX_SOFTWARE)  # other threads would keep it alive


def follow(link: FollowerLink, begin: Begin) -> None:
    """Load, meet the others, and do what comes."""
    settings = begin.settings
    if begin.device == "cpu":
        use_one_thread()
    else:
        torch.cuda.set_device(begin.device)
    models = settings.served_models().items()
    backbones = {name: Backbone.load(source, device=begin.device) for name, source in models}
    link.send(Loaded({name: backbone.digest for name, backbone in backbones.items()}))
    meet: Meet = link.receive()
    group = ProcessGroup(
        meet.folder,
        rank=begin.rank,
        num_ranks=begin.num_ranks,
        device=begin.device,
        timeout_s=settings.training_watchdog_s,
    )
    ranks = Following(link, group, begin)
    services = {name: training_service(backbones[name], settings, ranks) for name in backbones}
    payloads = payload_store(settings, object_store(settings))
    follower = Follower(services, payloads, rank=begin.rank)
    while True:
        message = link.receive()
        if not isinstance(message, Do):
            raise RankLostError(f"the ranks are out of step: {message!r}")
        link.send(Done(follower.do(message.base_model, message.command)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
