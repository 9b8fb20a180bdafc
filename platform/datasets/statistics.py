"""Statistics of one feature, which a policy's normalisation is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DatasetError

Values = npt.NDArray[np.float64]

_ARRAYS = ("min", "max", "mean", "std", "q01", "q99")


@dataclass(frozen=True)
class Statistics:
    """Over the finite rows of some episodes. All arrays are float64 of shape (D,).

    `std` is the population's. Quantiles interpolate linearly. A constant dimension has min == max
    and std == 0; normalisation maps it to 0 and back to the constant.
    """

    min: Values
    max: Values
    mean: Values
    std: Values
    q01: Values
    q99: Values
    count: int  # rows

    @property
    def width(self) -> int:
        return len(self.min)

    @classmethod
    def compute(cls, rows: npt.NDArray[Any], *, key: str) -> Statistics:
        """From rows of shape (T, D); rows that are not finite do not count.

        Raises `DatasetError` where no row is left.
        """
        values = np.asarray(rows, np.float64).reshape(len(rows), -1)
        values = values[np.isfinite(values).all(axis=1)]
        if not len(values):
            raise DatasetError(f"{key} has no finite row to take statistics of", feature=key)
        low, high = values.min(axis=0), values.max(axis=0)
        q01, q99 = np.quantile(values, (0.01, 0.99), axis=0)
        return cls(
            min=low,
            max=high,
            # Rounding must not make a constant dimension look as if it varied.
            mean=np.clip(values.mean(axis=0), low, high),
            std=np.where(low == high, 0.0, values.std(axis=0)),
            q01=q01,
            q99=q99,
            count=len(values),
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, key: str, width: int) -> Statistics:
        """From stored statistics, checked (B45, B46).

        Raises `DatasetError` for a missing or misnamed entry, another width than `width`, numbers
        that are not finite, min above max, a negative std, and a count of 0.
        """
        missing = [name for name in (*_ARRAYS, "count") if name not in raw]
        if missing:
            raise DatasetError(f"statistics of {key}: no {', '.join(missing)}", feature=key)
        try:
            arrays = {name: np.asarray(raw[name], np.float64).reshape(-1) for name in _ARRAYS}
            count = int(np.asarray(raw["count"]).reshape(-1)[0])
        except (TypeError, ValueError, IndexError) as error:
            raise DatasetError(f"statistics of {key}: {error}", feature=key) from error
        for name, array in arrays.items():
            if len(array) != width:
                raise DatasetError(
                    f"statistics of {key}: {name} has {len(array)} values, the data has {width}",
                    feature=key,
                    statistics_width=len(array),
                    data_width=width,
                )
            if not np.isfinite(array).all():
                raise DatasetError(f"statistics of {key}: {name} is not finite", feature=key)
        ordered = (arrays["min"] <= arrays["max"]) & (arrays["q01"] <= arrays["q99"])
        if count < 1 or not ordered.all() or (arrays["std"] < 0).any():
            raise DatasetError(
                f"statistics of {key}: count {count}, or min above max, or a negative std",
                feature=key,
            )
        return cls(**arrays, count=count)

    def to_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return {**arrays, "count": self.count}
