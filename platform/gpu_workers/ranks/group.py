"""The ranks of a worker as a process group: gloo between CPUs, nccl between GPUs.

Plain `torch.distributed`, not accelerate's launcher and not DistributedDataParallel: rank 0 is a
Celery worker that nobody launches; a slot's loss is no `forward` that DDP could wrap; shares of a
loss are summed, not averaged; gradients, numbers and failures go in one collective (`gradients`).
What accelerate is good for stays in the slot: precision, gradient scaling, accumulation.

All ranks are processes of one machine. They meet through a file (`folder`), and listen on the
loopback device only, for gloo and nccl know no passwords. nccl has not been run by us.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from vla_platform.errors import RankLostError

SHORTEST_S = 30.0
"""Under this, a busy machine would be taken for a lost rank while ranks meet."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class ProcessGroup:
    """Collectives of one rank. Raises `RankLostError` where another is gone, or later than
    `timeout_s` (half a minute at least)."""

    def __init__(
        self, folder: Path, *, rank: int, num_ranks: int, device: str, timeout_s: float
    ) -> None:
        """Returns when all ranks are there."""
        for backend in ("GLOO", "NCCL"):  # they take it from nowhere else
            os.environ[f"{backend}_SOCKET_IFNAME"] = "lo"
        with _lost():
            distributed.init_process_group(
                BACKENDS[torch.device(device).type],
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=max(timeout_s, SHORTEST_S)),
            )
            # Connections are made with the first collective: in the same order on all ranks.
            for kind in dict.fromkeys(("cpu", device)):
                self.add_up(torch.zeros(1, device=kind))

    def add_up(self, numbers: Tensor) -> None:
        with _lost():
            distributed.all_reduce(numbers)

    def hand_out(self, numbers: Tensor) -> None:
        with _lost():
            distributed.broadcast(numbers, src=0)

    def close(self) -> None:
        distributed.destroy_process_group()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"the ranks have lost each other: {error}") from error
