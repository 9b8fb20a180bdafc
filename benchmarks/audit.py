"""What an audit costs beside what it has to do anyway, on a real S3.

    python benchmarks/audit.py [--quick]

`audit_vs_bare_listing`: time of the first shallow audit of a tenant, over listing the same objects
with the same client; `repeated_audit_vs_bare_listing` is the next one. In the details, the first
audit of a tenant whose checkpoints carry no seals, so that every manifest is read.
`deep_audit_vs_read_and_hash`: bytes a second of a deep audit, over those of reading and hashing the
same objects one after the other. Rounds alternate; medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

for _name, _value in {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items():
    os.environ.setdefault(_name, _value)
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np  # noqa: E402
from checkpoints import checkpoint, object_store  # noqa: E402
from result_line import print_result, target  # noqa: E402

from vla_storage.audit import Auditor, AuditRules  # noqa: E402
from vla_storage.audit_archive import PREFIX  # noqa: E402
from vla_storage.audit_findings import AuditReport  # noqa: E402
from vla_storage.checkpoints import CheckpointStore  # noqa: E402
from vla_storage.objects import ObjectStore, S3ObjectStore  # noqa: E402
from vla_storage.objects.base import ObjectInfo  # noqa: E402
from vla_storage.seals import is_seal  # noqa: E402

KEY = b"benchmark"


def audit(objects: ObjectStore, tenant: str, *, deep: bool = False) -> tuple[float, AuditReport]:
    started = time.perf_counter()
    report = Auditor(objects, signing_key=KEY, rules=AuditRules(settle_s=0.0)).audit(
        tenant, deep=deep
    )
    took = time.perf_counter() - started
    assert report is not None
    assert not report.findings, report.findings[:3]
    return took, report


class Unsealed(S3ObjectStore):
    """The same bucket, as a release without seals would have left it."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for item in super().list(prefix, after=after):
            if not is_seal(item.key.rpartition("/")[2]):
                yield item


def forget_audits(objects: ObjectStore, tenant: str) -> None:
    for info in list(objects.list(f"{PREFIX}{tenant}/")):
        objects.delete(info.key)


def list_all(objects: ObjectStore, tenant: str) -> tuple[float, int]:
    started = time.perf_counter()
    num = sum(1 for _ in objects.list(f"{tenant}/"))
    return time.perf_counter() - started, num


def read_and_hash(objects: ObjectStore, tenant: str) -> tuple[float, int]:
    """As a plain script does it: get, hash, next."""
    started = time.perf_counter()
    size = 0
    for info in objects.list(f"{tenant}/"):
        content = objects.get(info.key)
        hashlib.sha256(content).hexdigest()
        size += len(content)
    return time.perf_counter() - started, size


def fill(objects: ObjectStore, tenant: str, count: int, side: int) -> None:
    store = CheckpointStore(objects=objects, tenant_id=tenant, signing_key=KEY)
    rng = np.random.default_rng(0)
    tensors = {
        f"{kind}.{i}": rng.standard_normal((side, side), np.float32)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for i in range(2)
    }

    def save(step: int) -> None:
        own = {name: array + step for name, array in tensors.items()}
        store.save(checkpoint(own, f"w{step % 10}", step))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(1, count + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer objects; same result names")
    options = parser.parse_args()
    many, large, rounds = (1500, 40, 5) if options.quick else (25_000, 200, 7)
    first, repeated, deep = [], [], []
    with tempfile.TemporaryDirectory() as folder, object_store(Path(folder)) as objects:
        print(f"saving {many} small and {large} larger checkpoints", file=sys.stderr)
        fill(objects, "many", many, 8)
        fill(objects, "large", large, 512)
        for number in range(rounds):
            forget_audits(objects, "many")
            listing_s, num = list_all(objects, "many")
            first_s, report = audit(objects, "many")
            first.append(first_s / listing_s)
            assert report.counts.checkpoints == many
            listing_s, num = list_all(objects, "many")
            audit_s, report = audit(objects, "many")
            repeated.append(audit_s / listing_s)
            assert report.counts.unchanged == many
            hash_s, size = read_and_hash(objects, "large")
            deep_s, report = audit(objects, "large", deep=True)
            deep.append((report.counts.bytes_read / deep_s) / (size / hash_s))
            print(
                f"round {number + 1}/{rounds}: {num} objects listed in {listing_s:.2f} s, first "
                f"audited in {first_s:.2f} s, again in {audit_s:.2f} s; {size >> 20} MB "
                f"hashed in {hash_s:.2f} s, audited in {deep_s:.2f} s",
                file=sys.stderr,
            )
        forget_audits(objects, "many")
        unsealed = object.__new__(Unsealed)
        unsealed.__dict__ = objects.__dict__
        listing_s, _ = list_all(unsealed, "many")
        unsealed_s, report = audit(unsealed, "many")
        assert report.counts.checked == many
    print_result(
        "audit",
        {
            "audit_vs_bare_listing": target(statistics.median(first), 1.5, "ratio of times"),
            "repeated_audit_vs_bare_listing": target(
                statistics.median(repeated), 1.5, "ratio of times"
            ),
            "deep_audit_vs_read_and_hash": target(statistics.median(deep), 0.8, "ratio of rates"),
        },
        {
            "unsealed_first_audit_vs_bare_listing": round(unsealed_s / listing_s, 2),
            "objects": num,
            "deep_mb": size >> 20,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
