"""Suites: exactly so many different starts."""

from __future__ import annotations

import pytest

from vla_platform.envs.suites import suite
from vla_platform.errors import SpecError


def test_pf34_fifty_libero_episodes_have_fifty_different_starts() -> None:
    cases = suite("libero/libero_spatial/3", episodes=50).cases
    assert list(range(50)) == [case.init_state for case in cases]
    assert len({case.seed for case in cases}) == 50


def test_pf34_a_suite_of_ten_tasks_uses_no_start_twice() -> None:
    cases = suite("libero/libero_object", episodes=500).cases
    assert len({(case.env_id, case.init_state) for case in cases}) == 500
    assert len({case.env_id for case in cases[:10]}) == 10
    with pytest.raises(SpecError, match="500 recorded starts"):
        suite("libero/libero_object", episodes=501)


def test_seeds_follow_from_the_suites_seed_and_repeat() -> None:
    one, same, other = (suite("tabletop/push", episodes=100, seed=s) for s in (1, 1, 2))
    assert one == same and one.digest == same.digest
    assert len({case.seed for case in one.cases}) == 100
    assert not {case.seed for case in one.cases} & {case.seed for case in other.cases}


@pytest.mark.parametrize("episodes", [0, -1, 1.5, True, 10**6, "8"])
def test_wrong_counts(episodes: object) -> None:
    with pytest.raises(SpecError, match="episodes"):
        suite("tabletop/push", episodes=episodes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["libero/libero_spatiall", "tabletop", "nothing/x", ""])
def test_unknown_suites(name: str) -> None:
    with pytest.raises(SpecError):
        suite(name, episodes=3)
