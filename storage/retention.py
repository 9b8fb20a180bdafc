"""Which checkpoints go: a policy's retention, and the leftovers of uploads that died."""

from __future__ import annotations

import time
from collections.abc import Collection

from vla_storage.checkpoints import MANIFEST, CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointError


def apply_retention(
    store: CheckpointStore,
    policy: str,
    *,
    keep_last: int,
    milestone_every: int = 0,
    workload_id: str | None = None,
    protect: Collection[str] = (),
) -> list[str]:
    """Delete old checkpoints; returns the ids that are gone.

    Of each workload (or the one named) stay: the newest `keep_last` valid ones (at least one),
    steps that are multiples of `milestone_every`, and the ids in `protect` (in use). Workloads
    are lineages of their own, so a run that starts again at step 0 competes with none of the
    earlier ones; steps are compared as numbers and object times not at all (PF-21). Damaged
    checkpoints newer than the oldest kept one stay as evidence.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    deleted = []
    lineages: dict[str, list[CheckpointRef]] = {}
    for ref in store.list(policy, workload_id):
        lineages.setdefault(ref.workload_id, []).append(ref)
    for refs in lineages.values():
        kept = 0
        for ref in reversed(refs):
            if kept < keep_last:
                kept += _is_valid(store, ref)
                continue
            milestone = milestone_every > 0 and ref.step % milestone_every == 0
            if not milestone and ref.id not in protect:
                store.delete(ref.id)
                deleted.append(ref.id)
    return deleted


def collect_leftovers(
    store: CheckpointStore, policy: str, *, older_than_s: float = 3600.0
) -> list[str]:
    """Delete objects that no manifest names, of uploads that died; returns their keys.

    `older_than_s` spares uploads that are under way, by the store's clock.
    """
    items = list(store.objects.list(store.policy_prefix(policy)))
    named: set[str] = set()
    for ref in store.list(policy):
        folder = store.folder(ref)
        named.add(folder + MANIFEST)
        try:
            entries = store.manifest(ref.id).objects
        except CheckpointError:
            # Unreadable: its objects are evidence, keep all of them.
            named.update(item.key for item in items if item.key.startswith(folder))
        else:
            named.update(folder + entry.relative_key for entry in entries)
    limit = time.time() - older_than_s
    leftovers = [i.key for i in items if i.key not in named and i.modified <= limit]
    for key in leftovers:
        store.objects.delete(key)
    return leftovers


def _is_valid(store: CheckpointStore, ref: CheckpointRef) -> bool:
    try:
        store.verify(ref.id, content=False)
    except CheckpointError:
        return False
    return True
