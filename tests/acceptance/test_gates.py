"""A worker refuses services that could lose work, and `up` says which and why (F28)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from vla_platform.errors import ConfigurationError
from vla_platform.stack import operate
from vla_platform.stack.roles import ROLES

CONTROL = tuple(role for role in ROLES if role.name == "control")


@pytest.fixture
def evicting_redis(control_redis_url: str) -> Iterator[str]:
    with redis.Redis.from_url(control_redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        yield control_redis_url
        client.config_set("maxmemory-policy", "noeviction")


def test_an_evicting_control_redis_is_refused_f28(tmp_path: Path, evicting_redis: str) -> None:
    environment = {**os.environ, "VLA_REDIS_URL": evicting_redis}
    try:
        with pytest.raises(ConfigurationError, match="set it to noeviction") as caught:
            operate.up(tmp_path / "var", roles=CONTROL, environment=environment, timeout_s=90)
        assert caught.value.details["role"] == "control"
    finally:
        operate.down(tmp_path / "var")
