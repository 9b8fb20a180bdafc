"""Versions of action modules in memory: pulled on first use, counted, evicted when idle.

Several versions of one policy live at once: training's newest, an evaluation's pinned one. A
version in use is never evicted, and loading happens on threads of its own, tenants in turn, so that
no tenant's load or swap pauses another's requests. Idle versions leave the device first
(`device_bytes`), then the host's memory (`host_bytes`), least recently used first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from vla_platform.errors import ModuleLoadError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.module_source import ModuleSource, Wanted
from vla_platform.gpu_workers.tenant_pool import TenantPool
from vla_platform.gpu_workers.weights import ModuleMeta, Weights, module_of
from vla_platform.specs import canonical_json

_log = logging.getLogger(__name__)
CURRENT_TTL_S = 0.5
"""How long a policy's current version is taken for granted before it is looked up again."""


@dataclass(eq=False)
class MountedModule:
    """One version of one policy, ready to decode. `kind` is equal for modules that may be
    stacked: same class, sizes and normalisation."""

    policy_key: str
    version: int
    digest: str
    module: ActionModule
    kind: str
    size_bytes: int
    num_users: int = 0
    on_device: bool = False

    @property
    def signature(self) -> str:
        return self.module.schema.signature


@dataclass
class VersionCounts:
    """What happened so far, for metrics and tests."""

    loads: int = 0
    moved_to_host: int = 0
    dropped: int = 0


@dataclass
class _Current:
    wanted: int | str
    looked_up: float
    refreshing: bool = False


Loading = Future[MountedModule]


@dataclass(eq=False)
class _State:
    mounted: OrderedDict[tuple[str, int | str], MountedModule] = field(default_factory=OrderedDict)
    loading: dict[tuple[str, Wanted], Loading] = field(default_factory=dict)
    current: dict[str, _Current] = field(default_factory=dict)


class ModuleVersions:
    """Thread-safe. `clock` is in seconds and monotonic."""

    def __init__(
        self,
        source: ModuleSource,
        *,
        base_digest: str,
        feature_dim: int,
        device: torch.device,
        device_bytes: int = 1 << 30,
        host_bytes: int = 4 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._base_digest = base_digest
        self._feature_dim = feature_dim
        self._device = device
        self._device_bytes = device_bytes
        self._host_bytes = host_bytes
        self._clock = clock
        self._state = _State()
        self._lock = threading.RLock()
        self._loaders = TenantPool(2, name="module-load")
        self.counts = VersionCounts()

    def acquire(self, policy_key: str, wanted: Wanted) -> MountedModule | Loading:
        """The module, counted as in use until `release`; or, where it must be pulled first, a
        future to wait for before asking again. Never blocks; the future carries load errors."""
        with self._lock:
            key = self._key(policy_key, wanted)
            found = None if key is None else self._state.mounted.get(key)
            if found is not None and key is not None:
                self._state.mounted.move_to_end(key)
                found.num_users += 1
                self._to_device(found)
                return found
            return self._pull(policy_key, wanted if key is None else key[1])

    def release(self, mounted: MountedModule) -> None:
        with self._lock:
            mounted.num_users -= 1
            self._evict()

    def notice(self, policy_key: str, version: int) -> None:
        """A new version was published: where the policy is served here, pull it now and switch to
        it when it is there; requests go on with the one before meanwhile."""
        with self._lock:
            current = self._state.current.get(policy_key)
            if current is None or (isinstance(current.wanted, int) and current.wanted >= version):
                return
            self._refresh(policy_key, current)

    @property
    def mounted(self) -> Mapping[tuple[str, int | str], MountedModule]:
        return self._state.mounted

    def close(self) -> None:
        self._loaders.shutdown()

    def _key(self, policy_key: str, wanted: Wanted) -> tuple[str, int | str] | None:
        if wanted is not None:
            return policy_key, wanted
        current = self._state.current.get(policy_key)
        if current is None:
            return None
        if self._clock() - current.looked_up > CURRENT_TTL_S:
            self._refresh(policy_key, current)
        return policy_key, current.wanted

    def _refresh(self, policy_key: str, current: _Current) -> None:
        """Look the current version up again, in the background; an outage changes nothing."""
        if current.refreshing:
            return
        current.refreshing = True

        def run() -> None:
            try:
                wanted = self._source.current(policy_key)
                if wanted != current.wanted:
                    self._load(policy_key, wanted)
                current.wanted = wanted
            except Exception:
                _log.warning("action=version_not_served policy=%s", policy_key, exc_info=True)
            finally:
                current.looked_up = self._clock()
                current.refreshing = False

        self._loaders.submit(_tenant(policy_key), run)

    def _pull(self, policy_key: str, wanted: Wanted) -> Loading:
        key = (policy_key, wanted)
        found = self._state.loading.get(key)
        if found is None:
            found = self._state.loading[key] = self._loaders.submit(
                _tenant(policy_key), lambda: self._pull_now(policy_key, wanted)
            )
            found.add_done_callback(lambda _: self._loaded(key))
        return found

    def _loaded(self, key: tuple[str, Wanted]) -> None:
        with self._lock:
            self._state.loading.pop(key, None)

    def _pull_now(self, policy_key: str, wanted: Wanted) -> MountedModule:
        if wanted is not None:
            return self._load(policy_key, wanted)
        current = self._source.current(policy_key)
        mounted = self._load(policy_key, current)
        with self._lock:
            self._state.current[policy_key] = _Current(current, self._clock())
        return mounted

    def _load(self, policy_key: str, wanted: int | str) -> MountedModule:
        with self._lock:
            known = self._state.mounted.get((policy_key, wanted))
        if known is not None:
            return known
        mounted = self._mount(policy_key, self._source.load(policy_key, wanted))
        with self._lock:
            self.counts.loads += 1
            self._keep((policy_key, wanted), mounted)
        return mounted

    def _mount(self, policy_key: str, weights: Weights) -> MountedModule:
        meta = weights.meta
        if meta.schema.base_digest != self._base_digest:
            raise ModuleLoadError(
                f"{policy_key} was trained on another base model than this worker has",
                policy_key=policy_key,
            )
        module = module_of(weights, feature_dim=self._feature_dim, name=policy_key)
        return MountedModule(
            policy_key=policy_key,
            version=weights.version,
            digest=weights.digest,
            module=module,
            kind=_kind(meta),
            size_bytes=sum(array.nbytes for array in weights.tensors.values()),
        )

    def _keep(self, key: tuple[str, int | str], mounted: MountedModule) -> None:
        self._state.mounted[key] = mounted
        self._state.mounted.move_to_end(key)
        self._evict()

    def _to_device(self, mounted: MountedModule) -> None:
        if not mounted.on_device:
            mounted.module.to(self._device)
            mounted.on_device = True
            self._evict()

    def _evict(self) -> None:
        state = self._state
        on_device = sum(one.size_bytes for one in state.mounted.values() if one.on_device)
        for one in list(state.mounted.values()):
            if on_device <= self._device_bytes:
                break
            if one.on_device and not one.num_users:
                one.module.to("cpu")
                one.on_device = False
                on_device -= one.size_bytes
                self.counts.moved_to_host += 1
        in_memory = sum(one.size_bytes for one in state.mounted.values())
        for key, one in list(state.mounted.items()):
            if in_memory <= self._host_bytes:
                break
            if not one.num_users and key != next(reversed(state.mounted)):
                del state.mounted[key]
                in_memory -= one.size_bytes
                self.counts.dropped += 1


def _tenant(policy_key: str) -> str:
    return policy_key.partition("/")[0]


def _kind(meta: ModuleMeta) -> str:
    """Equal for modules whose tensors have the same names and shapes and mean the same."""
    schema = meta.schema
    sizes = [schema.state_dim, schema.action_dim, schema.chunk, schema.state_input]
    return canonical_json(
        [meta.action_module.model_dump(mode="json"), meta.normalization, sizes]
    ).decode()
