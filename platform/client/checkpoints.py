"""A tenant's checkpoints: list, verify, keep, remove, take home."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from vla_platform.client.connection import Connection
from vla_platform.control.checkpoint_changes import plan_of
from vla_platform.specs import canonical_json
from vla_storage.checkpoints import CheckpointRef, CheckpointStore
from vla_storage.export import export_folder, export_tar
from vla_storage.manifests import Manifest
from vla_storage.marks import Mark, Marks, read_marks
from vla_storage.retention import RetentionPlan


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
        return self._mark(checkpoint_id, pinned=pinned)

    def set_ttl(self, checkpoint_id: str, ttl_s: float | None) -> Mark:
        """Let retention remove it `ttl_s` from now; None: as long as the other rules keep it."""
        if ttl_s is not None and not 0 <= ttl_s < 10 * 366 * 86400:
            raise ValueError(f"ttl_s {ttl_s} is not between 0 and ten years")
        return self._mark(checkpoint_id, ttl_s=-1.0 if ttl_s is None else ttl_s)

    def set_milestone(self, checkpoint_id: str, *, milestone: bool = True) -> Mark:
        return self._mark(checkpoint_id, milestone=milestone)

    def name_checkpoint(self, alias: str, checkpoint_id: str | None, *, policy: str) -> None:
        """Give a checkpoint a name, such as `best`; it is kept as long as it has one."""
        self._change(
            {"what": "alias", "policy": policy, "alias": alias, "checkpoint": checkpoint_id}
        )

    def prune(
        self, policy: str, *, keep_last: int, keep_best: int = 0, milestone_every: int = 0,
        dry_run: bool = True,
    ) -> RetentionPlan:  # fmt: skip
        """What the rules keep and remove; with `dry_run` False it is removed. What is in use by an
        evaluation, as the beginning of a run or as its teacher, stays."""
        rules = {
            "keep_last": keep_last, "keep_best": keep_best, "milestone_every": milestone_every,
        }  # fmt: skip
        plan = RetentionPlan(policy=policy, stay=(), go=())
        for run in sorted({ref.workload_id for ref in self._checkpoints.list(policy)}):
            wanted = {"what": "prune", "policy": policy, "run": run, "dry_run": dry_run, **rules}
            left = 1
            while left:
                answer = self._change(wanted)
                left, found = answer["left"], plan_of(answer)
                plan = replace(plan, go=plan.go + found.go)
            plan = replace(plan, stay=plan.stay + found.stay)
        return plan

    def delete_checkpoints(
        self, checkpoint_ids: Collection[str], *, dry_run: bool = True
    ) -> list[RetentionPlan]:
        """Remove the named ones, but not marked ones, nor what is in use, nor the last valid one
        of a run."""
        refs = sorted({CheckpointRef.parse(one) for one in checkpoint_ids})
        plans: dict[str, RetentionPlan] = {}
        for _, same_run in groupby(refs, key=lambda ref: (ref.policy, ref.workload_id)):
            ids = [ref.id for ref in same_run]
            while ids:
                found = plan_of(
                    self._change({"what": "delete", "checkpoints": ids, "dry_run": dry_run})
                )
                before = plans.get(found.policy, replace(found, stay=(), go=()))
                plans[found.policy] = replace(
                    found, stay=before.stay + found.stay, go=before.go + found.go
                )
                decided = {one for one, _ in (*found.stay, *found.go)}
                ids = [one for one in ids if one not in decided]
        return list(plans.values())

    def _mark(self, checkpoint_id: str, **change: Any) -> Mark:
        return Mark(**self._change({"what": "mark", "checkpoint": checkpoint_id, **change}))

    def _change(self, change: Mapping[str, Any]) -> Any:
        return self._connection.call(
            "ingress.change_checkpoints",
            timeout_s=60.0,
            shown=f"{self.tenant}, {change['what']}",
            change=canonical_json(change).decode(),
        )

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
