"""One normaliser for training and inference, kept in the module's payload as buffers.

`min_max`: 2 (x - min) / (max - min) - 1; `q99`: the same with the 1 % and 99 % quantiles, then
limited to +-2.2; `mean_std`: (x - mean) / std (StarVLA's state_action transform). A dimension that
is constant in the data becomes 0, and is given back as its constant whatever the module says.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vla_platform.errors import DataError

Normalization = Literal["min_max", "mean_std", "q99"]
Q99_LIMIT = 2.2
CONSTANT = 1e-6
"""A spread below this, relative to the value (or to 1), is float32 rounding and not data."""


class Statistics(Protocol):
    """What a dataset says about one column: arrays of shape (dimensions,)."""

    @property
    def min(self) -> npt.NDArray[np.float64]: ...
    @property
    def max(self) -> npt.NDArray[np.float64]: ...
    @property
    def mean(self) -> npt.NDArray[np.float64]: ...
    @property
    def std(self) -> npt.NDArray[np.float64]: ...
    @property
    def q01(self) -> npt.NDArray[np.float64]: ...
    @property
    def q99(self) -> npt.NDArray[np.float64]: ...


class Normalizer(nn.Module):
    """Maps raw units to about [-1, 1] and back. Buffers `centre`, `scale`, `varies`: (dim,)."""

    centre: Tensor
    scale: Tensor
    varies: Tensor

    def __init__(self, kind: Normalization, statistics: Statistics | None, *, dim: int) -> None:
        """`statistics=None` leaves buffers to be filled by `load_state_dict`."""
        super().__init__()
        self.kind = kind
        self.dim = dim
        centre, scale = np.zeros(dim), np.ones(dim)
        if statistics is not None:
            centre, scale = _centre_and_scale(kind, statistics, dim)
        varies = scale > CONSTANT * np.maximum(1.0, np.abs(centre))
        self.register_buffer("centre", torch.tensor(centre, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32).clamp(min=1e-12))
        self.register_buffer("varies", torch.tensor(varies))

    def normalize(self, values: Tensor) -> Tensor:
        """Raw to normalised. Shape: (..., dim)."""
        scaled = (values - self.centre) / self.scale
        if self.kind == "q99":
            scaled = scaled.clamp(-Q99_LIMIT, Q99_LIMIT)
        return torch.where(self.varies, scaled, torch.zeros_like(scaled))

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalised to raw. Shape: (..., dim)."""
        return torch.where(self.varies, values * self.scale + self.centre, self.centre)


def _centre_and_scale(
    kind: Normalization, statistics: Statistics, dim: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    if kind == "mean_std":
        centre, scale = _column(statistics, "mean", dim), _column(statistics, "std", dim)
        if (scale < 0).any():
            raise DataError("a standard deviation is negative", column="std")
        return centre, scale
    names = ("min", "max") if kind == "min_max" else ("q01", "q99")
    low, high = (_column(statistics, name, dim) for name in names)
    if (low > high).any():
        dimension = int(np.argmax(low > high))
        raise DataError(
            f"statistics have {names[0]} above {names[1]} in dimension {dimension}",
            column=names[0],
            dimension=dimension,
        )
    return (low + high) / 2, (high - low) / 2


def _column(statistics: Any, name: str, dim: int) -> npt.NDArray[np.float64]:
    given = getattr(statistics, name, None)
    if given is None:
        raise DataError(f"statistics lack {name!r}", column=name)
    values = np.asarray(given, np.float64)
    if values.shape != (dim,):
        raise DataError(
            f"statistics have {name!r} of shape {values.shape}, the schema wants ({dim},)",
            column=name,
        )
    if not np.isfinite(values).all():
        raise DataError(f"statistics have a {name!r} that is not finite", column=name)
    return values
