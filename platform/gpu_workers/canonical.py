"""From a tenant's row (images, prompt, queries) to the one token layout that the backbone reads.

A row becomes `<|im_start|>user\\n` + per image `<|vision_start|>` + k x `<|image_pad|>` +
`<|vision_end|>` + text + `<|im_end|>\\n<|im_start|>assistant\\n`, as in Qwen's chat template. For
OFT modules the text carries StarVLA's suffix with one query token per action, so the chunk length
belongs to the row.

A row's padded length is its own length rounded up to `LENGTH_BUCKET`, never its neighbours' length:
padding enters the matrix shapes of attention, and only equal shapes give bit-equal results.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError, ModuleLoadError

QUERY_TOKEN = "\N{LEFT-POINTING MAGNIFYING GLASS}"
"""StarVLA's action query. It must be an added token: a trained BPE would merge neighbours."""
LENGTH_BUCKET = 32
MAX_CACHED_LAYOUTS = 4096
MAX_LENGTH = 2048
"""Tokens of a row: one tenant's endless prompt must not fill the memory that all share."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One sample on its way to the backbone.

    images  uint8, shape (C, P, P, 3): cameras in the schema's order, already resized.
    prompt  the task text, with the state's bins where the module wants them in the prompt.
    num_queries  action query tokens appended to the prompt (H for OFT, 0 for the others).
    """

    images: npt.NDArray[np.uint8]
    prompt: str
    num_queries: int = 0


@dataclass(frozen=True)
class Layout:
    """The tokens of a row, before padding. Equal for all rows of one prompt and camera count."""

    input_ids: IntArray
    is_image: npt.NDArray[np.bool_]
    query_positions: tuple[int, ...]
    padded_length: int

    @property
    def length(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class ImageFormat:
    """Qwen's flat patches: `patch` x `patch` pixels, `merge` x `merge` patches per token."""

    size: int
    patch: int = 16
    merge: int = 2
    temporal: int = 2
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.size % (self.patch * self.merge):
            raise ModuleLoadError(
                f"image size {self.size} is not a multiple of {self.patch * self.merge}",
                image_size=self.size,
            )

    @property
    def grid(self) -> int:
        return self.size // self.patch

    @property
    def tokens_per_image(self) -> int:
        return (self.grid // self.merge) ** 2

    def patches(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Images (N, P, P, 3) as patches (N * grid^2, 3 * temporal * patch^2).

        Equal, bit by bit, to what transformers' `Qwen2VLImageProcessorPil` makes of them: the
        value of a pixel depends on its byte and channel alone, so a table of 256 entries per
        channel, filled in the processor's own order of operations, replaces the arithmetic.
        """
        num, height, width, channels = images.shape
        if (height, width, channels) != (self.size, self.size, 3):
            raise ValueError(
                f"expected images (N, {self.size}, {self.size}, 3), got {images.shape}"
            )
        grid, merge, patch = self.grid, self.merge, self.patch
        side = grid // merge
        cells = images.reshape(num, side, merge, patch, side, merge, patch, 3)
        # (N, gh, gw, mh, mw, C, ph, pw)
        ordered = cells.transpose(0, 1, 4, 2, 5, 7, 3, 6)
        table = _pixel_table(self.mean, self.std)
        values = np.empty(
            (num, side, side, merge, merge, 3, self.temporal, patch, patch), np.float32
        )
        for channel in range(3):
            values[:, :, :, :, :, channel] = table[channel][ordered[:, :, :, :, :, channel]][
                :, :, :, :, :, None
            ]
        return values.reshape(num * grid * grid, -1)


@functools.lru_cache(maxsize=16)
def _pixel_table(mean: tuple[float, ...], std: tuple[float, ...]) -> npt.NDArray[np.float32]:
    """Shape (3, 256): rescale by 1/255 in double, round to single, then normalise in single."""
    rescaled = (np.arange(256, dtype=np.uint8).astype(np.float64) * (1 / 255)).astype(np.float32)
    means = np.asarray(mean, np.float32)[:, None]
    stds = np.asarray(std, np.float32)[:, None]
    return (rescaled[None, :] - means) / stds


@dataclass(frozen=True)
class CanonicalBatch:
    """Rows of one padded length. Shapes: `input_ids`, `attention_mask`, `is_image` (B, L)."""

    input_ids: IntArray
    attention_mask: IntArray
    is_image: npt.NDArray[np.bool_]
    patches: npt.NDArray[np.float32]
    grid_thw: IntArray

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)


@dataclass
class Canonicalizer:
    """Builds layouts (cached per prompt, camera count and query count) and batches of them."""

    tokenizer: Any
    image: ImageFormat
    _layouts: dict[tuple[str, int, int], Layout] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        token = self._special
        self.pad_id = token("<|endoftext|>")
        self.image_id = token("<|image_pad|>")
        self.query_id = token(QUERY_TOKEN)
        self._before = [token("<|im_start|>"), *self._ids("user\n")]
        self._image = [
            token("<|vision_start|>"),
            *[self.image_id] * self.image.tokens_per_image,
            token("<|vision_end|>"),
        ]
        self._after = [
            token("<|im_end|>"),
            *self._ids("\n"),
            token("<|im_start|>"),
            *self._ids("assistant\n"),
        ]

    def _special(self, text: str) -> int:
        ids = self._ids(text)
        if len(ids) != 1:
            raise ModuleLoadError(f"the tokenizer splits {text!r} into {len(ids)} tokens")
        return ids[0]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def layout(self, prompt: str, *, num_images: int, num_queries: int) -> Layout:
        """Tokens of one row. Special tokens inside the prompt are a tenant's text, not markup."""
        key = (prompt, num_images, num_queries)
        found = self._layouts.get(key)
        if found is None:
            with self._lock:  # tokenizers refuse a second thread while one encodes
                if len(self._layouts) >= MAX_CACHED_LAYOUTS:
                    self._layouts.clear()
                found = self._layouts[key] = self._build(prompt, num_images, num_queries)
        return found

    def _build(self, prompt: str, num_images: int, num_queries: int) -> Layout:
        text = self._ids(query_prompt(_plain(prompt), num_queries))
        ids = [*self._before, *self._image * num_images, *text, *self._after]
        if len(ids) > MAX_LENGTH:
            raise DataError(
                f"a row has {len(ids)} tokens; at most {MAX_LENGTH} are taken", column="prompt"
            )
        queries = [at for at, token in enumerate(ids) if token == self.query_id]
        if len(queries) != num_queries:
            raise ModuleLoadError(
                f"the prompt holds {len(queries)} query tokens instead of {num_queries}"
            )
        array = np.asarray(ids, np.int64)
        return Layout(
            input_ids=array,
            is_image=array == self.image_id,
            query_positions=tuple(queries),
            padded_length=-(-len(ids) // LENGTH_BUCKET) * LENGTH_BUCKET,
        )

    def batch(self, rows: list[Row], layouts: list[Layout], *, length: int) -> CanonicalBatch:
        """Rows padded on the left to `length`; images of all rows in row order."""
        ids = np.full((len(rows), length), self.pad_id, np.int64)
        mask = np.zeros((len(rows), length), np.int64)
        for at, layout in enumerate(layouts):
            ids[at, length - layout.length :] = layout.input_ids
            mask[at, length - layout.length :] = 1
        images = np.concatenate([row.images for row in rows])
        grid = np.asarray([[1, self.image.grid, self.image.grid]], np.int64)
        return CanonicalBatch(
            input_ids=ids,
            attention_mask=mask,
            is_image=ids == self.image_id,
            patches=self.image.patches(images),
            grid_thw=np.repeat(grid, len(images), axis=0),
        )


def query_prompt(prompt: str, num_queries: int) -> str:
    """StarVLA's QwenOFT suffix: one query token per action of the chunk."""
    if num_queries == 0:
        return prompt
    queries = QUERY_TOKEN * num_queries
    return (
        f"{prompt} Please predict the next {num_queries} robot actions: <action>{queries}<action>."
    )


def state_prompt(prompt: str, bins: npt.NDArray[np.int64]) -> str:
    """StarVLA's proprioception as text: `{prompt} [STATE] {bins} [ACTION]`."""
    return f"{prompt} [STATE] {' '.join(map(str, bins.tolist()))} [ACTION]"


def _plain(prompt: str) -> str:
    """A prompt cannot smuggle in image or chat tokens: their brackets lose the bar."""
    return prompt.replace("<|", "< |").replace(QUERY_TOKEN, "?")
