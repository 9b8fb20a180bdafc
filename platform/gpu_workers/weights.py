"""Published versions of policies: what training hands to inference after every update.

    <tenant>/policies/<policy>/versions/<version, ten digits>/
        module-<digest>.safetensors  version.json

`version.json` is written last and signed; it alone makes a version visible. It tells what module
the tensors belong in, so that any worker can serve it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError

from vla_platform.control.ledger import Ledger
from vla_platform.errors import ModuleLoadError, NotFoundError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.action_modules.build import build_action_module
from vla_platform.gpu_workers.action_modules.stochastic import trained_by_rl
from vla_platform.gpu_workers.normalization import Normalization
from vla_platform.gpu_workers.slots import SlotConfig
from vla_platform.schema import Schema
from vla_platform.specs import ActionModuleSpec, canonical_json
from vla_storage import tensors
from vla_storage.errors import InvalidKeyError, ObjectNotFoundError, TensorFormatError
from vla_storage.names import check_name
from vla_storage.objects import ObjectStore

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 1 << 20
Tensors = Mapping[str, npt.NDArray[Any]]

_MODULE: TypeAdapter[ActionModuleSpec] = TypeAdapter(ActionModuleSpec)


@dataclass(frozen=True, kw_only=True)
class ModuleMeta:
    """What a policy's tensors belong in."""

    schema: Schema
    action_module: ActionModuleSpec
    normalization: Normalization = "min_max"

    @classmethod
    def of(cls, config: SlotConfig) -> ModuleMeta:
        return cls(
            schema=config.schema,
            action_module=config.action_module,
            normalization=config.normalization,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": self.schema.to_dict(),
            "action_module": self.action_module.model_dump(mode="json"),
            "normalization": self.normalization,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModuleMeta:
        return cls(
            schema=Schema.from_dict(raw["schema"]),
            action_module=_MODULE.validate_json(json.dumps(raw["action_module"])),
            normalization=raw["normalization"],
        )


@dataclass(frozen=True)
class Weights:
    """One version of a policy. `digest` is the SHA-256 of the tensors' file."""

    version: int
    tensors: Tensors
    meta: ModuleMeta
    digest: str


def module_of(weights: Weights, *, feature_dim: int, name: str) -> ActionModule:
    """The module that a version's tensors belong in, on the CPU, for acting only.

    Raises `ModuleLoadError` naming `name`, whose weights they are.
    """
    meta = weights.meta
    module = build_action_module(
        meta.action_module,
        meta.schema,
        feature_dim=feature_dim,
        seed=0,
        normalization=meta.normalization,
        state_statistics=None,
        action_statistics=None,
        rl=True,
    )
    try:
        state = {k: torch.tensor(v) for k, v in weights.tensors.items()}
        if not trained_by_rl(state):
            state |= {k: v for k, v in module.state_dict().items() if trained_by_rl([k])}
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ModuleLoadError(
            f"the weights of {name} do not fit its module: {error}", policy_key=name
        ) from error
    return module.eval().requires_grad_(False)


def digest_of_tensors(arrays: Tensors) -> str:
    """The module digest that answers carry: equal tensors, equal digest."""
    return hashlib.sha256(tensors.encode(arrays)).hexdigest()


class WeightStore:
    """Versions by policy key (`tenant/policy`). Thread-safe.

    A tenant can write below its own prefix; nothing that it puts there is served, for it lacks the
    signing key.
    """

    def __init__(self, objects: ObjectStore, *, signing_key: bytes) -> None:
        self._objects = objects
        self._key = signing_key

    def put(self, policy_key: str, version: int, arrays: Tensors, meta: ModuleMeta) -> str:
        """Make a version visible; returns its digest. The same content again changes nothing;
        a version that training did anew after a crash replaces the lost one."""
        data = tensors.encode(arrays)
        digest = hashlib.sha256(data).hexdigest()
        folder = self._folder(policy_key, version)
        self._objects.put(f"{folder}module-{digest[:16]}.safetensors", data, sha256=digest)
        record = {
            "version": FORMAT_VERSION,
            "policy_key": policy_key,
            "policy_version": version,
            "sha256": digest,
            "size": len(data),
            "meta": meta.to_dict(),
        }
        signed = {"record": record, "signature": self._sign(policy_key, record)}
        self._objects.put(f"{folder}version.json", canonical_json(signed))
        return digest

    def get(self, policy_key: str, version: int) -> Weights:
        """A verified version. Raises `NotFoundError` and `ModuleLoadError` (altered, unsigned)."""
        folder = self._folder(policy_key, version)
        try:
            text = self._objects.get(f"{folder}version.json", max_bytes=MAX_RECORD_BYTES)
        except ObjectNotFoundError:
            raise NotFoundError(
                f"{policy_key} has no version {version}", policy_key=policy_key, version=version
            ) from None
        try:
            signed = json.loads(text)
            record = signed["record"]
            signature = self._sign(policy_key, record)
            if not hmac.compare_digest(signature, str(signed["signature"])):
                raise ValueError("the signature does not match")
            if (record["policy_key"], record["policy_version"]) != (policy_key, version):
                raise ValueError("it belongs to another version")
            size, digest = int(record["size"]), str(record["sha256"])
            data = self._objects.get(f"{folder}module-{digest[:16]}.safetensors", max_bytes=size)
            if hashlib.sha256(data).hexdigest() != digest:
                raise ValueError("the tensors do not match their digest")
            arrays = tensors.decode(bytearray(data), max_bytes=size, require_finite=True)
            meta = ModuleMeta.from_dict(record["meta"])
        except (
            *(ValueError, TypeError, KeyError, RecursionError),
            *(ObjectNotFoundError, TensorFormatError, ValidationError),
        ) as error:
            raise ModuleLoadError(
                f"version {version} of {policy_key} is damaged: {error}",
                policy_key=policy_key,
                version=version,
            ) from error
        return Weights(version, arrays, meta, digest)

    def versions(self, policy_key: str) -> list[int]:
        """All visible versions, ascending."""
        prefix = self._prefix(policy_key)
        found = []
        for item in self._objects.list(prefix):
            number, _, name = item.key.removeprefix(prefix).partition("/")
            if name == "version.json" and number.isdigit():
                found.append(int(number))
        return sorted(found)

    def prune(self, policy_key: str, *, keep: int) -> int:
        """Remove all but the newest `keep` versions; returns how many."""
        old = self.versions(policy_key)[:-keep] if keep else []
        for version in old:
            folder = self._folder(policy_key, version)
            self._objects.delete(f"{folder}version.json")
            for item in list(self._objects.list(folder)):
                self._objects.delete(item.key)
        return len(old)

    def _sign(self, policy_key: str, record: Any) -> str:
        tenant = policy_key.partition("/")[0]
        key = hmac.new(self._key, f"vla-version {tenant}".encode(), hashlib.sha256).digest()
        return hmac.new(key, canonical_json(record), hashlib.sha256).hexdigest()

    def _prefix(self, policy_key: str) -> str:
        tenant, _, policy = policy_key.partition("/")
        try:
            return (
                f"{check_name('tenant', tenant)}/policies/{check_name('policy', policy)}/versions/"
            )
        except InvalidKeyError as error:
            raise NotFoundError(f"no policy {policy_key[:160]}", policy_key=policy_key) from error

    def _folder(self, policy_key: str, version: int) -> str:
        if not 0 <= version < 10**10:
            raise NotFoundError(f"{policy_key} has no version {version}", policy_key=policy_key)
        return f"{self._prefix(policy_key)}{version:010d}/"


def publish(
    store: WeightStore,
    ledger: Ledger,
    policy_key: str,
    version: int,
    arrays: Tensors,
    meta: ModuleMeta,
) -> str:
    """Put a version and make it the current one: the step after `export_params`. Returns its
    digest. Inference workers that serve the policy pull it on notice, others on first use."""
    digest = store.put(policy_key, version, arrays, meta)
    ledger.publish_version(policy_key, version, base_model=meta.schema.base_model)
    return digest
