"""Episodes as mp4: the cameras side by side, one picture per step."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vla_platform.datasets.video_writer import VideoWriter
from vla_platform.envs.base import Observation


def video_of(observations: Sequence[Observation], *, fps: float) -> bytes | None:
    """An mp4 file, or None where the observations have no pictures."""
    pictures = [_side_by_side(seen) for seen in observations if seen.images]
    if not pictures:
        return None
    height, width = pictures[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episode.mp4"
        writer = VideoWriter(path, fps=fps, height=height, width=width, codec="h264")
        try:
            writer.write(pictures)
        finally:
            writer.close()
        return path.read_bytes()


def _side_by_side(seen: Observation) -> npt.NDArray[np.uint8]:
    pictures = list(seen.images.values())
    height = max(picture.shape[0] for picture in pictures)
    joined = np.concatenate(
        [np.pad(one, ((0, height - len(one)), (0, 0), (0, 0))) for one in pictures], axis=1
    )
    return np.pad(joined, ((0, height % 2), (0, joined.shape[1] % 2), (0, 0)))
