"""Read-only LeRobot datasets, v2.1 and v3.0."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from vla_platform.datasets.digest import Pin, pin_files
from vla_platform.datasets.layouts import load_layout
from vla_platform.datasets.metadata import BOOKKEEPING, Episode, Feature, Info, load_info
from vla_platform.datasets.statistics import Statistics
from vla_platform.datasets.tables import column_array, read_table
from vla_platform.datasets.timestamps import offsets_beyond
from vla_platform.datasets.video import Pixels, VideoPool
from vla_platform.errors import DatasetError

Columns = dict[str, npt.NDArray[Any]]

_TABLES_KEPT = 4
"""Data files whose numbers stay in memory: consecutive episodes share a file in v3.0."""


def open_dataset(path: Path) -> LeRobotDataset:
    """Open a dataset folder. Raises `DatasetError`, which names the file, for broken metadata."""
    root = Path(path)
    info = load_info(root)
    return LeRobotDataset(root, info)


class LeRobotDataset:
    """Episodes, numbers, pictures and statistics of one dataset folder. Thread-safe.

    Metadata is checked when opened; rows and videos of an episode when first read. `verify` tells
    whether the files are still those that were opened.
    """

    def __init__(self, path: Path, info: Info) -> None:
        self.path = path
        self.version = info.version
        self.fps = info.fps
        self.features: Mapping[str, Feature] = info.features
        self.cameras = info.cameras
        self.robot_type = info.robot_type
        layout = load_layout(path, info)
        self.episodes: tuple[Episode, ...] = layout.episodes
        self.tasks: Mapping[int, str] = layout.tasks
        self._by_index = {episode.index: episode for episode in layout.episodes}
        timestamp = info.features.get("timestamp")
        self._single_times = timestamp is None or timestamp.dtype != "float64"
        self._videos = VideoPool()
        self._tables: OrderedDict[Path, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def pin(self) -> Pin:
        """The files as first hashed; read in full once, when first asked for."""
        return pin_files(self.path)

    @property
    def digest(self) -> str:
        return self.pin.digest

    def verify(self) -> None:
        """Raise `DatasetError` where the files changed since `digest` was first read (B56)."""
        self.pin.verify()

    def episode(self, index: int) -> Episode:
        """The episode of that index. Raises `DatasetError` where there is none."""
        try:
            return self._by_index[index]
        except KeyError:
            raise DatasetError(
                f"{self.path}: no episode {index}; it has {len(self.episodes)}",
                path=str(self.path),
                episode=index,
            ) from None

    def feature(self, key: str) -> Feature:
        """The feature of that name. Raises `DatasetError` where there is none."""
        try:
            return self.features[key]
        except KeyError:
            raise DatasetError(
                f"{self.path}: no feature {key}; it has {', '.join(sorted(self.features))}",
                path=str(self.path),
                feature=key,
            ) from None

    def frame_table(self, episode: int) -> Columns:
        """All columns of an episode but its pictures. Shapes: (T, ...), scalars (T,).

        Raises `DatasetError` for rows that are missing, foreign or mistimed, naming file, episode
        and, where known, frame.
        """
        found = self.episode(episode)
        rows = self._rows(found)
        columns: Columns = {}
        for key in rows.column_names:
            feature = self.features.get(key)
            if feature is not None and not feature.is_image and feature.dtype != "string":
                columns[key] = column_array(rows, key, feature.shape, feature.dtype, found.data)
        for key in BOOKKEEPING:
            dtype = "float64" if key == "timestamp" else "int64"
            columns[key] = column_array(rows, key, (1,), dtype, found.data).reshape(-1)
        self._check_rows(found, columns)
        return columns

    def task(self, episode: int, task_index: int) -> str:
        """The text of a task. Raises `DatasetError` for an index that has none (B55)."""
        try:
            return self.tasks[task_index]
        except KeyError:
            path = self.episode(episode).data
            raise DatasetError(
                f"{path}: episode {episode} names task {task_index}, which has no text",
                path=str(path),
                episode=episode,
            ) from None

    def image(self, episode: int, frame: int, camera: str) -> Pixels:
        """The picture at a frame's own time. Shape: (height, width, 3), RGB."""
        return next(self.images(episode, [frame], camera))

    def images(self, episode: int, frames: Sequence[int], camera: str) -> Iterator[Pixels]:
        """Pictures of rising `frames` of one episode; neighbours share decoding work.

        Raises `DatasetError` where the video is missing, short, off in time or does not decode,
        naming file, episode and frame (B53, B54).
        """
        found = self.episode(episode)
        outside = [frame for frame in frames if not 0 <= frame < found.length]
        if outside:
            raise DatasetError(
                f"{self.path}: episode {episode} has {found.length} frames, no {outside[0]}",
                path=str(self.path),
                episode=episode,
                frame=outside[0],
            )
        if self.feature(camera).dtype == "image":
            yield from self._stored_images(found, frames, camera)
            return
        if camera not in found.videos:
            raise DatasetError(f"{self.path}: {camera} is no camera", path=str(self.path))
        numbers = self.locate(episode, camera)[np.asarray(frames, np.int64)]
        with self._videos.borrow(found.videos[camera].path) as decoder:
            pictures = decoder.read([int(number) for number in numbers])
            for frame in frames:
                try:
                    picture = next(pictures)
                except DatasetError as error:
                    raise DatasetError(
                        f"{error.message} (episode {episode}, frame {frame})",
                        **{**error.details, "episode": episode, "frame": frame},
                    ) from error
                yield self._checked(picture, found, frame, camera)

    def locate(self, episode: int, camera: str) -> npt.NDArray[np.int64]:
        """Number in the video file of every frame of an episode. Shape: (T,).

        Reads timestamps only, so it is the cheap check of a whole episode's video.
        """
        found = self.episode(episode)
        span = found.videos[camera]
        timestamps = self.frame_table(episode)["timestamp"]
        return self._videos.index(span.path).find(
            span.from_s + timestamps,
            single=self._single_times,
            episode=episode,
            frames=np.arange(found.length),
        )

    def statistics(self, key: str, episodes: Sequence[int]) -> Statistics:
        """Statistics of a numeric feature over the finite rows of `episodes`."""
        feature = self.feature(key)
        if feature.is_image:
            raise DatasetError(f"{key} holds pictures, not numbers", feature=key)
        rows = [self.frame_table(episode)[key] for episode in episodes]
        return Statistics.compute(np.concatenate(rows), key=key)

    def close(self) -> None:
        self._videos.close()

    def _rows(self, episode: Episode) -> pa.Table:
        """The rows of one episode, by its place in the file that holds it (B51, PF-42)."""
        table = self._table(episode.data)
        indexes = column_array(table, "episode_index", (1,), "int64", episode.data).reshape(-1)
        places = np.flatnonzero(indexes == episode.index)
        if len(places) != episode.length or (np.diff(places) != 1).any():
            raise DatasetError(
                f"{episode.data}: {len(places)} rows of episode {episode.index} where the "
                f"metadata says {episode.length} in a row",
                path=str(episode.data),
                episode=episode.index,
            )
        return table.slice(int(places[0]), episode.length)

    def _table(self, path: Path) -> pa.Table:
        with self._lock:
            if path in self._tables:
                self._tables.move_to_end(path)
                return self._tables[path]
        wanted = [key for key, feature in self.features.items() if not feature.is_image]
        table = read_table(path, sorted({*wanted, *BOOKKEEPING}))
        with self._lock:
            self._tables[path] = table
            while len(self._tables) > _TABLES_KEPT:
                self._tables.popitem(last=False)
        return table

    def _check_rows(self, episode: Episode, columns: Columns) -> None:
        times = columns["timestamp"]
        expected = np.arange(episode.length)
        wrong = columns["frame_index"] != expected
        wrong |= columns["index"] != episode.start + expected
        if wrong.any():
            frame = int(np.argmax(wrong))
            raise DatasetError(
                f"{episode.data}: row {frame} of episode {episode.index} is numbered "
                f"{int(columns['frame_index'][frame])}, {int(columns['index'][frame])} overall",
                path=str(episode.data),
                episode=episode.index,
                frame=frame,
            )
        offsets = times - expected / self.fps
        beyond = offsets_beyond(offsets, times, single=self._single_times)
        if beyond.any():
            worst = int(
                np.argmax(np.where(beyond, np.nan_to_num(np.abs(offsets), nan=np.inf), -1.0))
            )
            raise DatasetError(
                f"{episode.data}: {int(beyond.sum())} timestamps of episode {episode.index} are "
                f"not at {self.fps:g} frames a second; the worst, frame {worst}, is "
                f"{offsets[worst]:+.6f} s off",
                path=str(episode.data),
                episode=episode.index,
                frame=worst,
                worst_offset_s=float(offsets[worst]),
            )
        for index in np.unique(columns["task_index"]):
            self.task(episode.index, int(index))

    def _stored_images(
        self, episode: Episode, frames: Sequence[int], camera: str
    ) -> Iterator[Pixels]:
        table = read_table(episode.data, ["episode_index", camera])
        indexes = column_array(table, "episode_index", (1,), "int64", episode.data).reshape(-1)
        first = int(np.argmax(indexes == episode.index))
        for frame in frames:
            cell = table.column(camera)[first + frame].as_py()
            try:
                with Image.open(io.BytesIO(cell["bytes"])) as picture:
                    pixels = np.asarray(picture.convert("RGB"))
            except (OSError, TypeError, KeyError, ValueError) as error:
                raise DatasetError(
                    f"{episode.data}: {camera} of episode {episode.index}, frame {frame} is no "
                    f"readable picture",
                    path=str(episode.data),
                    episode=episode.index,
                    frame=frame,
                ) from error
            yield self._checked(pixels, episode, frame, camera)

    def _checked(self, pixels: Pixels, episode: Episode, frame: int, camera: str) -> Pixels:
        expected = self.features[camera].shape[:2]
        if pixels.shape[:2] != expected:
            raise DatasetError(
                f"{camera} of episode {episode.index}, frame {frame} is {pixels.shape[:2]}, "
                f"info.json says {expected}",
                path=str(self.path),
                episode=episode.index,
                frame=frame,
            )
        return pixels
