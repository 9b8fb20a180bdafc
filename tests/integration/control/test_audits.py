"""Audits on a real S3: all tenants, the page, the exit status' severity (F62)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from vla_platform.control.audit_page import VERDICTS, render, summary
from vla_platform.control.audits import audit_tenants
from vla_platform.control.tenant_records import Tenant, record_key
from vla_platform.errors import TenantError
from vla_platform.metrics.events import Event
from vla_platform.specs import canonical_json
from vla_platform.stack.servers import S3Address
from vla_storage.audit import AuditRules
from vla_storage.audit_findings import FindingKind, Severity
from vla_storage.checkpoints import Checkpoint, CheckpointRef, CheckpointStore
from vla_storage.objects import S3ObjectStore

pytestmark = pytest.mark.services
KEY = b"platform key of the tests"
RULES = AuditRules(settle_s=0.0, grace_s=0.0)


@dataclass(frozen=True)
class Stores:
    objects: S3ObjectStore
    signing_key: bytes = KEY


@pytest.fixture
def stores(s3: S3Address, make_checkpoint: Callable[..., Checkpoint]) -> Iterator[Stores]:
    with s3.objects() as objects:
        for name in ("a", "ab"):
            record = Tenant(tenant_id=name, password_sha256="0" * 64)
            objects.put(record_key(name), canonical_json(vars(record)))
            spec = objects.put(f"{name}/workloads/w1/spec.json", b"{}")
            assert spec
            store = CheckpointStore(objects=objects, tenant_id=name, signing_key=KEY)
            for step in (5, 10):
                one = make_checkpoint(step)
                line = replace(one.header.lineage, spec_digest=EMPTY_SPEC)
                store.save(replace(one, header=replace(one.header, lineage=line)))
        yield Stores(objects)


EMPTY_SPEC = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
"""SHA-256 of `{}`."""


def test_all_tenants_are_audited_and_told(stores: Stores) -> None:
    events: list[Event] = []
    done = audit_tenants(stores, rules=RULES, emit=events.append)
    assert [list(one.report.findings) for one in done.audited] == [[], []]
    assert [event.tenant for event in events] == ["a", "ab"]
    assert VERDICTS[None] in render(done)
    with pytest.raises(TenantError):
        audit_tenants(stores, tenants=["b"], rules=RULES)


def test_f62_what_was_changed_behind_our_back_is_in_the_next_report(stores: Stores) -> None:
    audit_tenants(stores, rules=RULES)
    folder = "a/policies/reach/checkpoints/w1/0000000010/"
    keys = {key.split("/")[-1].split("-")[0]: key for key in _keys(stores.objects, folder)}
    stores.objects.delete(keys["optimizer"])
    stores.objects.put(keys["module"], stores.objects.get(keys["module"])[::-1])
    stores.objects.put("ac/x", b"")
    done = audit_tenants(stores, rules=RULES)
    found = {f.kind: f.key for one in done.audited for f in one.report.findings}
    assert {FindingKind.CORRUPT: keys["module"], FindingKind.MISSING: keys["optimizer"]} == found
    assert (done.worst, done.unknown) == (Severity.ERROR, ("ac",))
    assert [(row["tenant"], row["new"]) for row in summary(done)] == [("a", 2), ("ab", 0)]
    page = render(done)
    assert keys["optimizer"] in page
    assert VERDICTS[Severity.ERROR] in page
    manifest = f"{folder}manifest.json"
    stores.objects.put(manifest, stores.objects.get(manifest).replace(b"80", b"81"))
    assert Severity.CRITICAL is audit_tenants(stores, tenants=["a"], rules=RULES).worst


def test_a_large_object_is_known_by_its_listed_etag(
    stores: Stores, make_checkpoint: Callable[..., Checkpoint]
) -> None:
    """Stores cut large objects into chunks; listing and answer to the put agree all the same."""
    store = CheckpointStore(objects=stores.objects, tenant_id="a", signing_key=KEY)
    one = make_checkpoint(20)
    line = replace(one.header.lineage, spec_digest=EMPTY_SPEC)
    large = {"w": np.random.default_rng(0).standard_normal((1500, 1700), np.float32)}
    store.save(replace(one, header=replace(one.header, lineage=line), module=large))
    done = audit_tenants(stores, tenants=["a"], deep=True, rules=RULES)
    assert done.audited[0].report.findings == ()
    assert done.audited[0].report.counts.bytes_read > 10_000_000
    assert store.folder(CheckpointRef.parse("reach/w1/20"))


def _keys(objects: S3ObjectStore, prefix: str) -> list[str]:
    return [info.key for info in objects.list(prefix)]
