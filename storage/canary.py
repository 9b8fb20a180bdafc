"""What a policy answered to one fixed observation when its checkpoint was saved.

The answer is made again by whoever verifies the checkpoint. In the environment of the save it must
be the same to the bit; elsewhere, kernels sum in another order, and it must be close.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

CANARY_VERSION = 1
TOLERANCE = {"float32": 1e-3}
"""Of the largest recorded number. Kernels of other processors were seen to differ by 1e-5 in the
features; a module multiplies that."""
TOLERANCE_BELOW_FLOAT32 = 5e-2


@dataclass(frozen=True, kw_only=True)
class Canary:
    """The answer in short."""

    digest: str  # SHA-256 of the whole answer's float32 bytes
    numbers: tuple[float, ...]  # of it, evenly spaced
    shape: tuple[int, ...]
    environment: Mapping[str, str]  # torch, device, threads, dtype: equal ones give equal bits
    version: int = CANARY_VERSION


class Match(StrEnum):
    EXACT = "exact"
    """The same bits."""
    CLOSE = "close"
    """Within the tolerance, in another environment than that of the save."""
    DIFFERENT = "different"
    """Outside the tolerance, or not the same bits although the environment is the same."""
    NOT_RECORDED = "not_recorded"
    """The checkpoint was saved without a canary, or by a release with another one."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    match: Match
    tolerance: float = 0.0  # absolute; 0: the bits had to be the same
    largest: float = 0.0  # difference of two numbers
    changed: tuple[str, ...] = ()  # what of the environment is another

    @property
    def told(self) -> str:
        """In a sentence."""
        where = f"; other than at the save: {', '.join(self.changed)}" if self.changed else ""
        if self.match is Match.NOT_RECORDED:
            return "nothing to compare with: the checkpoint carries no canary of this kind"
        if self.match is Match.EXACT:
            return f"the same bits as at the save{where}"
        if self.match is Match.CLOSE:
            return f"within {self.tolerance:.1e} (largest difference {self.largest:.1e}){where}"
        allowed = f"more than {self.tolerance:.1e}" if self.tolerance else "where none may be"
        return f"differs by {self.largest:.1e}, {allowed}{where}"


def compare(recorded: Canary | None, now: Canary) -> Comparison:
    """The verdict on an answer that was made again."""
    if recorded is None or recorded.version != now.version:
        return Comparison(match=Match.NOT_RECORDED)
    names = sorted(recorded.environment.keys() | now.environment.keys())
    changed = tuple(
        name for name in names if recorded.environment.get(name) != now.environment.get(name)
    )
    if recorded.digest == now.digest:
        return Comparison(match=Match.EXACT, changed=changed)
    pairs = list(zip(recorded.numbers, now.numbers, strict=False))
    largest = max((abs(before - after) for before, after in pairs), default=0.0)
    if recorded.shape != now.shape or not changed:
        return Comparison(match=Match.DIFFERENT, largest=largest, changed=changed)
    share = max(
        TOLERANCE.get(one.environment.get("dtype", ""), TOLERANCE_BELOW_FLOAT32)
        for one in (recorded, now)
    )
    tolerance = share * max((abs(number) for number in recorded.numbers), default=0.0)
    return Comparison(
        match=Match.CLOSE if largest <= tolerance else Match.DIFFERENT,
        tolerance=tolerance,
        largest=largest,
        changed=changed,
    )
