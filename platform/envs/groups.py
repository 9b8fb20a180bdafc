"""Sessions of one environment, driven together from an ordinary thread: what a rollout uses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import EnvironmentInfo, Observation
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.runner_pool import Isolation
from vla_platform.envs.sessions import EnvironmentRequest, Outcome
from vla_platform.errors import NotFoundError
from vla_storage.closing import Closing
from vla_storage.errors import CodedError


class SessionGroup(Closing):
    """`num_sessions` sessions of a host, addressed by number. Closed as a context manager.

    Raises what `EnvironmentHost.open` raises; then no session stays open.
    """

    def __init__(
        self,
        host: EnvironmentHost,
        *,
        tenant: str,
        request: EnvironmentRequest,
        num_sessions: int,
        isolation: Isolation = Isolation.THREAD,
    ) -> None:
        self._host = host
        self._tenant = tenant
        self._ids: list[str] = []
        try:
            opening = [
                host.call(host.open(tenant, request, isolation=isolation, reuse=True))
                for _ in range(num_sessions)
            ]
            self.info = self._opened(opening)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._ids)

    def reset(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        options: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[Observation | CodedError]:
        """Reset these sessions; the others are not touched."""
        chosen = options or [None] * len(numbers)
        resets = [
            (self._ids[number], seed, option)
            for number, seed, option in zip(numbers, seeds, chosen, strict=True)
        ]
        return self._host.call(self._host.batch_reset(self._tenant, resets)).result()

    def step(
        self,
        numbers: Sequence[int],
        chunks: Sequence[npt.NDArray[np.float32]],
        *,
        every_frame: bool = False,
    ) -> list[Outcome | CodedError]:
        """Execute one chunk in each of these sessions. Shapes: (n, A)."""
        steps = [(self._ids[number], chunk) for number, chunk in zip(numbers, chunks, strict=True)]
        return self._host.step_now(self._tenant, steps, every_frame=every_frame)

    def close(self) -> None:
        """What was slow to make stays with the host for the next group that asks for it."""
        ending = [self._host.call(self._host.park(self._tenant, one)) for one in self._ids]
        self._ids = []
        for one in ending:
            with contextlib.suppress(NotFoundError):
                one.result()

    def _opened(self, opening: Sequence[Any]) -> EnvironmentInfo:
        """Wait for all, so that those that did open are closed where another failed."""
        infos: list[EnvironmentInfo] = []
        failed: list[BaseException] = []
        for future in opening:
            try:
                session, info = future.result()
            except Exception as error:
                failed.append(error)
            else:
                self._ids.append(session)
                infos.append(info)
        if failed:
            raise failed[0]
        return infos[0]
