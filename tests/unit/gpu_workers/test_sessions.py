"""Windows of recent frames: shipped once, bounded, and asked for again when lost."""

from __future__ import annotations

import numpy as np
import pytest

from vla_platform.errors import HistoryLostError
from vla_platform.gpu_workers.sessions import SessionWindows
from vla_platform.inference.protocol import SessionStep


def frame(number: int) -> np.ndarray:
    return np.full(10, number, np.uint8)


def step(number: int, **changes: object) -> SessionStep:
    return SessionStep(session="e", step=number, history=3, **changes)  # type: ignore[arg-type]


def shown(window: tuple[np.ndarray, ...]) -> list[int]:
    return [int(one[0]) for one in window]


def test_the_window_slides_and_begins_with_the_first_frame():
    windows = SessionWindows()
    found = [shown(windows.advance("a", "c", step(n), [frame(n)])) for n in range(5)]
    assert found == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_the_same_step_again_changes_nothing():
    windows = SessionWindows()
    for number in range(3):
        windows.advance("a", "c", step(number), [frame(number)])
    assert shown(windows.advance("a", "c", step(2), [frame(2)])) == [0, 1, 2]
    assert shown(windows.advance("a", "c", step(3), [frame(3)])) == [1, 2, 3]


def test_a_gap_asks_for_the_window_which_then_is_taken_whole():
    windows = SessionWindows()
    windows.advance("a", "c", step(0), [frame(0)])
    with pytest.raises(HistoryLostError):
        windows.advance("a", "c", step(4), [frame(4)])
    whole = step(4, num_frames=3, is_whole=True)
    assert shown(windows.advance("a", "c", whole, [frame(n) for n in (2, 3, 4)])) == [2, 3, 4]
    assert shown(windows.advance("a", "c", step(5), [frame(5)])) == [3, 4, 5]


def test_tenants_and_clients_do_not_share_a_session_of_the_same_name():
    windows = SessionWindows()
    windows.advance("a", "c", step(0), [frame(1)])
    windows.advance("b", "c", step(0), [frame(2)])
    assert shown(windows.advance("a", "c", step(1), [frame(3)])) == [1, 1, 3]
    assert shown(windows.advance("b", "c", step(1), [frame(3)])) == [2, 2, 3]


def test_memory_is_bounded_and_the_oldest_session_leaves_first():
    windows = SessionWindows(max_bytes=100)
    for number in range(50):
        one = SessionStep(session=str(number), step=0, history=1)
        windows.advance("a", "c", one, [frame(0)])
        assert windows.size_bytes <= 100
    with pytest.raises(HistoryLostError):
        windows.advance("a", "c", SessionStep(session="0", step=1, history=2), [frame(0)])
