"""The data of offline RL: recorded episodes become the partitions of training jobs.

Position p of a run is a pure function of seed and p, as a rollout's is: each source gives its share
of an update's episodes, in an order of its own that shows every episode once before any twice.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.control.admission import open_for
from vla_platform.control.services import Services
from vla_platform.datasets import Demonstrations, LeRobotDataset
from vla_platform.datasets.experience import Experience
from vla_platform.datasets.frames import FrameSource
from vla_platform.datasets.sample_order import samples_at
from vla_platform.envs.base import matching_cameras
from vla_platform.envs.seeds import Use, derive_seed
from vla_platform.errors import SpecError
from vla_platform.rl.shares import quotas
from vla_platform.schema import Schema
from vla_platform.specs import OfflineSpec, RLSpec, SourceSpec

Columns = dict[str, npt.NDArray[Any]]
FramesOf = Callable[[LeRobotDataset, int], FrameSource]
"""`frames(dataset, image_size)`: its decoded pictures, which others of this process read, too."""


class OfflineData:
    """The open sources of one run. Owns them."""

    def __init__(self, spec: OfflineSpec, seed: int, sources: Sequence[Experience]) -> None:
        self._seed = seed
        self._sources = tuple(sources)
        self._quotas = quotas([one.share for one in spec.sources], spec.episodes_per_update)

    @property
    def num_decisions(self) -> int:
        return sum(one.num_decisions(ep) for one in self._sources for ep in one.episodes)

    @property
    def num_skipped(self) -> int:
        """Episodes that were left out."""
        return sum(len(one.skipped) for one in self._sources)

    def chosen(self, position: int) -> list[list[int]]:
        """The episodes of a position, by source."""
        return [
            [
                one.episodes[at]
                for at in samples_at(
                    seed=derive_seed(Use.TRAINING, self._seed, number),
                    num_samples=len(one.episodes),
                    start=position * quota,
                    count=quota,
                )
            ]
            for number, (one, quota) in enumerate(zip(self._sources, self._quotas, strict=True))
        ]

    def batch(self, position: int) -> tuple[dict[str, int | float | str], Columns]:
        """What the ledger is told of a position's job, and its rows."""
        parts: list[Columns] = []
        won: list[bool] = []
        for one, episodes in zip(self._sources, self.chosen(position), strict=True):
            parts.append(one.columns(episodes, first=len(won)))
            won += [one.outcome(episode).success for episode in episodes]
        columns = joined(parts)
        told: dict[str, int | float | str] = {
            "sample_count": int(columns["is_transition"].sum()),
            "success_rate": float(np.mean(won)),
            "episodes": "[]",
        }
        return told, columns

    def close(self) -> None:
        for one in self._sources:
            one.close()


def joined(parts: Sequence[Columns]) -> Columns:
    """The rows of all parts, one after the other; texts are padded to the longest."""
    length = max(part["prompt"].shape[1] for part in parts)
    first, columns = 0, []
    for part in parts:
        prompt = part["prompt"]
        padded = np.pad(prompt, ((0, 0), (0, length - prompt.shape[1])))
        next_row = np.where(part["next_row"] < 0, -1, part["next_row"] + first)
        columns.append({**part, "prompt": padded, "next_row": next_row})
        first += len(next_row)
    return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}


def open_offline(
    services: Services, tenant: str, spec: RLSpec, schema: Schema, frames_of: FramesOf | None = None
) -> tuple[OfflineData, str]:
    """The data of a run, and a digest of all of them.

    Raises `DatasetError`, `DataError`, and `SpecError` where a dataset does not fit the policy.
    """
    assert spec.data is not None
    digests, sources = [], []
    stride = spec.data.stride or schema.chunk
    with contextlib.ExitStack() as opened:
        for number, source in enumerate(spec.data.sources):
            dataset = open_for(services, tenant, source.dataset)
            digests.append(dataset.digest)
            frames = frames_of(dataset, schema.image_size) if frames_of is not None else None
            one = _experience(dataset, source, number, schema, stride=stride, frames=frames)
            opened.callback(one.close)
            sources.append(one)
        found = OfflineData(spec.data, spec.seed, sources)
        opened.pop_all()
    return found, hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _experience(
    dataset: LeRobotDataset,
    source: SourceSpec,
    number: int,
    schema: Schema,
    *,
    stride: int,
    frames: FrameSource | None,
) -> Experience:
    asked = source.dataset
    state_key = asked.state if schema.state_dim else None
    for name, key, width in (
        ("state", state_key, schema.state_dim),
        ("action", asked.action, schema.action_dim),
    ):
        found = prod(dataset.feature(key).shape) if key else 0
        if found != width:
            raise SpecError(
                f"data.sources.{number}: {name} has {found} numbers, the policy's has {width}",
                problems=[{"field": f"data.sources.{number}.dataset.{name}",
                           "problem": f"{width} numbers are needed"}],
            )  # fmt: skip
    heldout = set(asked.heldout_episodes)
    every = [one.index for one in dataset.episodes if one.index not in heldout]
    demonstrations = Demonstrations(
        dataset,
        cameras=asked.cameras or matching_cameras(schema.cameras, dataset.cameras),
        state_key=state_key,
        action_key=asked.action,
        chunk=schema.chunk,
        image_size=schema.image_size,
        episodes=asked.episodes or every,
        seed=0,
        on_bad_row=asked.on_bad_row,
        frames=frames,
    )
    try:
        return Experience(
            dataset,
            demonstrations,
            reward_key=source.reward,
            success_key=source.success,
            stride=stride,
            on_bad_row=asked.on_bad_row,
        )
    except BaseException:
        demonstrations.close()
        raise
