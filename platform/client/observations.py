"""Observations as bytes on the wire, and the frames of sessions that look back."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import Observation
from vla_platform.errors import DataError
from vla_platform.inference.protocol import RowShape, SessionStep

MAX_SESSIONS = 4096
Bytes = npt.NDArray[np.uint8]


class SessionFrames:
    """The frames that each session has sent lately, for a worker that lost them. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], tuple[int, deque[Bytes]]] = OrderedDict()
        self._lock = threading.Lock()

    def step(
        self, key: tuple[str, str], step: int | None, history: int, parts: list[Bytes]
    ) -> tuple[list[Bytes], list[Bytes], SessionStep]:
        """The newest frame to ship, the whole window to fall back on, and what step this is.

        `step=None` is the one after the last; a step out of order begins a new window.
        """
        frame = np.concatenate(parts)  # a copy: the environment goes on to its next frame
        with self._lock:
            last, frames = self._sessions.pop(key, (-1, deque[Bytes]()))
            step = last + 1 if step is None else step
            if step != last + 1:
                frames = deque()
            frames = deque(frames, maxlen=history)
            frames.append(frame)
            self._sessions[key] = (step, frames)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
            window = list(frames)
        return [frame], window, SessionStep(session=key[1], step=step, history=history)


def bytes_of(rows: Sequence[Observation]) -> tuple[RowShape, list[Bytes]]:
    """The rows' common shape, and flat views of their bytes in wire order."""
    if not rows:
        raise DataError("predict takes at least one observation", column="observations")
    shape: RowShape | None = None
    parts: list[Bytes] = []
    for row in rows:
        if not isinstance(row, Observation) or not isinstance(row.task, str):
            raise DataError(
                "an observation is an `Observation(images, state, task)`, its task a text",
                column="observations",
            )
        cameras = []
        for name, image in row.images.items():
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise DataError(
                    f"the picture of {name} is {image.dtype} {image.shape}, "
                    "not uint8 (height, width, 3)",
                    column=name,
                )
            cameras.append((name, *image.shape[:2]))
            parts.append(np.ascontiguousarray(image).reshape(-1))
        state = np.ascontiguousarray(row.state, dtype="<f4")
        if state.ndim != 1 or not np.isfinite(state).all():
            raise DataError("the state is not one row of finite numbers", column="state")
        found = RowShape(cameras=tuple(cameras), state_dim=len(state))
        if shape is not None and found != shape:
            raise DataError(
                "the observations of one call differ in cameras, sizes or state; call once for each"
            )
        shape = found
        if len(state):
            parts.append(state.view(np.uint8))
    if shape is None or not shape.cameras:
        raise DataError("an observation has at least one picture", column="images")
    return shape, parts
