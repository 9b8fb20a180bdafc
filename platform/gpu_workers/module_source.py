"""Where inference finds a policy's module: published versions first, then checkpoints."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from vla_platform.control.ledger import Ledger
from vla_platform.control.prepared import load_prepared
from vla_platform.control.services import Services
from vla_platform.errors import NotFoundError
from vla_platform.gpu_workers.weights import ModuleMeta, Weights, WeightStore
from vla_storage.checkpoint_types import MODULE
from vla_storage.checkpoints import CheckpointRef, CheckpointStore
from vla_storage.errors import CheckpointError, CheckpointNotFoundError, InvalidKeyError
from vla_storage.manifests import Manifest

Wanted = int | str | None
"""A policy version, a checkpoint id, or the current version."""


class ModuleSource(ABC):
    """May be slow: called from loading threads only. Thread-safe."""

    @abstractmethod
    def current(self, policy_key: str) -> int | str:
        """What `None` stands for now. Raises `NotFoundError` for an unknown policy."""

    @abstractmethod
    def load(self, policy_key: str, wanted: int | str) -> Weights:
        """Raises `NotFoundError`, `ModuleLoadError` or a `StorageError`."""


class MemoryModuleSource(ModuleSource):
    """Versions put by hand: for tests and for `load_weights`."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, int | str], Weights] = {}

    def put(self, policy_key: str, weights: Weights) -> None:
        self.versions[policy_key, weights.version] = weights

    def current(self, policy_key: str) -> int | str:
        numbers = [
            version
            for key, version in self.versions
            if key == policy_key and isinstance(version, int)
        ]
        if not numbers:
            raise NotFoundError(f"no policy {policy_key}", policy_key=policy_key)
        return max(numbers)

    def load(self, policy_key: str, wanted: int | str) -> Weights:
        found = self.versions.get((policy_key, wanted))
        if found is None:
            raise NotFoundError(f"{policy_key} has no version {wanted}", policy_key=policy_key)
        return found


@dataclass(frozen=True)
class PlatformModuleSource(ModuleSource):
    """From the ledger (which version is current), published versions and checkpoints."""

    services: Services
    weights: WeightStore

    @property
    def _ledger(self) -> Ledger:
        return self.services.ledger

    def current(self, policy_key: str) -> int | str:
        published = self._ledger.current_version(policy_key)
        if published is not None:
            return published
        newest = self._newest(policy_key, lambda _: True)
        if newest is None:
            raise NotFoundError(
                f"{policy_key} has nothing to serve: no such policy, or no checkpoint of it yet",
                policy_key=policy_key,
            )
        return newest.checkpoint_id

    def load(self, policy_key: str, wanted: int | str) -> Weights:
        if isinstance(wanted, str):
            return self._from_checkpoint(policy_key, wanted)
        try:
            return self.weights.get(policy_key, wanted)
        except NotFoundError:
            newest = self._newest(policy_key, lambda found: found.policy_version == wanted)
            if newest is None:
                raise
            return self._from_checkpoint(policy_key, newest.checkpoint_id)

    def _newest(self, policy_key: str, fits: Callable[[Manifest], bool]) -> Manifest | None:
        tenant, _, policy = policy_key.partition("/")
        try:
            store = self._checkpoints(tenant)
            refs = store.list(policy)
        except InvalidKeyError as error:
            raise NotFoundError(f"no policy {policy_key[:160]}", policy_key=policy_key) from error
        found: Manifest | None = None
        for ref in refs:
            try:
                manifest = store.manifest(ref.id)
            except CheckpointError:
                continue  # deleted meanwhile, or damaged: not a candidate
            newer = found is None or (manifest.created, manifest.step) > (found.created, found.step)
            if newer and fits(manifest):
                found = manifest
        return found

    def _from_checkpoint(self, policy_key: str, checkpoint_id: str) -> Weights:
        tenant, _, policy = policy_key.partition("/")
        try:
            ref = CheckpointRef.parse(checkpoint_id)
            if ref.policy != policy:
                raise CheckpointNotFoundError(f"no checkpoint {checkpoint_id}")
            manifest, module = self._checkpoints(tenant).load_module(checkpoint_id)
        except (CheckpointNotFoundError, InvalidKeyError, json.JSONDecodeError) as error:
            raise NotFoundError(
                f"{policy_key} has no checkpoint {checkpoint_id[:160]}", policy_key=policy_key
            ) from error
        prepared = load_prepared(self.services, tenant, manifest.workload_id)
        meta = ModuleMeta(
            schema=prepared.schema,
            action_module=prepared.action_module,
            normalization=prepared.normalization,
        )
        # Equal tensors are equal files: this is what `digest_of_tensors` says of them.
        return Weights(manifest.policy_version, module, meta, manifest.object(MODULE).sha256)

    def _checkpoints(self, tenant: str) -> CheckpointStore:
        return CheckpointStore(
            objects=self.services.objects,
            tenant_id=tenant,
            signing_key=self.services.signing_key,
        )
