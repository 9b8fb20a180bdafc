"""Which environments wait for their next use, and how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vla_platform.envs.parking import Parking


def test_the_newest_of_a_key_comes_back_first_and_only_once() -> None:
    parking: Parking[str] = Parking(10.0)
    for at, (key, thing) in enumerate((("a", "one"), ("b", "two"), ("a", "three"))):
        parking.put(key, thing, float(at))
    assert [parking.take("a"), parking.take("a"), parking.take("a")] == ["three", "one", None]
    assert (parking.things, parking.oldest(), parking.oldest()) == (["two"], "two", None)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5)), max_size=20), st.floats(0, 20))
def test_nothing_is_lost_or_kept_too_long(puts: list[tuple[str, float]], look: float) -> None:
    parking: Parking[int] = Parking(3.0)
    now, until = 0.0, {}
    for number, (key, later) in enumerate(puts):
        now += later
        parking.put(key, number, now)
        until[number] = now + 3.0
    over = parking.expired(now + look)
    assert set(over) == {number for number, end in until.items() if end <= now + look}
    assert sorted([*over, *parking.things]) == sorted(until)
    assert parking.clear() == [number for number in until if number not in over]
    assert len(parking) == 0
