"""The table of environment hosts on a real Valkey."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.control.environment_hosts import (
    HostState,
    HostTable,
    parse_shares,
    split_budget,
)
from vla_platform.errors import ConfigurationError, QuotaError, UnavailableError


@pytest.fixture
def table(control_redis_url: str) -> HostTable:
    return HostTable(redis.Redis.from_url(control_redis_url), ttl_s=30.0)


def state(host_id: str, *, in_flight: int = 0, harness: str = "tabletop", capacity: int = 8,
          accepting: bool = True, tenants: dict[str, int] | None = None) -> HostState:  # fmt: skip
    return HostState(
        host_id=host_id, harness=harness, capacity=capacity, in_flight=in_flight,
        accepting=accepting, tenants=tenants or {},
    )  # fmt: skip


def test_the_host_with_the_fewest_in_flight_is_chosen(table: HostTable) -> None:
    table.announce(state("one", in_flight=5))
    table.announce(state("two", in_flight=3))
    table.announce(state("other", harness="maniskill"))
    assert [table.assign("tabletop") for _ in range(4)] == ["two", "two", "one", "two"]
    assert table.assign("maniskill") == "other"
    with pytest.raises(UnavailableError, match="no host for libero"):
        table.assign("libero")


def test_assignments_at_the_same_time_are_spread(table: HostTable) -> None:
    for name in ("a", "b", "c", "d"):
        table.announce(state(name, capacity=100))
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: table.assign("tabletop"), range(40)))
    assert Counter(chosen) == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_a_full_a_worn_and_a_silent_host_get_nothing(control_redis_url: str) -> None:
    table = HostTable(redis.Redis.from_url(control_redis_url), ttl_s=0.3)
    table.announce(state("full", in_flight=8))
    table.announce(state("worn", accepting=False))
    with pytest.raises(UnavailableError):
        table.assign("tabletop")
    table.announce(state("silent"))
    assert table.assign("tabletop") == "silent"
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            table.assign("tabletop")
        except UnavailableError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("a host that says nothing still gets sessions")


def test_announcing_replaces_what_was_assigned(table: HostTable) -> None:
    table.announce(state("one"))
    for _ in range(4):
        table.assign("tabletop")
    assert [one.in_flight for one in table.hosts("tabletop")] == [4]
    table.announce(state("one", in_flight=1))
    assert [one.in_flight for one in table.hosts("tabletop")] == [1]
    table.withdraw(state("one"))
    assert table.hosts("tabletop") == []


def test_a_tenants_quota_counts_over_hosts(table: HostTable) -> None:
    table.announce(state("one", in_flight=3, tenants={"lab": 2, "other": 1}))
    table.announce(state("two", in_flight=4, tenants={"lab": 4}, accepting=False))
    table.announce(state("far", harness="maniskill"))
    assert table.assign("tabletop", tenant="lab", limit=8) == "one"
    with pytest.raises(QuotaError, match="lab has 7 sessions of tabletop, of 7") as refused:
        table.assign("tabletop", tenant="lab", limit=7)
    assert refused.value.details["limit"] == 7
    assert table.assign("tabletop", tenant="lab", limit=8) == "one"
    assert table.assign("tabletop", tenant="other", limit=8) == "one"
    assert table.assign("maniskill", tenant="lab", limit=8) == "far"
    table.announce(state("one", in_flight=1, tenants={"other": 1}))  # its own count is the truth
    assert table.assign("tabletop", tenant="lab", limit=8) == "one"


def test_tenants_that_come_at_once_stay_within_their_quota(table: HostTable) -> None:
    for name in ("a", "b", "c"):
        table.announce(state(name, capacity=100))

    def ask(_: int) -> str:
        try:
            return table.assign("tabletop", tenant="lab", limit=7)
        except QuotaError:
            return "refused"

    with ThreadPoolExecutor(8) as pool:
        answers = Counter(pool.map(ask, range(20)))
    assert (answers["refused"], answers["a"], answers["b"], answers["c"]) == (13, 3, 2, 2)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 100), min_size=1), st.integers(0, 40)
)
def test_a_budget_is_split_by_share(shares: dict[str, float], more: int) -> None:
    budget = len(shares) + more
    counts = split_budget(budget, shares)
    assert budget == sum(counts.values())
    assert min(counts.values()) >= 1
    total = sum(shares.values())
    for name, count in counts.items():
        assert count <= max(1.0, budget * shares[name] / total) + 1


def test_wrong_shares() -> None:
    assert parse_shares("tabletop=1,maniskill=2.5") == {"tabletop": 1.0, "maniskill": 2.5}
    for text in ("tabletop", "tabletop=x", "=1=2"):
        with pytest.raises(ConfigurationError):
            parse_shares(text)
    with pytest.raises(ConfigurationError, match="cannot serve"):
        split_budget(1, {"a": 1, "b": 1})
    with pytest.raises(ConfigurationError, match="above 0"):
        split_budget(3, {"a": 0.0})
