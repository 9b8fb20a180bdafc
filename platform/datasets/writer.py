"""Write LeRobot v3.0: many episodes per file, all or nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vla_platform.datasets.metadata import BOOKKEEPING, Feature
from vla_platform.datasets.video_writer import Codec, VideoWriter
from vla_platform.errors import DatasetError

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CHUNKS_SIZE = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_PICTURES_PER_EPISODE = 16  # that enter the statistics of a camera, every fourth row and column


@dataclass(frozen=True)
class EpisodeData:
    """One recorded episode of T frames."""

    columns: Mapping[str, npt.NDArray[Any]]  # features but cameras. Shape: (T, D)
    images: Mapping[str, npt.NDArray[np.uint8]]  # camera to pictures. Shape: (T, height, width, 3)
    task: str


def write_dataset(
    path: Path,
    episodes: Iterable[EpisodeData],
    *,
    fps: float,
    features: Mapping[str, Feature],
    robot_type: str,
    codec: Codec = "h264",
    data_file_mb: float = DATA_FILE_MB,
    video_file_mb: float = VIDEO_FILE_MB,
) -> None:
    """Write a dataset to the new folder `path`. `features` name all columns and cameras.

    Everything goes into a temporary folder beside it that is renamed at the end: an interrupted
    run leaves no half dataset (PF-45). Equal input gives equal bytes. Raises `DatasetError` where
    `path` exists or an episode does not fit the features.
    """
    if path.exists():
        raise DatasetError(f"{path}: exists already", path=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        recording = _Recording(staging, fps, features, codec, data_file_mb, video_file_mb)
        try:
            for episode in episodes:
                recording.add(episode)
        finally:
            recording.close_files()
        recording.finish(robot_type)
        staging.chmod(0o755)  # mkdtemp's folders are private
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


class _Recording:
    """The files of one dataset while they grow."""

    def __init__(
        self,
        root: Path,
        fps: float,
        features: Mapping[str, Feature],
        codec: Codec,
        data_file_mb: float,
        video_file_mb: float,
    ) -> None:
        self._root = root
        self._fps = fps
        self._codec: Codec = codec
        self._limits_mb = (data_file_mb, video_file_mb)
        self._cameras = [key for key, feature in features.items() if feature.dtype == "video"]
        self._numbers = {key: f for key, f in features.items() if key not in self._cameras}
        unfit = [key for key, f in self._numbers.items() if len(f.shape) != 1 or f.is_image]
        if unfit or set(BOOKKEEPING) & set(features):
            raise DatasetError(f"features {unfit or BOOKKEEPING} cannot be written")
        self._features = features
        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._samples: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in features}
        self._num_frames = 0
        self._data: pq.ParquetWriter | None = None
        self._data_bytes = 0
        self._data_files = 0
        self._videos: dict[str, VideoWriter] = {}
        self._video_files = dict.fromkeys(self._cameras, 0)

    def add(self, episode: EpisodeData) -> None:
        length = self._check(episode)
        index = len(self._rows)
        task = self._tasks.setdefault(episode.task, len(self._tasks))
        row: dict[str, Any] = {
            "episode_index": index,
            "tasks": [episode.task],
            "length": length,
            "dataset_from_index": self._num_frames,
            "dataset_to_index": self._num_frames + length,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        row |= self._add_numbers(episode, length, index, task)
        for camera in self._cameras:
            row |= self._add_pictures(camera, episode.images[camera])
        for key, sample in self._samples_of(episode).items():
            self._samples[key].append(sample)
            row |= {f"stats/{key}/{name}": value for name, value in _statistics(sample).items()}
        self._rows.append(row)
        self._num_frames += length

    def close_files(self) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None
        for writer in self._videos.values():
            writer.close()
        self._videos.clear()

    def finish(self, robot_type: str) -> None:
        if not self._rows:
            raise DatasetError("a dataset needs an episode")
        meta = self._root / "meta"
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(
            pa.Table.from_pylist(self._rows), meta / "episodes" / "chunk-000" / "file-000.parquet"
        )
        _write_tasks(meta / "tasks.parquet", list(self._tasks))
        _write_json(
            meta / "stats.json",
            {key: _statistics(np.concatenate(rows)) for key, rows in self._samples.items()},
        )
        _write_json(meta / "info.json", self._info(robot_type))

    def _check(self, episode: EpisodeData) -> int:
        where = f"episode {len(self._rows)}"
        if set(episode.columns) != set(self._numbers) or set(episode.images) != set(self._cameras):
            raise DatasetError(
                f"{where} has {sorted([*episode.columns, *episode.images])}, "
                f"the dataset has {sorted(self._features)}"
            )
        arrays = {**episode.columns, **episode.images}
        length = len(next(iter(arrays.values())))
        if length < 1 or not episode.task.strip() or "\0" in episode.task:
            raise DatasetError(f"{where} has no frames or no task text")
        for key, array in arrays.items():
            if array.shape != (length, *self._features[key].shape):
                raise DatasetError(
                    f"{where}: {key} has shape {array.shape}, not "
                    f"{(length, *self._features[key].shape)}"
                )
        return length

    def _add_numbers(
        self, episode: EpisodeData, length: int, index: int, task: int
    ) -> dict[str, Any]:
        frames = np.arange(length)
        columns: dict[str, Any] = {}
        for key, feature in self._numbers.items():
            values = np.asarray(episode.columns[key]).astype(feature.dtype, casting="same_kind")
            flat = pa.array(values.reshape(-1))
            width = feature.shape[0]
            columns[key] = flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
        columns["timestamp"] = (frames / self._fps).astype(np.float32)
        columns["frame_index"] = frames
        columns["episode_index"] = np.full(length, index)
        columns["index"] = frames + self._num_frames
        columns["task_index"] = np.full(length, task)
        table = pa.table(columns)
        if self._data is not None and self._data_bytes > self._limits_mb[0] * 2**20:
            self._data.close()
            self._data = None
        if self._data is None:
            path = self._place(DATA_PATH, self._data_files)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = pq.ParquetWriter(path, table.schema)
            self._data_bytes, self._data_files = 0, self._data_files + 1
        self._data.write_table(table)
        self._data_bytes += table.nbytes
        chunk, file = divmod(self._data_files - 1, CHUNKS_SIZE)
        return {"data/chunk_index": chunk, "data/file_index": file}

    def _add_pictures(self, camera: str, pictures: npt.NDArray[np.uint8]) -> dict[str, Any]:
        writer = self._videos.get(camera)
        if writer is not None and writer.size_bytes > self._limits_mb[1] * 2**20:
            writer.close()
            writer = None
        if writer is None:
            height, width, _ = self._features[camera].shape
            writer = VideoWriter(
                self._place(VIDEO_PATH, self._video_files[camera], video_key=camera),
                fps=self._fps,
                height=height,
                width=width,
                codec=self._codec,
            )
            self._videos[camera] = writer
            self._video_files[camera] += 1
        begin = writer.duration_s
        writer.write(pictures)
        chunk, file = divmod(self._video_files[camera] - 1, CHUNKS_SIZE)
        return {
            f"videos/{camera}/chunk_index": chunk,
            f"videos/{camera}/file_index": file,
            f"videos/{camera}/from_timestamp": begin,
            f"videos/{camera}/to_timestamp": writer.duration_s,
        }

    def _place(self, template: str, number: int, **fields: str) -> Path:
        chunk, file = divmod(number, CHUNKS_SIZE)
        return self._root / template.format(chunk_index=chunk, file_index=file, **fields)

    def _samples_of(self, episode: EpisodeData) -> dict[str, npt.NDArray[Any]]:
        samples: dict[str, npt.NDArray[Any]] = {
            key: np.asarray(values, np.float64) for key, values in episode.columns.items()
        }
        for camera, pictures in episode.images.items():
            every = max(1, len(pictures) // _PICTURES_PER_EPISODE)
            samples[camera] = pictures[::every, ::4, ::4]
        return samples

    def _info(self, robot_type: str) -> dict[str, Any]:
        codec_info = {"video.fps": self._fps, "video.codec": self._codec, "has_audio": False}
        features: dict[str, Any] = {}
        for key, feature in self._features.items():
            names = list(feature.names) if feature.names else None
            features[key] = {"dtype": feature.dtype, "shape": list(feature.shape), "names": names}
            if feature.dtype == "video":
                features[key]["names"] = ["height", "width", "channels"]
                features[key]["info"] = codec_info
        for key in BOOKKEEPING:
            dtype = "float32" if key == "timestamp" else "int64"
            features[key] = {"dtype": dtype, "shape": [1], "names": None}
        return {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "total_episodes": len(self._rows),
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNKS_SIZE,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "fps": int(self._fps) if float(self._fps).is_integer() else self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._cameras else None,
            "features": features,
        }


def _statistics(rows: npt.NDArray[Any]) -> dict[str, Any]:
    """Of numbers (T, D), or of pictures (T, height, width, 3) as (3, 1, 1) in [0, 1]."""
    pictures = rows.ndim == 4
    values = rows.reshape(-1, 3) / 255.0 if pictures else np.asarray(rows, np.float64)
    results = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
    }
    quantiles = np.quantile(values, list(_QUANTILES.values()), axis=0)
    results |= dict(zip(_QUANTILES, quantiles, strict=True))
    shape = (3, 1, 1) if pictures else (-1,)
    listed: dict[str, Any] = {
        name: value.reshape(shape).tolist() for name, value in results.items()
    }
    return {**listed, "count": [len(rows)]}


def _write_tasks(path: Path, tasks: list[str]) -> None:
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": tasks})
    # LeRobot reads this file with pandas and expects the text as the frame's index.
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored}
            | {"metadata": None}
            for name, kind, stored in (
                ("task_index", "int64", "int64"),
                ("task", "unicode", "object"),
            )
        ],
    }
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=True) + "\n", encoding="utf-8")
