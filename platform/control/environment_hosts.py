"""Which environment hosts live, and who gets the next instance: the table in the control Redis.

Server time decides who lives. The count of a host is its own at each announcement; assignments in
between are added to it, so that two that come at once go to two hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from vla_platform.errors import ConfigurationError, QuotaError, UnavailableError


@dataclass(frozen=True, kw_only=True)
class HostState:
    host_id: str
    harness: str
    capacity: int  # instances at most
    in_flight: int
    accepting: bool  # false: it is worn and ends with its last session
    tenants: Mapping[str, int] = field(
        default_factory=dict
    )  # remote sessions by tenant; not read back
    version: int = 2


class HostTable:
    """Thread-safe."""

    def __init__(self, client: Any, *, ttl_s: float = 6.0) -> None:
        self._redis = client
        self._ttl_ms = round(1000 * ttl_s)
        source = resources.files("vla_platform.control").joinpath("lua/environment_hosts.lua")
        self._script = client.register_script(source.read_text(encoding="utf-8"))

    def announce(self, state: HostState) -> None:
        """A host lives; to be said again within `ttl_s`."""
        self._script(
            args=[
                "announce", state.host_id, state.harness, state.capacity, state.in_flight,
                self._ttl_ms, int(state.accepting),
                *(part for pair in state.tenants.items() for part in pair),
            ]
        )  # fmt: skip

    def assign(self, harness: str, *, tenant: str = "", limit: int = 0) -> str:
        """The host with the fewest instances in flight, now with one more.

        With a `tenant`, at most `limit` instances are its own, over all hosts of the harness:
        `QuotaError`. Raises `UnavailableError` where none lives that has room.
        """
        found, *more = self._script(args=["assign", harness, tenant, limit])
        if _text(found) == "quota":
            raise QuotaError(
                f"{tenant} has {more[0]} sessions of {harness}, of {limit} that it may have; "
                "close one first",
                tenant=tenant,
                limit=limit,
            )
        if _text(found) == "full":
            raise UnavailableError(
                f"no host for {harness} has room for one more; try again later", harness=harness
            )
        return _text(more[0])

    def withdraw(self, state: HostState) -> None:
        """The host ends."""
        self._script(args=["withdraw", state.host_id, state.harness])

    def hosts(self, harness: str) -> list[HostState]:
        """Known hosts, also those whose announcement has just run out."""
        found = []
        for raw in sorted(self._redis.smembers(f"vla:env:hosts:{harness}")):
            host_id = raw.decode() if isinstance(raw, bytes) else raw
            values = self._redis.hgetall(f"vla:env:host:{host_id}")
            if values:
                fields = {_text(key): _text(value) for key, value in values.items()}
                found.append(
                    HostState(
                        host_id=host_id,
                        harness=harness,
                        capacity=int(fields["capacity"]),
                        in_flight=int(fields["in_flight"]),
                        accepting=fields["accepting"] == "1",
                    )
                )
        return found


def split_budget(budget: int, shares: Mapping[str, float]) -> dict[str, int]:
    """How many of `budget` hosts each harness gets: one each, and every further one goes to whoever
    has the fewest for its share.

    Raises `ConfigurationError` for shares that are not positive, or a budget below the number of
    harnesses.
    """
    if any(share <= 0 for share in shares.values()):
        raise ConfigurationError(f"shares are above 0, not {dict(shares)}")
    if budget < len(shares):
        raise ConfigurationError(
            f"{budget} environment hosts cannot serve {len(shares)} harnesses: {sorted(shares)}"
        )
    counts = dict.fromkeys(shares, 1)
    total = sum(shares.values())
    while sum(counts.values()) < budget:
        # The one that lies furthest below its share; names decide ties.
        furthest = min(shares, key=lambda name: (counts[name] / (shares[name] / total), name))
        counts[furthest] += 1
    return counts


def parse_shares(text: str) -> dict[str, float]:
    """`tabletop=1,maniskill=2`. Raises `ConfigurationError`."""
    try:
        pairs = [part.split("=") for part in text.split(",") if part]
        return {name.strip(): float(share) for name, share in pairs}
    except ValueError as error:
        raise ConfigurationError(
            f"shares look like tabletop=1,maniskill=2, not {text!r}"
        ) from error


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
