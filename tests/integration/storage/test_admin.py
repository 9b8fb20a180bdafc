"""A tenant's object-store keys reach its own prefix and nothing else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from vla_platform.stack.servers import S3Address
from vla_storage.errors import InvalidKeyError, StorageAccessError
from vla_storage.objects import S3Admin, S3ObjectStore

pytestmark = pytest.mark.services


@pytest.fixture
def admin(s3: S3Address) -> Iterator[S3Admin]:
    found = s3.admin()
    with contextlib.closing(found):
        yield found
        for tenant in ("a", "ab"):
            found.delete_tenant(tenant)


def store_of(s3: S3Address, keys: tuple[str, str]) -> S3ObjectStore:
    return S3ObjectStore(s3.bucket, endpoint=s3.endpoint, access_key=keys[0], secret_key=keys[1])


def eventually(action: Callable[[], object], *, refused: bool, timeout_s: float = 10.0) -> bool:
    """Whether the store comes to answer as expected: IAM changes are not instantaneous."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            action()
        except StorageAccessError:
            if refused:
                return True
        else:
            if not refused:
                return True
        time.sleep(0.02)
    return False


def test_b05_tenants_a_and_ab_cannot_reach_each_other(s3: S3Address, admin: S3Admin) -> None:
    keys = {tenant: admin.create_tenant(tenant) for tenant in ("a", "ab")}
    with store_of(s3, keys["a"]) as a, store_of(s3, keys["ab"]) as ab:
        assert eventually(lambda: a.put("a/datasets/x", b"of a"), refused=False)
        assert eventually(lambda: ab.put("ab/datasets/x", b"of ab"), refused=False)

        assert a.get("a/datasets/x") == b"of a"
        # What was asked for and produced is the platform's word: the tenant only reads it.
        for key in ("a/x", "a/workloads/r/outcome.json", "a/policies/p/versions/1/version.json"):
            assert eventually(lambda key=key: a.put(key, b"forged"), refused=True)
        assert [item.key for item in ab.list("ab/")] == ["ab/datasets/x"]
        for own, other in ((a, "ab/"), (ab, "a/")):
            for attempt in (
                lambda own=own, other=other: own.get(f"{other}datasets/x"),
                lambda own=own, other=other: own.head(f"{other}datasets/x"),
                lambda own=own, other=other: own.put(f"{other}datasets/x", b"stolen"),
                lambda own=own, other=other: own.put(f"{other}datasets/new", b"stolen"),
                lambda own=own, other=other: list(own.list(other)),
                lambda own=own, other=other: list(own.list("")),
                lambda own=own, other=other: own.delete(f"{other}datasets/x"),
            ):
                with pytest.raises(StorageAccessError):
                    attempt()
        assert (a.get("a/datasets/x"), ab.get("ab/datasets/x")) == (b"of a", b"of ab")


def test_new_keys_end_the_old_ones_and_deletion_ends_all(s3: S3Address, admin: S3Admin) -> None:
    old = admin.create_tenant("a")
    new = admin.create_tenant("a")
    with store_of(s3, old) as stale, store_of(s3, new) as current:
        assert eventually(lambda: current.put("a/datasets/x", b"1"), refused=False)
        assert eventually(lambda: stale.get("a/datasets/x"), refused=True)

        admin.delete_tenant("a")
        admin.delete_tenant("a")
        assert eventually(lambda: current.get("a/datasets/x"), refused=True)


@pytest.mark.parametrize("tenant", ["../b", "a/b", "A", "", "a*", "a" * 64])
def test_b01_tenant_names_are_checked(admin: S3Admin, tenant: str) -> None:
    with pytest.raises(InvalidKeyError):
        admin.create_tenant(tenant)
