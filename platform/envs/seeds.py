"""Seeds of episodes and predictions: pure functions of what they belong to.

A job that is done again draws the same episodes (F53), and no two episodes of a workload share a
seed by construction (PF-41).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """Keeps the seeds of training, evaluation and sampling apart."""

    TRAINING = 1
    EVALUATION = 2
    PREDICTION = 3


def derive_seed(use: Use, *numbers: int) -> int:
    """A seed below 2**31 from non-negative numbers."""
    state = np.random.SeedSequence([int(use), *numbers]).generate_state(1, np.uint32)
    return int(state[0]) >> 1
