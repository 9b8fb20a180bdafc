"""Objects that no manifest names: of uploads that died, or lost a race."""

from __future__ import annotations

import time

from vla_storage.checkpoints import MANIFEST, CheckpointStore
from vla_storage.errors import CheckpointError
from vla_storage.folders import Kind, folders
from vla_storage.seals import is_seal

MOST_READ = 50
"""Manifests that are read at once: who asks has other tenants' work to do."""
MOST_COLLECTED = 200
"""Leftovers that go at once, each by a request."""


def collect_leftovers(
    store: CheckpointStore, policy: str, *, older_than_s: float = 86_400.0
) -> list[str]:
    """Delete objects that no manifest names, of uploads that died; returns their keys.

    `older_than_s` spares uploads that are under way, or go on after an outage with what is there
    already; by the store's clock. At most `MOST_COLLECTED` go, and `MOST_READ` manifests are read:
    a folder that lists as its publisher sealed it has none.
    """
    limit, num_read = time.time() - older_than_s, 0
    leftovers: list[str] = []
    for folder in folders(store.objects.list(store.policy_prefix(policy)), store.tenant_id):
        if (
            folder.kind is not Kind.CHECKPOINT
            or folder.ref is None
            or folder.is_sealed(store.signing_key)
        ):
            continue
        named: set[str] = set()
        if any(item.key == folder.prefix + MANIFEST for item in folder.items):
            num_read += 1
            if num_read > MOST_READ:
                continue
            try:
                entries = store.manifest(folder.ref.id).objects
            except CheckpointError:
                continue  # unreadable: its objects are evidence
            named = {MANIFEST, *(entry.relative_key for entry in entries)}
        for item in folder.items:
            name = item.key[len(folder.prefix) :]
            if item.modified <= limit and name not in named and not (named and is_seal(name)):
                leftovers.append(item.key)
    del leftovers[MOST_COLLECTED:]
    for leftover in leftovers:
        store.objects.delete(leftover)
    return leftovers
