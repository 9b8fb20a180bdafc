"""Which sample comes when: a pure function of the seed and a counter, so that resume is exact."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def samples_at(*, seed: int, num_samples: int, start: int, count: int) -> list[int]:
    """Sample numbers for the counters start .. start + count.

    Counter c belongs to epoch c // num_samples. Every epoch is a permutation of its own, and a
    batch may cross from one epoch into the next (PF-22).
    """
    if num_samples < 1 or start < 0 or count < 0:
        raise ValueError(f"num_samples {num_samples}, start {start}, count {count}")
    samples: list[int] = []
    position = start
    while len(samples) < count:
        epoch, offset = divmod(position, num_samples)
        take = min(count - len(samples), num_samples - offset)
        samples += epoch_permutation(seed, epoch, num_samples)[offset : offset + take].tolist()
        position += take
    return samples


@lru_cache(maxsize=8)
def epoch_permutation(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Shape: (num_samples,).

    Sorts raw generator words: numpy promises their stream for all versions, which it does not for
    `Generator.permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_samples)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
