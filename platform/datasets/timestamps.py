"""The one place that compares times, so that a tolerance is inclusive everywhere (PF-44)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TOLERANCE_S = 1e-4

Times = npt.NDArray[np.float64]


def offsets_beyond(offsets_s: Times, times_s: Times, *, single: bool) -> npt.NDArray[np.bool_]:
    """Which offsets exceed the tolerance. All arrays have shape (T,).

    An offset of exactly `TOLERANCE_S` is accepted, which takes some slack for rounding: that of
    float64 arithmetic, and where the times were stored in single precision (`single`) half a
    float32 step at their size.
    """
    slack = 1e-9 + 4 * np.spacing(np.abs(times_s))
    if single:
        slack = slack + 0.5 * np.spacing(np.abs(times_s).astype(np.float32)).astype(np.float64)
    beyond: npt.NDArray[np.bool_] = ~(np.abs(offsets_s) <= TOLERANCE_S + slack)
    return beyond


def nearest(sorted_times_s: Times, wanted_s: Times) -> npt.NDArray[np.int64]:
    """Index of the nearest entry of `sorted_times_s` (N,) for each of `wanted_s` (T,). N >= 1."""
    right = np.clip(np.searchsorted(sorted_times_s, wanted_s), 0, len(sorted_times_s) - 1)
    left = np.maximum(right - 1, 0)
    closer_left = np.abs(sorted_times_s[left] - wanted_s) <= np.abs(
        sorted_times_s[right] - wanted_s
    )
    return np.where(closer_left, left, right).astype(np.int64)
