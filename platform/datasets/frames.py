"""Frames as the model takes them: resized, digested, kept in bounded memory, read ahead."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from vla_platform.datasets.lerobot import LeRobotDataset
from vla_platform.datasets.video import Pixels

DIGEST_BYTES = 16


class FrameKey(NamedTuple):
    """Sorts in decoding order: frames of one video of one episode follow each other."""

    episode: int
    camera: str
    frame: int


class Frame(NamedTuple):
    pixels: Pixels  # Shape: (P, P, 3)
    digest: npt.NDArray[np.uint8]  # BLAKE2b of the pixels. Shape: (16,)


def make_frame(picture: Pixels, size: int) -> Frame:
    """A picture as the model takes it, named by its digest."""
    pixels = resize(picture, size)
    digest = hashlib.blake2b(pixels.data, digest_size=DIGEST_BYTES).digest()
    return Frame(pixels, np.frombuffer(digest, np.uint8))


def resize(picture: Pixels, size: int) -> Pixels:
    """The whole picture at (size, size), bicubic, aspect ratio not kept, as StarVLA does."""
    if picture.shape[:2] != (size, size):
        image = Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC)
        picture = np.asarray(image)
    return np.ascontiguousarray(picture)


class FrameSource:
    """Decoded and resized frames of one dataset, bounded and thread-safe.

    The oldest frames leave first. Not the least used: a frame that was just used comes up again
    only in the next epoch, one that was read ahead is about to be used.
    """

    def __init__(self, dataset: LeRobotDataset, *, image_size: int, cache_bytes: int) -> None:
        self._dataset = dataset
        self._size = image_size
        self._frame_bytes = 3 * image_size * image_size + DIGEST_BYTES
        self.capacity = max(0, cache_bytes // self._frame_bytes)
        self._frames: OrderedDict[FrameKey, Frame] = OrderedDict()
        self._lock = threading.Lock()
        self.num_decoded = 0

    @property
    def size_bytes(self) -> int:
        return len(self._frames) * self._frame_bytes

    def get(self, keys: Iterable[FrameKey]) -> Mapping[FrameKey, Frame]:
        """The frames of `keys`, decoding what is missing."""
        wanted = set(keys)
        with self._lock:
            found = {key: self._frames[key] for key in wanted if key in self._frames}
        for key, frame in self.decode(sorted(wanted - found.keys())):
            found[key] = frame
        return found

    def missing(self, keys: Iterable[FrameKey]) -> list[FrameKey]:
        """Those of `keys` that are not in memory, in decoding order."""
        with self._lock:
            return sorted({key for key in keys if key not in self._frames})

    def decode(self, keys: Sequence[FrameKey]) -> Iterator[tuple[FrameKey, Frame]]:
        """Decode sorted `keys`, keeping each for later."""
        for (episode, camera), group in groupby(keys, lambda key: (key.episode, key.camera)):
            run = list(group)
            pictures = self._dataset.images(episode, [key.frame for key in run], camera)
            for key, picture in zip(run, pictures, strict=True):
                frame = make_frame(picture, self._size)
                self._keep(key, frame)
                yield key, frame

    def _keep(self, key: FrameKey, frame: Frame) -> None:
        with self._lock:
            self.num_decoded += 1
            self._frames[key] = frame
            while len(self._frames) > self.capacity:
                self._frames.popitem(last=False)


class ReadAhead:
    """A thread that decodes what comes next, in decoding order.

    It ends when nothing is missing and begins again at the next `request`. A frame that fails here
    is left to `FrameSource.get`, where the consumer gets the error.
    """

    def __init__(self, source: FrameSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._wanted: list[FrameKey] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def request(self, keys: Sequence[FrameKey]) -> None:
        """Decode `keys` where missing; replaces the request before."""
        with self._lock:
            if self._closed:
                return
            self._wanted = self._source.missing(keys)
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wanted = []
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while run := self._next_run():
            try:
                for _ in self._source.decode(run):
                    if self._closed:
                        break
            except Exception:
                # `get` meets the same fault and raises it where somebody is waiting.
                continue

    def _next_run(self) -> list[FrameKey]:
        """The next piece of one video; empty, and the thread over, when nothing is left."""
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return []
                first = self._wanted[0]
                run = [key for key in self._wanted[:64] if key[:2] == first[:2]]
                del self._wanted[: len(run)]
            if missing := self._source.missing(run):
                return missing
