"""Task texts as one array of a batch: UTF-8, zero-padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError


def encode_prompts(prompts: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Shape: (B, Lmax), Lmax the longest text in bytes (at least 1). NUL is the padding."""
    texts = [prompt.encode("utf-8") for prompt in prompts]
    for text in texts:
        if b"\0" in text:
            raise DataError("a prompt must not contain NUL", column="prompt")
    encoded = np.zeros((len(texts), max([1, *map(len, texts)])), np.uint8)
    for row, text in zip(encoded, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return encoded


def decode_prompts(encoded: npt.NDArray[np.uint8]) -> list[str]:
    """The inverse of `encode_prompts`. Raises `DataError` for bytes that are not UTF-8."""
    try:
        return [row.tobytes().rstrip(b"\0").decode("utf-8") for row in encoded]
    except UnicodeDecodeError as error:
        raise DataError(f"a prompt is not UTF-8: {error}", column="prompt") from error
