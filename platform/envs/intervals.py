"""How sure a success rate is."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson_interval(successes: int, episodes: int, *, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95 % by default (Wilson 1927).

    Unlike the normal interval it is right for few episodes and for rates near 0 and 1. Raises
    `ValueError` where `successes` is not within 0 to `episodes`, or there is no episode.
    """
    if not 0 <= successes <= episodes or episodes == 0:
        raise ValueError(f"{successes} of {episodes} is no proportion")
    rate = successes / episodes
    spread = z * z / episodes
    center = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / episodes + spread / (4 * episodes)) / (1 + spread)
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == episodes else min(1.0, center + half)
    return low, high
