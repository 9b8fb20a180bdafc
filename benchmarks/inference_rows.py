"""What `benchmarks/inference.py` sends: a picture and eight numbers, as one row of bytes."""

from __future__ import annotations

import numpy as np

SIDE, STATE = 224, 8
PIXEL_BYTES = SIDE * SIDE * 3
ROW_BYTES = PIXEL_BYTES + 4 * STATE


def observation(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    row = rng.integers(0, 256, ROW_BYTES, dtype=np.uint8)
    row[PIXEL_BYTES:] = rng.uniform(-1, 1, STATE).astype(np.float32).view(np.uint8)
    return row
