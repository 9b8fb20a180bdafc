"""The verdict on an answer that was made again: the same bits, close, or another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vla_storage.canary import Canary, Match, compare

HERE = {"torch": "2.9", "device": "cpu A", "threads": "1", "dtype": "float32"}
RECORDED = Canary(digest="0" * 64, numbers=(0.5, -2.0, 0.0), shape=(1, 3), environment=HERE)


def again(difference: float, **environment: str) -> Canary:
    numbers = tuple(number + difference for number in RECORDED.numbers)
    return replace(
        RECORDED,
        digest="0" * 64 if difference == 0.0 else "1" * 64,
        numbers=numbers,
        environment=HERE | environment,
    )


@pytest.mark.parametrize(
    ("now", "match"),
    [
        (again(0.0), Match.EXACT),
        (again(0.0, device="cpu B"), Match.EXACT),
        (again(1e-6), Match.DIFFERENT),  # the same environment owes the same bits
        (again(1e-6, device="cpu B"), Match.CLOSE),
        (again(1.9e-3, torch="3.0"), Match.CLOSE),  # 1e-3 of the largest number, which is 2
        (again(2.1e-3, torch="3.0"), Match.DIFFERENT),
        (again(2.1e-3, dtype="bfloat16"), Match.CLOSE),
        (replace(again(1e-6, device="cpu B"), shape=(3, 1)), Match.DIFFERENT),
        (replace(RECORDED, version=2), Match.NOT_RECORDED),
    ],
)
def test_what_an_answer_is_worth(now: Canary, match: Match) -> None:
    assert match is compare(RECORDED, now).match


def test_the_verdict_says_which_and_why() -> None:
    told = compare(RECORDED, again(1e-6, device="cpu B", torch="3.0")).told
    assert told == (
        "within 2.0e-03 (largest difference 1.0e-06); other than at the save: device, torch"
    )
    assert compare(RECORDED, again(0.5)).told == "differs by 5.0e-01, where none may be"
    assert Match.NOT_RECORDED is compare(None, RECORDED).match
