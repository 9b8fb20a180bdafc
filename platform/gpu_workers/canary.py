"""The canary of a checkpoint: one fixed observation through backbone and action module.

Everything that enters comes from SHAKE-256, so it is the same on every machine and with every
release of a library. The backbone's part is remembered per layout: a save costs one forward of the
action module on a single row.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from vla_platform.control.prepared import Prepared, prepared_key
from vla_platform.errors import ModuleLoadError, NotFoundError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.weights import ModuleMeta, Weights, digest_of_tensors, module_of
from vla_storage.canary import Canary, Comparison, compare
from vla_storage.checkpoints import CheckpointStore
from vla_storage.errors import ObjectNotFoundError
from vla_storage.manifests import Manifest

PROMPT = "put the red block on the plate"
MOST_NUMBERS = 16
_CACHE_BYTES = 64 << 20


class CanaryProbe:
    """Asks modules on one backbone. Not thread-safe: it takes the device's turn of its caller."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._encoder = FeatureEncoder(backbone, cache=FeatureCache(_CACHE_BYTES))

    @torch.no_grad()
    def ask(self, module: ActionModule) -> Canary | None:
        """The module's answer, as it is now; None where it is not finite. Leaves it in eval mode.

        Its parameters and random numbers are untouched.
        """
        module.eval()
        schema, device = module.schema, self._backbone.device
        state = None
        if module.state_normalizer is not None:
            scaled = 2 * _uniform("state", schema.state_dim)[None] - 1
            state = module.state_normalizer.denormalize(torch.from_numpy(scaled).to(device))
        raw = None if state is None else state.cpu().numpy()
        row = Row(
            images=_pictures(len(schema.cameras), schema.image_size),
            prompt=module.prompts([PROMPT], raw)[0],
            num_queries=module.num_queries,
        )
        kind = module.feature_kind
        encoded = self._encoder.encode([row], [kind])
        noise = None
        if module.draws_noise:
            shape = (1, schema.chunk, schema.action_dim)
            noise = torch.from_numpy(_normal(schema.chunk * schema.action_dim)).reshape(shape)
            noise = noise.to(device)
        actions = module.act(stack_features(encoded.features, kind), state, noise)
        answer = np.ascontiguousarray(actions.float().cpu().numpy())
        if not np.isfinite(answer).all():
            return None
        flat = answer.reshape(-1)
        chosen = np.linspace(0, len(flat) - 1, min(MOST_NUMBERS, len(flat))).astype(int)
        return Canary(
            digest=hashlib.sha256(answer.tobytes()).hexdigest(),
            numbers=tuple(float(number) for number in flat[chosen]),
            shape=answer.shape,
            environment=environment_of(self._backbone),
        )


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """A checkpoint that was loaded and asked again."""

    manifest: Manifest
    answer: Canary | None
    comparison: Comparison | None  # None: the answer is not finite


def reproduce(
    store: CheckpointStore, checkpoint_id: str, *, base_model: str = "", device: str = "cpu"
) -> Reproduced:
    """Load a checkpoint, every byte compared with its digest, and ask it again.

    `base_model`: a built-in name, a folder or a hub id; default: the name that the policy was
    trained with. Raises what `CheckpointStore.load` does, `NotFoundError` where the run's record
    is gone, and `ModuleLoadError` for another base model or a module that does not fit.
    """
    loaded = store.load(checkpoint_id)
    manifest = loaded.manifest
    try:
        record = store.objects.get(prepared_key(store.tenant_id, manifest.workload_id))
    except ObjectNotFoundError as error:
        raise NotFoundError(
            f"the record of run {manifest.workload_id} is gone: its interface is unknown",
            workload=manifest.workload_id,
        ) from error
    prepared = Prepared.from_json(record)
    if prepared.schema.signature != manifest.lineage.schema_signature:
        raise ModuleLoadError(
            f"the record of run {manifest.workload_id} has another interface than {checkpoint_id}"
        )
    backbone = Backbone.load(base_model or prepared.schema.base_model, device=device)
    if backbone.digest != manifest.lineage.base_digest:
        raise ModuleLoadError(
            f"{checkpoint_id} was trained on base model {manifest.lineage.base_digest[:12]}; "
            f"{backbone.name} is {backbone.digest[:12]}: name the right one with --base-model"
        )
    weights = Weights(
        manifest.policy_version,
        loaded.module,
        ModuleMeta.of(prepared),
        digest_of_tensors(loaded.module),
    )
    module = module_of(weights, feature_dim=backbone.hidden_dim, name=checkpoint_id)
    answer = CanaryProbe(backbone).ask(module.to(backbone.device))
    comparison = None if answer is None else compare(manifest.canary, answer)
    return Reproduced(manifest=manifest, answer=answer, comparison=comparison)


def environment_of(backbone: Backbone) -> dict[str, str]:
    """What the same bits depend on, besides the weights."""
    on_cpu = backbone.device.type == "cpu"
    return {
        "torch": torch.__version__,
        "device": _processor() if on_cpu else torch.cuda.get_device_name(backbone.device),
        "threads": str(torch.get_num_threads()) if on_cpu else "",
        "dtype": str(backbone.dtype).removeprefix("torch."),
    }


@cache
def _processor() -> str:
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def _pictures(num_cameras: int, size: int) -> npt.NDArray[np.uint8]:
    """Shape: (C, P, P, 3). Flat areas with edges, as cameras see them."""
    blocks = 8
    colours = np.frombuffer(_bytes("pictures", num_cameras * blocks * blocks * 3), np.uint8)
    colours = colours.reshape(num_cameras, blocks, blocks, 3)
    at = np.arange(size) * blocks // size
    return np.ascontiguousarray(colours[:, at][:, :, at])


@cache
def _uniform(use: str, count: int) -> npt.NDArray[np.float32]:
    """In (0, 1). Shape: (count,)."""
    words = np.frombuffer(_bytes(use, 2 * count), ">u2")
    return ((words.astype(np.float64) + 0.5) / 65536).astype(np.float32)


@cache
def _normal(count: int) -> npt.NDArray[np.float32]:
    normal = NormalDist()
    return np.array([normal.inv_cdf(float(u)) for u in _uniform("noise", count)], np.float32)


def _bytes(use: str, count: int) -> bytes:
    return hashlib.shake_256(f"vla-canary {use}".encode()).digest(count)
