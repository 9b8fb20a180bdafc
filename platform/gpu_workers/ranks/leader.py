"""Rank 0's side: it starts the other ranks of its worker, watches them, and leads.

Followers end when their connection closes, however rank 0 ends, and with its process (`child`). A
follower that ends, or says nothing for as long as a training step may take, makes the worker
unsound: it ends, its leases pass to others, and whoever started it starts it anew, with all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla_platform.errors import ConfigurationError, RankLostError, UnsoundWorkerError
from vla_platform.gpu_workers.ranks.base import Ranks
from vla_platform.gpu_workers.ranks.commands import Command
from vla_platform.gpu_workers.ranks.folder import meeting_folder
from vla_platform.gpu_workers.ranks.group import ProcessGroup
from vla_platform.gpu_workers.ranks.link import Begin, Do, Done, Link, Loaded, Meet, Told
from vla_platform.settings import Settings
from vla_platform.stack.servers import guarded

FOLLOWER = "vla_platform.gpu_workers.ranks.follower"
LOADING_S = 900.0
"""Longest time until a follower has loaded its base models."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Team:
    """The followers of this process, one more device each. Thread-safe: a command at a time."""

    def __init__(self, settings: Settings, *, device: str, on_lost: Callable[[str], None]) -> None:
        """Start them. `on_lost(reason)` is called from a thread when one has ended by itself.

        To be made by the main thread: followers end with the thread that started them. Raises
        `ConfigurationError` where there are fewer devices than ranks, or several base models: each
        would wait for the other's commands.
        """
        self.num_ranks = settings.training_ranks
        if len(names := settings.served_models()) > 1:
            raise ConfigurationError(
                f"VLA_TRAINING_RANKS is {self.num_ranks}: such a worker serves one base model, "
                f"not {', '.join(names)} (VLA_BASE_MODELS)"
            )
        if device != "cpu":
            found = torch.cuda.device_count()
            if device != "cuda" or found < self.num_ranks:
                raise ConfigurationError(
                    f"VLA_TRAINING_RANKS is {self.num_ranks}, a device each from the first on: "
                    f"VLA_DEVICE={device} has {found}; it has to be cuda or cpu"
                )
        self.lock = threading.Lock()
        self._on_lost = on_lost
        self._device = device
        self._timeout_s = settings.training_watchdog_s
        self._closing = threading.Event()
        self._closed = contextlib.ExitStack()
        self._group: ProcessGroup | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Link] = []
        for rank in range(1, self.num_ranks):
            self._start(
                Begin(
                    rank=rank,
                    num_ranks=self.num_ranks,
                    device=device if device == "cpu" else f"{device}:{rank}",
                    settings=settings,
                )
            )

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def meet(self, digests: Mapping[str, str]) -> None:
        """Wait until all have loaded what rank 0 has, and make them a group.

        Raises `RankLostError`, and `ConfigurationError` where base models differ.
        """
        for rank, link in enumerate(self._links, start=1):
            loaded = link.receive(Loaded, timeout_s=LOADING_S)
            if loaded.digests != digests:
                raise ConfigurationError(f"rank {rank} has loaded other base models than rank 0")
        folder = self._closed.enter_context(meeting_folder())
        self.tell(Meet(folder))
        self._group = ProcessGroup(
            folder,
            rank=0,
            num_ranks=self.num_ranks,
            device=self._device,
            timeout_s=self._timeout_s,
        )
        self._closed.callback(self._group.close)
        if self._device == "cpu":  # nccl may look there again
            shutil.rmtree(folder)
        _log.info("action=ranks_ready num_ranks=%d pids=%s", self.num_ranks, self.pids)

    def ranks(self, base_model: str) -> Ranks:
        """How policies on one base model see the team, after `meet`."""
        return _Leading(self, base_model)

    def tell(self, message: Any) -> None:
        for link in self._links:
            link.send(message)

    def hear(self, kind: type[Any]) -> list[Any]:
        """The next message of each follower, in rank order."""
        return [link.receive(kind, timeout_s=self._timeout_s) for link in self._links]

    @property
    def group(self) -> ProcessGroup:
        assert self._group is not None, "the ranks have not met"
        return self._group

    def close(self, timeout_s: float = 10.0) -> None:
        """Let all followers end. No command is under way."""
        self._closing.set()
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._closed.close()

    def _start(self, begin: Begin) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                guarded((sys.executable, "-m", FOLLOWER, str(theirs.fileno()))),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        link = Link(Connection(ours.detach()))
        self._processes.append(process)
        self._links.append(link)
        link.send(begin)
        threading.Thread(
            target=self._watch, args=(begin.rank, process), name=f"rank-{begin.rank}", daemon=True
        ).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing.is_set():
            self._on_lost(f"rank {rank} (process {process.pid}) has ended with {code}")


class _Leading(Ranks):
    """Rank 0 as the policies on one base model see it."""

    rank = 0

    def __init__(self, team: Team, base_model: str) -> None:
        self._team = team
        self._base_model = base_model
        self.num_ranks = team.num_ranks

    @contextlib.contextmanager
    def lead(self, command: Callable[[], Command]) -> Iterator[list[Any]]:
        answers: list[Any] = []
        with self._team.lock:
            self._team.tell(Do(self._base_model, command()))
            try:
                yield answers
            except UnsoundWorkerError:
                raise
            except Exception as error:
                # The others are somewhere in the middle of it, and would take what comes next for
                # the rest of it.
                raise RankLostError(f"rank 0 has left a command: {error!r}") from error
            answers += [done.answer for done in self._team.hear(Done)]

    def exchange(self, value: T) -> list[T]:
        told = [value, *(one.value for one in self._team.hear(Told))]
        self._team.tell(Told(told))
        return told

    def add_up(self, numbers: Tensor) -> None:
        self._team.group.add_up(numbers)

    def hand_out(self, numbers: Tensor) -> None:
        self._team.group.hand_out(numbers)
