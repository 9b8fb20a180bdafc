"""How several data sources share a batch."""

from __future__ import annotations

from collections.abc import Sequence

from vla_platform.errors import SpecError


def quotas(shares: Sequence[float], size: int) -> list[int]:
    """How many of `size` places each source gets, by its share; at least one each.

    Shares are relative. What rounding down leaves over goes to the largest remainders, the first
    of equal ones (Hamilton's method), so every quota is within one of its exact share where that
    is above one. Raises `SpecError` for shares that are not positive, or more sources than places.
    """
    if not shares or any(share <= 0 for share in shares) or len(shares) > size:
        raise SpecError(
            f"{len(shares)} positive shares are needed, and as many places; there are {size}",
            problems=[],
        )
    total = sum(shares)
    exact = [size * share / total for share in shares]
    found = [max(1, int(one)) for one in exact]
    while sum(found) < size:
        at = max(range(len(found)), key=lambda at: (exact[at] - found[at], -at))
        found[at] += 1
    while sum(found) > size:  # those that got their one at others' cost
        at = max(range(len(found)), key=lambda at: (found[at] - exact[at], found[at], -at))
        at = at if found[at] > 1 else max(range(len(found)), key=lambda at: found[at])
        found[at] -= 1
    return found
