"""Where the episodes lie: LeRobot v2.1 (a file per episode) and v3.0 (many episodes per file)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from vla_platform.datasets.metadata import (
    Episode,
    Info,
    VideoSpan,
    check_task,
    expand,
    read_json_lines,
)
from vla_platform.datasets.tables import read_table
from vla_platform.errors import DatasetError


@dataclass(frozen=True)
class Layout:
    """Episodes in order of their index, and task texts by task index."""

    episodes: tuple[Episode, ...]
    tasks: Mapping[int, str]


def load_layout(root: Path, info: Info) -> Layout:
    """Read the episode and task lists. Raises `DatasetError`, which names the file (B49, B52)."""
    v21, v30 = root / "meta" / "episodes.jsonl", root / "meta" / "episodes"
    other = v30 if info.version == "v2.1" else v21
    if other.exists():
        raise DatasetError(
            f"{other}: info.json says {info.version}, but this belongs to the other layout",
            path=str(other),
        )
    source = v21 if info.version == "v2.1" else v30
    try:
        layout = _load_v21(root, info) if info.version == "v2.1" else _load_v30(root, info)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{source}: {type(error).__name__}: {error}"
        raise DatasetError(problem, path=str(source)) from error
    _check(layout.episodes, info, source)
    return layout


def _load_v21(root: Path, info: Info) -> Layout:
    tasks_path = root / "meta" / "tasks.jsonl"
    tasks = {
        int(row["task_index"]): check_task(row["task"], tasks_path, task_index=row["task_index"])
        for row in read_json_lines(tasks_path)
    }
    episodes, start = [], 0
    rows = read_json_lines(root / "meta" / "episodes.jsonl")
    for row in sorted(rows, key=lambda row: int(row["episode_index"])):
        index, length = int(row["episode_index"]), int(row["length"])
        fields: dict[str, int | str] = {
            "episode_chunk": index // info.chunks_size,
            "episode_index": index,
        }
        videos = {
            key: VideoSpan(expand(info.video_path or "", root, {**fields, "video_key": key}), 0.0)
            for key in info.video_keys
        }
        episodes.append(
            Episode(
                index=index,
                length=length,
                start=start,
                tasks=tuple(str(task) for task in row["tasks"]),
                data=expand(info.data_path, root, fields),
                videos=MappingProxyType(videos),
            )
        )
        start += length
    return Layout(tuple(episodes), MappingProxyType(tasks))


def _load_v30(root: Path, info: Info) -> Layout:
    folder = root / "meta" / "episodes"
    files = sorted(folder.glob("*/*.parquet"))
    if not files:
        raise DatasetError(f"{folder}: no episode files", path=str(folder))
    columns = [
        "episode_index",
        "tasks",
        "length",
        "dataset_from_index",
        "data/chunk_index",
        "data/file_index",
    ]
    for key in info.video_keys:
        columns += [f"videos/{key}/{name}" for name in ("chunk_index", "file_index")]
        columns.append(f"videos/{key}/from_timestamp")
    rows: list[dict[str, Any]] = []
    for file in files:
        rows += to_rows(read_table(file, columns), file)
    rows.sort(key=lambda row: int(row["episode_index"]))
    episodes = tuple(_v30_episode(root, info, row) for row in rows)
    return Layout(episodes, MappingProxyType(_v30_tasks(root / "meta" / "tasks.parquet")))


def _v30_episode(root: Path, info: Info, row: Mapping[str, Any]) -> Episode:
    videos = {}
    for key in info.video_keys:
        fields: dict[str, int | str] = {
            "video_key": key,
            "chunk_index": int(row[f"videos/{key}/chunk_index"]),
            "file_index": int(row[f"videos/{key}/file_index"]),
        }
        path = expand(info.video_path or "", root, fields)
        videos[key] = VideoSpan(path, float(row[f"videos/{key}/from_timestamp"]))
    data_fields: dict[str, int | str] = {
        "chunk_index": int(row["data/chunk_index"]),
        "file_index": int(row["data/file_index"]),
    }
    return Episode(
        index=int(row["episode_index"]),
        length=int(row["length"]),
        start=int(row["dataset_from_index"]),
        tasks=tuple(str(task) for task in row["tasks"]),
        data=expand(info.data_path, root, data_fields),
        videos=MappingProxyType(videos),
    )


def _v30_tasks(path: Path) -> dict[int, str]:
    # The text is the pandas index of the frame: named `task` or not at all.
    table = read_table(path)
    names = [name for name in ("task", "__index_level_0__") if name in table.column_names]
    if not names or "task_index" not in table.column_names:
        raise DatasetError(f"{path}: no columns task and task_index", path=str(path))
    return {
        int(row["task_index"]): check_task(row[names[0]], path, task_index=row["task_index"])
        for row in to_rows(table, path)
    }


def to_rows(table: pa.Table, path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: text is not valid UTF-8 ({error})", path=str(path)) from error
    return rows


def _check(episodes: Sequence[Episode], info: Info, source: Path) -> None:
    if not episodes:
        raise DatasetError(f"{source}: the dataset has no episodes", path=str(source))
    seen: set[int] = set()
    for episode in episodes:
        if episode.length < 1 or episode.index < 0 or episode.index in seen or episode.start < 0:
            raise DatasetError(
                f"{source}: episode {episode.index} is listed twice or has {episode.length} frames",
                path=str(source),
                episode=episode.index,
            )
        seen.add(episode.index)
    total = sum(episode.length for episode in episodes)
    if len(episodes) != info.num_episodes or total != info.num_frames:
        raise DatasetError(
            f"{source}: {len(episodes)} episodes with {total} frames, but info.json says "
            f"{info.num_episodes} with {info.num_frames}",
            path=str(source),
        )
