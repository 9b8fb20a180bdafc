"""Demonstrations as training rows: what a supervised producer samples from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vla_platform.datasets.frames import FrameKey, FrameSource, ReadAhead
from vla_platform.datasets.lerobot import LeRobotDataset
from vla_platform.datasets.prompts import encode_prompts
from vla_platform.datasets.sample_order import samples_at
from vla_platform.datasets.statistics import Statistics
from vla_platform.errors import DataError, DatasetError
from vla_storage.closing import Closing

DEFAULT_CACHE_BYTES = 512 << 20

_MAX_WINDOW = 8192
"""Samples read ahead at most: enough that most of them neighbour another in their video."""


@dataclass(frozen=True)
class Batch:
    """Rows of one training job, one array a column, all with leading B.

    With C cameras, P = image size, S, A = state and action dimension, H = chunk:
    images (B, C, P, P, 3) uint8; state (B, S) float32, absent without a state key; actions
    (B, H, A) float32, raw; actions_is_pad (B, H) bool, true past the episode's end, where the last
    action is repeated; frame_digest (B, C, 16) uint8, BLAKE2b of the resized pixels; episode and
    frame (B,) int64; prompt (B, Lmax) uint8, UTF-8, zero-padded (`decode_prompts`).
    """

    columns: dict[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["episode"])


@dataclass(frozen=True)
class Skipped:
    """What `on_bad_row="skip"` left out."""

    num_rows: int = 0  # frames whose own numbers are not finite
    num_samples: int = 0  # samples left out, also those whose chunk touches such a frame
    episodes: dict[int, str] = field(default_factory=dict)  # whole episodes, with the reason


@dataclass(frozen=True)
class _EpisodeRows:
    """The numbers of one episode."""

    state: npt.NDArray[np.float32]  # Shape: (T, S)
    action: npt.NDArray[np.float32]  # Shape: (T, A)
    prompts: tuple[str, ...]  # one per frame


class Demonstrations(Closing):
    """Samples of some episodes of a dataset: one per frame, its action chunk beginning there.

    `order` and `batch` depend on the arguments and the counter alone, so a resumed run continues
    exactly. Numbers are read, and videos checked for a picture at every frame's time, at
    construction; pictures are decoded when needed and read ahead by a thread.

    `on_bad_row`: `fail` raises `DataError` for numbers that are not finite (`episode`, `frame`,
    `column`) and `DatasetError` for an unreadable episode; `skip` leaves them out and counts them
    in `skipped`. A picture that turns out not to decode later raises `DatasetError` either way,
    because leaving it out then would change the order of samples.

    `frames`, of a dataset with the same digest and for the same image size, is shared with other
    readers, so that each frame is decoded once for all of them.
    """

    def __init__(
        self,
        dataset: LeRobotDataset,
        *,
        cameras: Sequence[str],
        state_key: str | None,
        action_key: str,
        chunk: int,
        image_size: int,
        episodes: Sequence[int],
        seed: int,
        on_bad_row: Literal["fail", "skip"] = "fail",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        frames: FrameSource | None = None,
    ) -> None:
        self.dataset = dataset
        self.cameras = tuple(cameras)
        self.episodes = tuple(episodes)
        self.chunk = chunk
        self._state_key = state_key
        self._action_key = action_key
        self._seed = seed
        self._image_size = image_size
        self._check_features()
        self._rows: dict[int, _EpisodeRows] = {}
        self._samples: list[tuple[int, int]] = []  # (episode, frame)
        self._num_samples_of: Counter[int] = Counter()
        self.skipped = Skipped()
        for episode in self.episodes:
            self._add(episode, skip=on_bad_row == "skip")
        if not self._samples:
            raise DatasetError(
                f"{dataset.path}: no usable sample in episodes {list(self.episodes)}",
                path=str(dataset.path),
                skipped=self.skipped.episodes,
            )
        self.frames = frames or FrameSource(dataset, image_size=image_size, cache_bytes=cache_bytes)
        self._read_ahead = ReadAhead(self.frames)
        per_sample = max(1, len(self.cameras))
        # Less than the cache holds, so that reading ahead never drops what is still to come.
        fitting = self.frames.capacity * 3 // 4 // per_sample
        self._window = min(self.num_samples, fitting, _MAX_WINDOW)
        self._ahead = (0, 0)  # counters from and up to which reading ahead was requested

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def order(self, start: int, count: int) -> list[int]:
        """Sample numbers for the counters start .. start + count; a fresh permutation per epoch."""
        return samples_at(seed=self._seed, num_samples=self.num_samples, start=start, count=count)

    def batch(self, start: int, count: int) -> Batch:
        """The rows for the counters start .. start + count; also begins to read ahead."""
        if count < 1:
            raise ValueError(f"count {count} is below 1")
        self._look_ahead(start, count)
        return self._rows_at(self._places(self.order(start, count)))

    def evenly_spaced(self, count: int) -> Batch:
        """At most `count` distinct rows spread evenly over all samples, the same every time."""
        if count < 1:
            raise ValueError(f"count {count} is below 1")
        count = min(count, self.num_samples)
        spaced = [(2 * i + 1) * self.num_samples // (2 * count) for i in range(count)]
        return self._rows_at(self._places(spaced))

    def at(self, places: Sequence[tuple[int, int]]) -> Batch:
        """The rows of these (episode, frame), in order."""
        return self._rows_at(list(places))

    def num_samples_of(self, episode: int) -> int:
        """Frames of an episode that are samples: all of them, unless some were left out."""
        return self._num_samples_of[episode]

    def statistics(self) -> dict[str, Statistics]:
        """Statistics of `action` and, where there is one, `state` over the episodes in use."""
        rows = self._rows.values()
        found = {
            "action": Statistics.compute(
                np.concatenate([row.action for row in rows]), key=self._action_key
            )
        }
        if self._state_key is not None:
            state = np.concatenate([row.state for row in rows])
            found["state"] = Statistics.compute(state, key=self._state_key)
        return found

    def close(self) -> None:
        """End the reading thread. The dataset stays open."""
        self._read_ahead.close()

    def _look_ahead(self, start: int, count: int) -> None:
        # Asking again only when half is used keeps the cost per batch independent of the window.
        begin, end = self._ahead
        if begin <= start and start + count + self._window // 2 <= end:
            return
        self._ahead = (start, start + count + self._window)
        self._read_ahead.request(self._keys(self._places(self.order(start, count + self._window))))

    def _check_features(self) -> None:
        if not self.cameras or self.chunk < 1 or self._image_size < 1:
            raise ValueError("cameras, chunk and image_size must not be empty or below 1")
        if len(set(self.episodes)) != len(self.episodes):
            raise DatasetError(f"episodes {list(self.episodes)} name one twice")
        for episode in self.episodes:
            self.dataset.episode(episode)
        for camera in self.cameras:
            if not self.dataset.feature(camera).is_image:
                raise DatasetError(f"{camera} is no camera", feature=camera)
        for key in filter(None, (self._state_key, self._action_key)):
            feature = self.dataset.feature(key)
            if feature.is_image or len(feature.shape) != 1:
                raise DatasetError(
                    f"{key} has shape {feature.shape}; one row of numbers is needed", feature=key
                )

    def _add(self, episode: int, *, skip: bool) -> None:
        try:
            rows = self._load(episode)
        except DatasetError as error:
            if not skip:
                raise
            reasons = {**self.skipped.episodes, episode: error.message}
            self.skipped = replace(self.skipped, episodes=reasons)
            return
        bad_state = self._bad_rows(episode, self._state_key, rows.state, skip=skip)
        bad_action = self._bad_rows(episode, self._action_key, rows.action, skip=skip)
        self._rows[episode] = rows
        kept = [
            (episode, frame)
            for frame in range(len(bad_action))
            if not bad_state[frame] and not bad_action[frame : frame + self.chunk].any()
        ]
        self._samples += kept
        self._num_samples_of[episode] = len(kept)
        self.skipped = replace(
            self.skipped,
            num_rows=self.skipped.num_rows + int((bad_state | bad_action).sum()),
            num_samples=self.skipped.num_samples + len(bad_action) - len(kept),
        )

    def _load(self, episode: int) -> _EpisodeRows:
        table = self.dataset.frame_table(episode)
        for camera in self.cameras:
            if self.dataset.features[camera].dtype == "video":
                self.dataset.locate(episode, camera)
        length = len(table["index"])
        state = table[self._state_key] if self._state_key else np.zeros((length, 0))
        action = table[self._action_key]
        with np.errstate(over="ignore"):  # beyond float32 becomes infinite, which is a bad row
            singles = [values.astype(np.float32).reshape(length, -1) for values in (state, action)]
        return _EpisodeRows(
            state=singles[0],
            action=singles[1],
            prompts=tuple(self.dataset.task(episode, int(index)) for index in table["task_index"]),
        )

    @staticmethod
    def _bad_rows(
        episode: int, key: str | None, values: npt.NDArray[np.float32], *, skip: bool
    ) -> npt.NDArray[np.bool_]:
        """Which rows are not finite. Shapes: (T, D) to (T,). Raises `DataError` unless `skip`."""
        bad = np.logical_not(np.isfinite(values).all(axis=1))
        if bad.any() and not skip:
            frame = int(np.argmax(bad))
            raise DataError(
                f"{key} of episode {episode}, frame {frame} is not finite",
                episode=episode,
                frame=frame,
                column=key,
            )
        return bad

    def _keys(self, places: Sequence[tuple[int, int]]) -> list[FrameKey]:
        return [
            FrameKey(episode, camera, frame) for episode, frame in places for camera in self.cameras
        ]

    def _places(self, samples: Sequence[int]) -> list[tuple[int, int]]:
        return [self._samples[sample] for sample in samples]

    def _rows_at(self, places: list[tuple[int, int]]) -> Batch:
        keys = self._keys(places)
        frames = self.frames.get(keys)
        shape = (len(places), len(self.cameras))
        pixels = np.stack([frames[key].pixels for key in keys])
        digests = np.stack([frames[key].digest for key in keys])
        actions, is_pad = zip(*self._chunks(places), strict=True)
        columns: dict[str, npt.NDArray[Any]] = {
            "images": pixels.reshape(*shape, *pixels.shape[1:]),
            "actions": np.stack(actions),
            "actions_is_pad": np.stack(is_pad),
            "frame_digest": digests.reshape(*shape, -1),
            "episode": np.array([episode for episode, _ in places], np.int64),
            "frame": np.array([frame for _, frame in places], np.int64),
            "prompt": encode_prompts(
                [self._rows[episode].prompts[frame] for episode, frame in places]
            ),
        }
        if self._state_key is not None:
            columns["state"] = np.stack(
                [self._rows[episode].state[frame] for episode, frame in places]
            )
        return Batch(columns)

    def _chunks(
        self, places: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]]:
        """Actions (H, A) and padding (H,) of each place; rows past the end repeat the last one."""
        for episode, frame in places:
            action = self._rows[episode].action
            wanted = np.arange(frame, frame + self.chunk)
            yield action[np.minimum(wanted, len(action) - 1)], wanted >= len(action)
