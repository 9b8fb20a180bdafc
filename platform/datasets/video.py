"""Exact frames of a video file: an index of all timestamps, and decoders that are lent out.

PyAV with the decoders that its wheels carry (h264, AV1 and more). A frame is found by its time, and
the frame that comes out of the decoder must carry that time: nothing is repeated or filled in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import av
import av.error
import numpy as np
import numpy.typing as npt

from vla_platform.datasets.timestamps import nearest, offsets_beyond
from vla_platform.errors import DatasetError

Pixels = npt.NDArray[np.uint8]

_SEEK_WORTH_FRAMES = 8
"""A key frame so close ahead is reached faster by decoding on than by a seek."""


@dataclass(frozen=True)
class VideoIndex:
    """Presentation times of all frames of one file, sorted."""

    path: Path
    pts: npt.NDArray[np.int64]  # in units of the stream's time base. Shape: (N,)
    times_s: npt.NDArray[np.float64]  # Shape: (N,)
    keys: npt.NDArray[np.int64]  # frame numbers of the key frames, sorted

    def find(
        self,
        wanted_s: npt.NDArray[np.float64],
        *,
        single: bool,
        episode: int,
        frames: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Frame numbers in the file for file times. Shapes: (T,) to (T,).

        `single`: the times come from a float32 column. `frames` are the numbers that errors name.
        Raises `DatasetError` with the worst offset where a time has no frame within the tolerance.
        """
        found = nearest(self.times_s, wanted_s)
        offsets = self.times_s[found] - wanted_s
        beyond = offsets_beyond(offsets, wanted_s, single=single)
        if beyond.any():
            worst = int(np.argmax(np.abs(offsets)))
            raise DatasetError(
                f"{self.path}: {int(beyond.sum())} of {len(wanted_s)} frames of episode {episode} "
                f"have no picture at their time; the worst, frame {int(frames[worst])}, is "
                f"{offsets[worst]:+.6f} s off",
                path=str(self.path),
                episode=episode,
                frame=int(frames[worst]),
                worst_offset_s=float(offsets[worst]),
            )
        return found


def index_video(path: Path) -> VideoIndex:
    """Read all timestamps without decoding. Raises `DatasetError` (missing, empty, not a video)."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DatasetError(f"{path}: no video stream", path=str(path))
            stream = container.streams.video[0]
            stamps = [
                (packet.pts, packet.is_keyframe)
                for packet in container.demux(stream)
                if packet.pts is not None
            ]
            time_base = float(stream.time_base or 0)
    except (av.error.FFmpegError, OSError) as error:
        raise DatasetError(f"{path}: not a readable video ({error})", path=str(path)) from error
    stamps.sort()
    pts = np.array([stamp for stamp, _ in stamps], np.int64)
    if not len(pts) or time_base <= 0 or (np.diff(pts) <= 0).any():
        raise DatasetError(f"{path}: no frames, or two frames at one time", path=str(path))
    keys = np.flatnonzero(np.array([key for _, key in stamps]))
    return VideoIndex(path, pts, (pts * time_base).astype(np.float64), keys.astype(np.int64))


class VideoDecoder:
    """One open file and its position. Not thread-safe: `VideoPool` lends it to one thread."""

    def __init__(self, index: VideoIndex) -> None:
        self.index = index
        try:
            self._container = av.open(str(index.path))
            self._stream = self._container.streams.video[0]
            # One thread: callers run several decoders, and dav1d would start one per core.
            self._stream.codec_context.thread_count = 1
            # Concealment would hand out repeated or grey pictures for broken packets.
            self._stream.codec_context.options = {"err_detect": "explode"}
        except (av.error.FFmpegError, OSError, IndexError) as error:
            problem = f"{index.path}: not a readable video ({error})"
            raise DatasetError(problem, path=str(index.path)) from error
        self._frames = self._container.decode(self._stream)
        self._next = 0  # number of the frame that the decoder yields next
        self._last: tuple[int, Pixels] | None = None

    def read(self, numbers: Sequence[int]) -> Iterator[Pixels]:
        """Decode frames by their number in the file, given in rising order.

        Yields arrays of shape (height, width, 3). Raises `DatasetError` for a frame that does not
        decode (`details["video_frame"]`).
        """
        for number in numbers:
            if self._last is None or self._last[0] != number:
                self._last = (number, self._decode(number))
            yield self._last[1]

    def close(self) -> None:
        self._container.close()

    def _decode(self, number: int) -> Pixels:
        keys = self.index.keys
        key = int(keys[max(int(np.searchsorted(keys, number, side="right")) - 1, 0)])
        if number < self._next or key > self._next + _SEEK_WORTH_FRAMES:
            self._seek(key)
        wanted = int(self.index.pts[number])
        try:
            for frame in self._frames:
                if frame.pts is None or frame.pts < wanted:
                    continue
                if frame.pts > wanted or frame.is_corrupt:
                    break
                self._next = number + 1
                return frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
        except av.error.FFmpegError as error:
            self._seek(0)
            raise self._broken(number) from error
        self._seek(0)
        raise self._broken(number)

    def _seek(self, key: int) -> None:
        with suppress(av.error.FFmpegError):  # the decode that follows reports what is broken
            self._container.seek(int(self.index.pts[key]), stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)
        self._next = key

    def _broken(self, number: int) -> DatasetError:
        path = str(self.index.path)
        return DatasetError(
            f"{path}: frame {number} of the file does not decode", path=path, video_frame=number
        )


class VideoPool:
    """Indexes and idle decoders of a dataset's videos. Thread-safe."""

    def __init__(self, *, max_idle: int = 8) -> None:
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._indexes: dict[Path, VideoIndex] = {}
        self._idle: OrderedDict[int, VideoDecoder] = OrderedDict()

    def index(self, path: Path) -> VideoIndex:
        with self._lock:
            known = self._indexes.get(path)
        if known is None:
            known = index_video(path)
            with self._lock:
                self._indexes[path] = known
        return known

    @contextmanager
    def borrow(self, path: Path) -> Iterator[VideoDecoder]:
        """A decoder of `path` for the caller alone, at whatever position it was left."""
        decoder = self._take(path) or VideoDecoder(self.index(path))
        try:
            yield decoder
        except BaseException:
            decoder.close()
            raise
        with self._lock:
            self._idle[id(decoder)] = decoder
            _, spare = self._idle.popitem(last=False) if self._over() else (0, None)
        if spare is not None:
            spare.close()

    def close(self) -> None:
        with self._lock:
            decoders = list(self._idle.values())
            self._idle.clear()
        for decoder in decoders:
            decoder.close()

    def _over(self) -> bool:
        return len(self._idle) > self._max_idle

    def _take(self, path: Path) -> VideoDecoder | None:
        with self._lock:
            for key, decoder in self._idle.items():
                if decoder.index.path == path:
                    return self._idle.pop(key)
        return None
