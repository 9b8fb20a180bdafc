"""A tenant's checkpoints: list, verify, keep, remove, take home."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from vla_platform.client.connection import Connection
from vla_storage.checkpoints import CheckpointRef, CheckpointStore
from vla_storage.export import export_folder, export_tar
from vla_storage.manifests import Manifest
from vla_storage.marks import Mark, Marks, read_marks
from vla_storage.retention import (
    RetentionPlan,
    RetentionRules,
    carry_out,
    plan_removal,
    plan_retention,
    set_alias,
    set_mark,
)


class CheckpointShelf:
    """Mixed into `Platform`."""

    tenant: str
    _connection: Connection
    _checkpoints: CheckpointStore

    def checkpoints(self, policy: str, run_id: str | None = None) -> list[Manifest]:
        """Visible checkpoints of a policy, oldest first."""
        refs = self._checkpoints.list(policy, run_id)
        found = [self._checkpoints.manifest(ref.id) for ref in refs]
        return sorted(found, key=lambda manifest: (manifest.created, manifest.step))

    @property
    def checkpoint_store(self) -> CheckpointStore:
        """The store below these calls, without the platform's key."""
        return self._checkpoints

    def verify(self, checkpoint_id: str) -> Manifest:
        """Read every object of a checkpoint and compare sizes and digests. `vla checkpoints
        verify` also asks the policy again what it was asked when it was saved."""
        return self._checkpoints.verify(checkpoint_id)

    def marks(self, policy: str) -> Marks:
        """Pins, names, times to live and scores of a policy's checkpoints."""
        return read_marks(self._connection.objects, self.tenant, policy)

    def pin(self, checkpoint_id: str, *, pinned: bool = True) -> Mark:
        """No rule removes a pinned checkpoint. Raises `CheckpointNotFoundError`, also where
        retention is removing it at this moment."""
        return set_mark(self._checkpoints, checkpoint_id, pinned=pinned)

    def set_ttl(self, checkpoint_id: str, ttl_s: float | None) -> Mark:
        """Let retention remove it `ttl_s` from now; None: as long as the other rules keep it."""
        if ttl_s is not None and not 0 <= ttl_s < 10 * 366 * 86400:
            raise ValueError(f"ttl_s {ttl_s} is not between 0 and ten years")
        expires = None if ttl_s is None else time.time() + ttl_s
        return set_mark(self._checkpoints, checkpoint_id, expires=expires)

    def set_milestone(self, checkpoint_id: str, *, milestone: bool = True) -> Mark:
        return set_mark(self._checkpoints, checkpoint_id, milestone=milestone)

    def name_checkpoint(self, alias: str, checkpoint_id: str | None, *, policy: str) -> None:
        """Give a checkpoint a name, such as `best`; it is kept as long as it has one."""
        set_alias(self._checkpoints, alias, checkpoint_id, policy)

    def prune(
        self, policy: str, *, keep_last: int, keep_best: int = 0, milestone_every: int = 0,
        dry_run: bool = True,
    ) -> RetentionPlan:  # fmt: skip
        """What the rules keep and remove; with `dry_run` False it is removed."""
        rules = RetentionRules(
            keep_last=keep_last, keep_best=keep_best, milestone_every=milestone_every
        )
        plan = plan_retention(self._checkpoints, policy, rules)
        if not dry_run:
            carry_out(self._checkpoints, plan)
        return plan

    def delete_checkpoints(
        self, checkpoint_ids: Collection[str], *, dry_run: bool = True
    ) -> list[RetentionPlan]:
        """Remove the named ones, but not marked ones nor the last valid one of a run."""
        plans = []
        for policy in sorted({CheckpointRef.parse(one).policy for one in checkpoint_ids}):
            mine = [one for one in checkpoint_ids if CheckpointRef.parse(one).policy == policy]
            plans.append(plan_removal(self._checkpoints, policy, mine))
        if not dry_run:
            for plan in plans:
                carry_out(self._checkpoints, plan)
        return plans

    def download(self, checkpoint_id: str, folder: Path | str) -> Path:
        """Fetch a verified checkpoint into a folder of its own below `folder`."""
        target = Path(folder) / checkpoint_id.replace("/", "-")
        return export_folder(self._checkpoints, checkpoint_id, target)

    def export(self, checkpoint_id: str, file: Path | str) -> Path:
        """Fetch a verified checkpoint as one tar file."""
        return export_tar(self._checkpoints, checkpoint_id, Path(file))

    def links(self, checkpoint_id: str, *, expires_s: int = 3600) -> dict[str, str]:
        """A link per object with which anybody can read it until then; compare digests with the
        manifest's."""
        manifest = self._checkpoints.manifest(checkpoint_id)
        prefix = self._checkpoints.folder(CheckpointRef.parse(checkpoint_id))
        return {
            entry.name: self._connection.objects.presigned_url(
                prefix + entry.relative_key, expires_s=expires_s
            )
            for entry in manifest.objects
        }
