"""Prompts as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.datasets.prompts import decode_prompts, encode_prompts
from vla_platform.errors import DataError

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_round_trip(prompts: list[str]) -> None:
    encoded = encode_prompts(prompts)
    assert (len(prompts), max(1, *(len(p.encode()) for p in prompts), 1)) == encoded.shape
    assert prompts == decode_prompts(encoded)


def test_nul_and_broken_bytes_are_refused() -> None:
    with pytest.raises(DataError, match="NUL"):
        encode_prompts(["a\0b"])
    with pytest.raises(DataError, match="UTF-8"):
        decode_prompts(np.array([[0xFF, 0xFE]], np.uint8))
