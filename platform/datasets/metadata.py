"""What both LeRobot layouts have in common: `meta/info.json` and the frozen values made of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from vla_platform.errors import DatasetError

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns that every data file has beside its features."""

_FIELD = re.compile(r"\{([a-z_]+)(?::0?([1-9]))?d?\}")
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class Feature:
    """One column or camera: `shape` is that of one frame, images as (height, width, 3)."""

    dtype: str  # a numpy name, or `video` or `image`
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None

    @property
    def is_image(self) -> bool:
        return self.dtype in ("video", "image")


@dataclass(frozen=True)
class VideoSpan:
    """Where one episode lies in a video file."""

    path: Path
    from_s: float  # file time of the episode's time 0


@dataclass(frozen=True)
class Episode:
    index: int
    length: int  # frames
    start: int  # global index of the first frame, over all episodes of the dataset
    tasks: tuple[str, ...]
    data: Path  # the parquet file that holds its rows
    videos: Mapping[str, VideoSpan]  # by camera; none for images inside the parquet file


@dataclass(frozen=True)
class Info:
    """`meta/info.json`, checked."""

    version: str
    fps: float
    features: Mapping[str, Feature]
    chunks_size: int
    data_path: str
    video_path: str | None
    num_episodes: int
    num_frames: int
    robot_type: str | None

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(sorted(key for key, feature in self.features.items() if feature.is_image))

    @property
    def video_keys(self) -> tuple[str, ...]:
        return tuple(key for key in self.cameras if self.features[key].dtype == "video")


def load_info(root: Path) -> Info:
    """Read and check `meta/info.json`. Raises `DatasetError`, which names the file."""
    path = root / "meta" / "info.json"
    raw = read_json(path)
    try:
        version = raw["codebase_version"]
        if version not in ("v2.1", "v3.0"):
            raise DatasetError(
                f"{path}: LeRobot {version!r} is not read here; convert it to v2.1 or v3.0",
                path=str(path),
            )
        info = Info(
            version=version,
            fps=float(raw["fps"]),
            features=MappingProxyType({key: _feature(f) for key, f in raw["features"].items()}),
            chunks_size=int(raw.get("chunks_size", 1000)),
            data_path=str(raw["data_path"]),
            video_path=raw.get("video_path"),
            num_episodes=int(raw["total_episodes"]),
            num_frames=int(raw["total_frames"]),
            robot_type=raw.get("robot_type"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{path}: {type(error).__name__}: {error}", path=str(path)) from error
    if not (math.isfinite(info.fps) and 0 < info.fps <= 10_000) or info.chunks_size < 1:
        raise DatasetError(
            f"{path}: fps {info.fps} or chunks_size {info.chunks_size} is out of range",
            path=str(path),
        )
    if info.video_keys and info.video_path is None:
        raise DatasetError(f"{path}: video features, but no video_path", path=str(path))
    return info


def _feature(raw: Mapping[str, Any]) -> Feature:
    shape = tuple(int(size) for size in raw["shape"])
    if not shape or any(size < 1 or size > 1 << 20 for size in shape):
        raise ValueError(f"shape {shape} is out of range")
    dtype = str(raw["dtype"])
    if dtype in ("video", "image") and len(shape) == 3 and shape[2] not in (1, 3):
        shape = (shape[1], shape[2], shape[0])  # some recorders write (channels, height, width)
    names = raw.get("names")
    if isinstance(names, Mapping):
        names = next(iter(names.values()), None)
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], list):
        names = names[0]
    return Feature(
        dtype=dtype,
        shape=shape,
        names=tuple(str(name) for name in names) if isinstance(names, list) else None,
    )


def expand(template: str, root: Path, fields: Mapping[str, int | str]) -> Path:
    """Fill a path template such as `data/chunk-{episode_chunk:03d}/...`.

    Plain `{name}` and `{name:03d}` only: a dataset's text never reaches `str.format`. Raises
    `DatasetError` for unknown fields and for a path outside the dataset.
    """

    def fill(match: re.Match[str]) -> str:
        value = fields.get(match[1])
        if value is None:
            raise DatasetError(f"{root}: unknown field {match[0]} in {template!r}", path=str(root))
        return str(value).zfill(int(match[2] or 0))

    text = _FIELD.sub(fill, template)
    parts = PurePosixPath(text).parts
    if "{" in text or not parts or text.startswith("/") or ".." in parts or "\\" in text:
        raise DatasetError(f"{root}: {template!r} leads out of the dataset", path=str(root))
    return root.joinpath(*parts)


def read_json(path: Path) -> dict[str, Any]:
    value = parse_json(read_text(path), path)
    if not isinstance(value, dict):
        raise DatasetError(f"{path}: expected a JSON object", path=str(path))
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    rows = [parse_json(line, path) for line in read_text(path).splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{path}: expected one JSON object a line", path=str(path))
    return rows


def read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise DatasetError(f"{path}: more than {_MAX_JSON_BYTES} bytes", path=str(path))
        return path.read_text(encoding="utf-8", errors="strict")
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not valid UTF-8 ({error})", path=str(path)) from error


def parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(f"{path}: not valid JSON ({error})", path=str(path)) from error


def check_task(text: object, path: Path, *, task_index: int) -> str:
    """A task's text: not empty, and free of NUL, which pads prompts in a batch."""
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise DatasetError(f"{path}: task {task_index} has no usable text", path=str(path))
    return text
