"""Encode pictures into an mp4 file that allows cheap random access."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np
import numpy.typing as npt

from vla_platform.errors import DatasetError

Codec = Literal["h264", "av1"]

_ENCODERS: dict[Codec, tuple[str, dict[str, str]]] = {
    # A key frame every second frame, as LeRobot does; one thread, so that equal input gives equal
    # bytes.
    "h264": ("libx264", {"g": "2", "bf": "0", "crf": "18", "preset": "veryfast"}),
    "av1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "10", "svtav1-params": "lp=1"}),
}


class VideoWriter:
    """One open mp4 file; frames are at multiples of 1 / fps from 0 on."""

    def __init__(self, path: Path, *, fps: float, height: int, width: int, codec: Codec) -> None:
        if height % 2 or width % 2:
            raise DatasetError(f"{path}: {height} x {width} pictures; video needs even sizes")
        path.parent.mkdir(parents=True, exist_ok=True)
        rate = Fraction(fps).limit_denominator(1001)
        encoder, options = _ENCODERS[codec]
        self._container = av.open(str(path), "w")
        stream = self._container.add_stream(encoder, rate=rate, options=dict(options))
        assert isinstance(stream, av.VideoStream)  # the encoders above are video encoders
        self._stream = stream
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.thread_count = 1
        self._stream.codec_context.time_base = 1 / rate
        self._shape = (height, width, 3)
        self._fps = fps
        self.num_frames = 0
        self.size_bytes = 0

    @property
    def duration_s(self) -> float:
        return self.num_frames / self._fps

    def write(self, pictures: Iterable[npt.NDArray[np.uint8]]) -> None:
        """Append pictures of shape (height, width, 3), RGB."""
        for picture in pictures:
            if picture.shape != self._shape or picture.dtype != np.uint8:
                raise DatasetError(
                    f"a picture is {picture.dtype} {picture.shape}, not uint8 {self._shape}"
                )
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = self.num_frames
            self._mux(frame)
            self.num_frames += 1

    def close(self) -> None:
        self._mux(None)
        self._container.close()

    def _mux(self, frame: av.VideoFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self.size_bytes += packet.size
            self._container.mux(packet)
