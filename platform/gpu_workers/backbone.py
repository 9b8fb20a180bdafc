"""The resident base model: loaded once, frozen, shared by all tenants of a worker.

Bit-equality. A row's result must not depend on its batch mates. On CPU in float32 with one thread
this holds exactly: oneDNN's and MKL's matrix products give a row the same bits for every number of
rows from 16 up (below, other kernels sum in another order: differences of 1e-5 were measured), and
`canonical` pads every row to a multiple of 32 tokens that depends on the row alone, so no product
here ever has fewer rows. Rows of different padded length never share a forward. In bfloat16 with
`eager` attention equality is exact too; with other kernels (GPU, sdpa) it holds within 1e-5 in
float32 and 1e-2 (relative) in bfloat16.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from vla_platform.errors import BackboneChangedError, ModuleLoadError
from vla_platform.gpu_workers.canonical import (
    QUERY_TOKEN,
    CanonicalBatch,
    Canonicalizer,
    ImageFormat,
)
from vla_platform.specs import canonical_json

TINY = Path(__file__).parent.parent / "assets" / "tiny"
TINY_RANDOM_SEED = 0
_NO_CODE: dict[str, Any] = {"trust_remote_code": False}  # left out, it is asked for on a terminal
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose images enter as Qwen's flat patches."""

FeaturePoint = Literal["post_norm", "pre_norm"]


class FeatureKind(StrEnum):
    """What an action module reads from the backbone. Shapes are those of one row."""

    QUERIES = "queries"
    """Hidden states of the action queries, (T, D): OFT."""
    HIDDEN = "hidden"
    """Hidden states of all tokens, (L, D), with a mask: GR00T."""
    LAYERS = "layers"
    """Outputs of every decoder layer, (N, L, D), with a mask: QwenPI."""
    KV = "kv"
    """Keys and values of every layer, (N, 2, heads, L, head_dim), with a mask: pi0, pi0.5."""


class Backbone:
    """A frozen `AutoModelForImageTextToText` with what is needed to feed it.

    `digest` is the SHA-256 over all parameters and buffers; `preprocessing_digest` covers the
    tokenizer, the image format and the feature point. Both name features in the cache.
    """

    def __init__(
        self,
        model: Any,
        canonicalizer: Canonicalizer,
        *,
        name: str,
        feature: FeaturePoint = "post_norm",
        tokenizer_digest: str = "",
    ) -> None:
        self.name = name
        self.feature: FeaturePoint = feature
        self.canonicalizer = canonicalizer
        self.num_forwards = 0
        self._model: Any = model.eval().requires_grad_(False)
        self._core: Any = self._model.model  # without the language head: no logits are needed
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        text: Any = self._model.config.get_text_config()
        self.hidden_dim: int = text.hidden_size
        self.digest = digest_of(model)
        image = canonicalizer.image
        self.preprocessing_digest = hashlib.sha256(
            canonical_json([tokenizer_digest, repr(image), feature, transformers.__version__])
        ).hexdigest()
        self._positions: dict[tuple[bytes, int], Tensor] = {}

    @property
    def image_size(self) -> int:
        """Pixels along an edge of the square images that the model takes."""
        return self.canonicalizer.image.size

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        feature: FeaturePoint = "post_norm",
        image_size: int | None = None,
    ) -> Backbone:
        """Load `tiny`, `tiny-random`, a folder or a hub id. Remote code is never run.

        `attn_implementation` defaults to `eager` on CPU and `sdpa` elsewhere; `image_size` to 128
        pixels for the tiny models and to 224 (StarVLA's) for others.
        """
        device = torch.device(device)
        attention = attn_implementation or ("eager" if device.type == "cpu" else "sdpa")
        source = str(TINY) if name in ("tiny", "tiny-random") else name
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **_NO_CODE)
            processor = _image_processor(source)
            # Loaded in the wanted type, never cast: a cast would also round the rotary tables.
            model: Any = (
                _random_model(source, dtype, attention)
                if name == "tiny-random"
                else transformers.AutoModelForImageTextToText.from_pretrained(
                    source, dtype=dtype, attn_implementation=attention, **_NO_CODE
                )
            )
        except (OSError, ValueError) as error:
            raise ModuleLoadError(f"cannot load base model {name!r}: {error}") from error
        if model.config.model_type not in FAMILIES:
            raise ModuleLoadError(
                f"base model {name!r} is of type {model.config.model_type!r}; "
                f"supported are {', '.join(FAMILIES)}"
            )
        size = image_size or (128 if source == str(TINY) else 224)
        image = ImageFormat(
            size=size,
            patch=processor.patch_size,
            merge=processor.merge_size,
            temporal=processor.temporal_patch_size,
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
        )
        _add_query_token(tokenizer, model)
        use_linear_patch_embedding(model)
        tokens = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        canonicalizer = Canonicalizer(tokenizer, image)
        return cls(
            model.to(device),
            canonicalizer,
            name=name,
            feature=feature,
            tokenizer_digest=tokens,
        )

    def facts(self) -> dict[str, Any]:
        """What admission must know of the base model."""
        return {
            "digest": self.digest,
            "preprocessing_digest": self.preprocessing_digest,
            "image_size": self.image_size,
            "hidden_dim": self.hidden_dim,
        }

    def verify(self) -> None:
        """Raise `BackboneChangedError` where a parameter or buffer is not what was loaded."""
        found = digest_of(self._model)
        if found != self.digest:
            raise BackboneChangedError(
                f"the frozen base model {self.name!r} has changed",
                expected=self.digest,
                found=found,
            )

    @torch.no_grad()
    def forward(
        self, batch: CanonicalBatch, kinds: frozenset[FeatureKind] = frozenset()
    ) -> dict[FeatureKind, Tensor]:
        """Hidden states (B, L, D), and what else `kinds` asks for, with a leading B.

        `QUERIES` is a selection of `HIDDEN` and is made by the caller.
        """
        if self._model.training:
            self._model.eval()
        self.num_forwards += 1
        captured: list[Tensor] = []
        layers: list[Tensor] = []
        decoder = self._core.language_model
        hooks = []
        if self.feature == "pre_norm":
            hooks.append(
                decoder.norm.register_forward_pre_hook(lambda _, given: captured.append(given[0]))
            )
        if FeatureKind.LAYERS in kinds:
            hooks.extend(
                layer.register_forward_hook(lambda _m, _i, output: layers.append(output))
                for layer in decoder.layers
            )
        try:
            output = self._core(
                input_ids=self._to_device(batch.input_ids),
                attention_mask=self._to_device(batch.attention_mask),
                position_ids=self._position_ids(batch),
                mm_token_type_ids=self._to_device(batch.is_image.astype(np.int64)),
                pixel_values=self._to_device(batch.patches).to(self.dtype),
                image_grid_thw=self._to_device(batch.grid_thw),
                use_cache=FeatureKind.KV in kinds,
            )
        finally:
            for hook in hooks:
                hook.remove()
        hidden = captured[0] if captured else output.last_hidden_state
        found = {FeatureKind.HIDDEN: hidden}
        if FeatureKind.LAYERS in kinds:
            found[FeatureKind.LAYERS] = torch.stack(layers, dim=1)
        if FeatureKind.KV in kinds:
            pairs = [torch.stack([layer.keys, layer.values], 1) for layer in output.cache.layers]
            found[FeatureKind.KV] = torch.stack(pairs, dim=1)
        return found

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _position_ids(self, batch: CanonicalBatch) -> Tensor:
        """The model's own 3-D positions, (3, B, L), remembered per row layout.

        Passing them keeps the shared model free of state between calls (`rope_deltas`) and saves a
        Python loop over the tokens of every row in every forward.
        """
        columns = []
        first = 0
        per_image = self.canonicalizer.image.tokens_per_image
        for ids, mask, is_image in zip(
            batch.input_ids, batch.attention_mask, batch.is_image, strict=True
        ):
            num_images = int(np.count_nonzero(is_image)) // per_image
            # Positions depend on where padding ends and images stand, not on the words.
            key = (is_image.tobytes(), int(mask.argmax()))
            found = self._positions.get(key)
            if found is None:
                if len(self._positions) >= 4096:
                    self._positions.clear()
                found = self._positions[key] = self._core.get_rope_index(
                    torch.from_numpy(ids)[None],
                    mm_token_type_ids=torch.from_numpy(is_image.astype(np.int64))[None],
                    image_grid_thw=torch.from_numpy(batch.grid_thw[first : first + num_images]),
                    attention_mask=torch.from_numpy(mask)[None],
                )[0]
            columns.append(found)
            first += num_images
        return torch.cat(columns, dim=1).to(self.device)


def digest_of(module: nn.Module) -> str:
    """SHA-256 over name, type, shape and bytes of every parameter and buffer, in name order."""
    digest = hashlib.sha256()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class LinearPatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as the matrix product that it is.

    On CPU the convolution's kernels took 40 % of the image tower's time, the product a tenth of
    that. Wraps the convolution, so parameters and state stay the model's own.
    """

    def __init__(self, projection: nn.Conv3d) -> None:
        super().__init__()
        self.proj = projection

    def forward(self, patches: Tensor) -> Tensor:
        weight = self.proj.weight
        flat = patches.view(-1, weight[0].numel()).to(weight.dtype)
        return nn.functional.linear(flat, weight.flatten(1), self.proj.bias)


def use_linear_patch_embedding(model: Any) -> None:
    """Swap the image tower's patch embedding; names of parameters do not change."""
    embedding = model.model.visual.patch_embed
    model.model.visual.patch_embed = LinearPatchEmbedding(embedding.proj)


def _image_processor(source: str) -> Any:
    kind: Any = transformers.AutoImageProcessor
    return kind.from_pretrained(source, **_NO_CODE)


def _random_model(source: str, dtype: torch.dtype, attention: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(source, **_NO_CODE)
    with torch.random.fork_rng():
        torch.manual_seed(TINY_RANDOM_SEED)
        kind: Any = transformers.AutoModelForImageTextToText
        return kind.from_config(config, dtype=dtype, attn_implementation=attention)


def _add_query_token(tokenizer: Any, model: Any) -> None:
    """Qwen's own tokenizer splits or merges the query; as an added token it stays one."""
    if len(tokenizer.encode(QUERY_TOKEN * 2, add_special_tokens=False)) == 2:
        return
    tokenizer.add_tokens([QUERY_TOKEN])
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ModuleLoadError("the base model has no free embedding row for the action query token")
