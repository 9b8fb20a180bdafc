"""Versions that the platform published: a checkpoint is a version, from its manifest on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from vla_platform.control.evaluations import checkpoint_of
from vla_platform.control.ledger import Ledger
from vla_platform.control.prepared import load_prepared
from vla_platform.control.services import Services
from vla_platform.errors import NotFoundError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.module_source import ModuleSource
from vla_platform.gpu_workers.module_versions import ModuleVersions
from vla_platform.gpu_workers.weights import ModuleMeta, Weights
from vla_storage.checkpoint_types import MODULE
from vla_storage.checkpoints import CheckpointRef
from vla_storage.errors import CheckpointError, CheckpointNotFoundError, InvalidKeyError
from vla_storage.manifests import Manifest


@dataclass(frozen=True)
class PublishedModuleSource(ModuleSource):
    """From the ledger, which version is current, and the policy's checkpoints."""

    services: Services

    @property
    def _ledger(self) -> Ledger:
        return self.services.ledger

    def current(self, policy_key: str) -> int | str:
        published = self._ledger.current_version(policy_key)
        if published is not None:
            return published
        newest = self._newest(policy_key)
        if newest is None:
            raise NotFoundError(
                f"{policy_key} has nothing to serve: no such policy, or no checkpoint of it yet",
                policy_key=policy_key,
            )
        return newest.checkpoint_id

    def load(self, policy_key: str, wanted: int | str) -> Weights:
        if isinstance(wanted, str):
            return self._from_checkpoint(policy_key, wanted)
        tenant, _, policy = policy_key.partition("/")
        try:
            checkpoint = checkpoint_of(self.services.checkpoints(tenant), policy, wanted)
        except InvalidKeyError:
            checkpoint = ""
        if not checkpoint:
            raise NotFoundError(
                f"{policy_key[:160]} has no version {wanted}", policy_key=policy_key, version=wanted
            )
        return self._from_checkpoint(policy_key, checkpoint)

    def _newest(self, policy_key: str) -> Manifest | None:
        tenant, _, policy = policy_key.partition("/")
        try:
            store = self.services.checkpoints(tenant)
            refs = store.list(policy)
        except InvalidKeyError as error:
            raise NotFoundError(f"no policy {policy_key[:160]}", policy_key=policy_key) from error
        found: Manifest | None = None
        for ref in refs:
            try:
                manifest = store.manifest(ref.id)
            except CheckpointError:
                continue  # deleted meanwhile, or damaged: not a candidate
            if found is None or (manifest.created, manifest.step) > (found.created, found.step):
                found = manifest
        return found

    def _from_checkpoint(self, policy_key: str, checkpoint_id: str) -> Weights:
        tenant, _, policy = policy_key.partition("/")
        try:
            ref = CheckpointRef.parse(checkpoint_id)
            if ref.policy != policy:
                raise CheckpointNotFoundError(f"no checkpoint {checkpoint_id}")
            manifest, module = self.services.checkpoints(tenant).load_module(checkpoint_id)
        except (CheckpointNotFoundError, InvalidKeyError, json.JSONDecodeError) as error:
            raise NotFoundError(
                f"{policy_key} has no checkpoint {checkpoint_id[:160]}", policy_key=policy_key
            ) from error
        prepared = load_prepared(self.services, tenant, manifest.workload_id)
        # Equal tensors are equal files: this is what `digest_of_tensors` says of them.
        digest = manifest.object(MODULE).sha256
        return Weights(manifest.policy_version, module, ModuleMeta.of(prepared), digest)


def published_versions(services: Services, backbone: Backbone) -> ModuleVersions:
    """Those that belong on `backbone`, within the worker's memory for modules."""
    return ModuleVersions(
        PublishedModuleSource(services),
        base_digest=backbone.digest,
        feature_dim=backbone.hidden_dim,
        device=backbone.device,
        device_bytes=services.settings.module_device_bytes,
        host_bytes=services.settings.module_host_bytes,
    )
