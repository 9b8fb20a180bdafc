"""Headers round-trip and refuse what is not theirs; bodies are cut where columns begin."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_storage.errors import PayloadCorruptError
from vla_storage.payloads.columns import Frames, Kind
from vla_storage.payloads.parts import contiguous, cuts, ranges_of
from vla_storage.payloads.segments import Key, Segment, decode, encode
from vla_storage.payloads.writing import pieces, place_blocks, plan

KEY = Key("a", "p1")


@given(st.lists(st.sampled_from([0, 1, 63, 64, 1000, 40_000, 70_000]), min_size=1, max_size=6))
def test_a_body_is_cut_into_parts_that_hold_all_of_it(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    columns = {f"c{n}": rng.integers(0, 255, (2, size), np.uint8) for n, size in enumerate(sizes)}
    placed, size_bytes = place_blocks(plan(columns, None))
    blocks = [new.block for new in placed]
    parts = cuts([(block.offset, block.size_bytes) for block in blocks])

    held: dict[int, bytes] = defaultdict(bytes)
    for number, data in contiguous(pieces(KEY, placed), parts):
        held[number] += data.tobytes()
    assert (parts[0], parts[-1]) == (0, size_bytes)
    assert [len(held[number]) for number in sorted(held)] == list(np.diff(parts))
    whole = b"".join(held[number] for number in sorted(held))
    for block in blocks:
        begin, end = block.offset, block.offset + block.size_bytes
        expected = columns[block.name].tobytes()
        assert whole[begin:end] == expected
        ranges = list(ranges_of(parts, begin, end))
        assert b"".join(held[n][low:high] for n, low, high, _ in ranges) == expected
        if block.size_bytes >= 64 << 10:
            assert len(ranges) == 1  # a large column is one request
            assert block.offset % 64 == 0


def segment_of(key: Key, columns: dict[str, object], rows: list[int]) -> Segment:
    placed, size_bytes = place_blocks(plan(columns, rows))  # type: ignore[arg-type]
    blocks = tuple(
        new.block if new.block.is_pool else replace(new.block, digests="0" * 16 * len(rows))
        for new in placed
    )
    return Segment(
        segment_id="0" * 32, size_bytes=size_bytes, place={"tier": "memory"}, blocks=blocks
    )


@given(st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=8, unique=True))
def test_headers_round_trip(rows: list[int]) -> None:
    count = len(rows)
    columns = {
        "x": np.zeros((count, 3), np.float16),
        "r": [np.zeros((n, 2)) for n in range(count)],
        "f": Frames([[np.full((2, 2, 3), n, np.uint8)] for n in range(count)]),
    }
    before = segment_of(KEY, columns, rows)
    after = decode(KEY, encode(KEY, before))

    assert before.size_bytes == after.size_bytes
    for one, other in zip(before.blocks, after.blocks, strict=True):
        assert list(one.ids) == list(other.ids)
        assert (one.name, one.kind, one.dtype, one.shapes) == (
            other.name, other.kind, other.dtype, other.shapes,
        )  # fmt: skip
        assert list(one.starts) == list(other.starts)
    assert {block.kind for block in after.blocks} == set(Kind)


def test_a_header_is_bound_to_its_owner() -> None:
    header = encode(KEY, segment_of(KEY, {"x": np.zeros(2)}, [0, 1]))
    for other in (Key("a", "p2"), Key("ab", "p1"), Key("b", "p1")):
        with pytest.raises(PayloadCorruptError):
            decode(other, header)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_header_is_refused(at: int, value: int) -> None:
    header = bytearray(encode(KEY, segment_of(KEY, {"x": np.zeros(2)}, [0, 1])))
    at %= len(header)
    if header[at] != value:
        header[at] = value
        with pytest.raises(PayloadCorruptError):
            decode(KEY, bytes(header))
    assert decode(KEY, encode(KEY, segment_of(KEY, {"x": np.zeros(2)}, [0, 1]))).blocks


def test_equal_bytes_of_two_tenants_have_different_digests() -> None:
    raw = np.zeros(8, np.uint8)
    found = {key.cell_digests(raw, [0, 8]) for key in (KEY, Key("b", "p1"), Key("a", "p2"))}
    assert len(found) == 3
