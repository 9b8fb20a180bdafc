"""PF-15, B34: batched features equal single features, whatever the neighbours are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_platform.gpu_workers.backbone import Backbone, FeatureKind
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.feature_cache import FeatureCache, row_key
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features

KINDS = list(FeatureKind)
row_shapes = st.tuples(
    st.integers(1, 3),  # cameras
    st.integers(1, 40),  # words
    st.integers(1, 16),  # chunk
    st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
)


def make_row(cameras: int, words: int, chunk: int, kind: FeatureKind, seed: int) -> Row:
    rng = np.random.default_rng(seed)
    return Row(
        images=rng.integers(0, 256, (cameras, 128, 128, 3), dtype=np.uint8),
        prompt=" ".join(rng.choice(["red", "block", "the", "table", "42"], words)),
        num_queries=chunk if kind is FeatureKind.QUERIES else 0,
    )


@pytest.fixture(scope="module")
def sdpa() -> Backbone:
    return Backbone.load("tiny-random", attn_implementation="sdpa")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(row_shapes, min_size=1, max_size=9))
def test_pf15_grouped_rows_equal_single_rows(
    backbone: Backbone, sdpa: Backbone, attention: str, shapes: list[tuple[int, ...]]
) -> None:
    """Bit-equal with eager attention; 1e-5 is promised for the others."""
    base = backbone if attention == "eager" else sdpa
    rows = [make_row(*shape) for shape in shapes]  # type: ignore[arg-type]
    kinds = [shape[3] for shape in shapes]

    grouped = FeatureEncoder(base).encode(rows, kinds)  # type: ignore[arg-type]

    for row, kind, feature in zip(rows, kinds, grouped.features, strict=True):
        alone = FeatureEncoder(base).encode([row], [kind]).features[0]  # type: ignore[list-item]
        if attention == "eager":
            assert torch.equal(alone, feature)
        else:
            assert float((alone - feature).abs().max()) <= 1e-5


def test_every_group_size_gives_the_same_bits(backbone: Backbone) -> None:
    """The reason: from 16 rows on, the CPU's matrix products sum every row in one order."""
    rows = [make_row(1, 5, 8, FeatureKind.QUERIES, seed) for seed in range(33)]
    kinds = [FeatureKind.QUERIES] * len(rows)
    whole = FeatureEncoder(backbone).encode(rows, kinds).features
    for size in (1, 2, 3, 5, 7, 8, 16, 17, 32):
        part = FeatureEncoder(backbone).encode(rows[:size], kinds[:size]).features
        assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=False)), size


def test_bfloat16_rows_are_bit_equal_too(backbone: Backbone) -> None:
    base = Backbone.load("tiny-random", dtype=torch.bfloat16)
    rows = [make_row(1 + seed % 2, 5, 8, FeatureKind.QUERIES, seed) for seed in range(9)]
    kinds = [FeatureKind.QUERIES] * len(rows)
    grouped = FeatureEncoder(base).encode(rows, kinds).features
    exact = FeatureEncoder(backbone).encode(rows, kinds).features
    for row, feature, reference in zip(rows, grouped, exact, strict=True):
        assert torch.equal(
            feature, FeatureEncoder(base).encode([row], [FeatureKind.QUERIES]).features[0]
        )
        error = (feature.float() - reference).norm() / reference.norm()
        assert float(error) < 5e-2
    # Loaded, not cast: a cast would have rounded the rotary table as well.
    assert base._model.model.language_model.rotary_emb.inv_freq.dtype is torch.float32


def test_rows_of_one_length_share_a_forward(backbone: Backbone) -> None:
    rows = [make_row(1, 3, 8, FeatureKind.QUERIES, seed) for seed in range(4)]
    rows.append(make_row(3, 3, 8, FeatureKind.QUERIES, 9))
    encoded = FeatureEncoder(backbone).encode(rows, [FeatureKind.QUERIES] * 5)
    assert encoded.num_forwards == 2


def test_large_groups_are_cut(backbone: Backbone) -> None:
    rows = [make_row(1, 3, 8, FeatureKind.QUERIES, seed) for seed in range(5)]
    encoded = FeatureEncoder(backbone, max_rows=2).encode(rows, [FeatureKind.QUERIES] * 5)
    assert (encoded.num_forwards, len(encoded.features)) == (3, 5)


def test_cached_features_equal_fresh_ones(backbone: Backbone) -> None:
    rows = [make_row(1, 3, 8, FeatureKind.QUERIES, seed) for seed in range(4)]
    kinds = [FeatureKind.QUERIES, FeatureKind.HIDDEN] * 2
    fresh = FeatureEncoder(backbone).encode(rows, kinds)
    encoder = FeatureEncoder(backbone, cache=FeatureCache())
    encoder.encode(rows[:3], kinds[:3])

    again = encoder.encode(rows, kinds)

    assert again.hit == [True, True, True, False]
    assert again.num_forwards == 1
    assert all(torch.equal(a, b) for a, b in zip(fresh.features, again.features, strict=True))


@pytest.mark.parametrize("cache", [FeatureCache(), None], ids=["cache", "no cache"])
def test_equal_rows_of_a_group_are_encoded_once(
    backbone: Backbone, cache: FeatureCache | None
) -> None:
    row = make_row(1, 3, 8, FeatureKind.QUERIES, 0)
    again = replace(row, images=row.images.copy())
    encoder = FeatureEncoder(backbone, cache=cache)
    encoded = encoder.encode([row, row, again], [FeatureKind.QUERIES] * 3)
    assert (encoder.num_rows_encoded, encoded.hit) == (1, [False, True, True])
    assert torch.equal(encoded.features[0], encoded.features[2])


def test_rows_that_differ_in_one_pixel_word_or_kind_are_all_encoded(backbone: Backbone) -> None:
    row = make_row(1, 3, 8, FeatureKind.QUERIES, 0)
    pixels = row.images.copy()
    pixels[0, -1, -1, -1] ^= 1
    rows = [row, replace(row, images=pixels), replace(row, prompt=row.prompt + " now"), row]
    kinds = [FeatureKind.QUERIES] * 3 + [FeatureKind.HIDDEN]
    encoder = FeatureEncoder(backbone)
    encoded = encoder.encode(rows, kinds)
    assert (encoder.num_rows_encoded, encoded.hit) == (4, [False] * 4)


def test_a_cache_that_is_off_changes_nothing(backbone: Backbone) -> None:
    row = make_row(1, 3, 8, FeatureKind.QUERIES, 0)
    encoder = FeatureEncoder(backbone, cache=FeatureCache(max_bytes=0))
    first = encoder.encode([row, row], [FeatureKind.QUERIES] * 2)
    second = encoder.encode([row], [FeatureKind.QUERIES])
    assert torch.equal(first.features[0], second.features[0])
    assert encoder.num_forwards == 2


def test_the_cache_stays_within_its_bound_and_drops_the_oldest() -> None:
    feature = torch.zeros(1000)
    cache = FeatureCache(max_bytes=3 * (4000 + 512))
    for name in (b"a", b"b", b"c"):
        cache.put(name, feature)
    assert cache.get(b"a") is not None
    cache.put(b"d", feature)
    assert [cache.get(k) is not None for k in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.statistics.size_bytes <= cache.max_bytes
    assert (cache.statistics.num_entries, cache.statistics.evictions) == (3, 1)
    assert (cache.statistics.hits, cache.statistics.misses) == (4, 1)
    cache.put(b"big", torch.zeros(10**6))
    assert cache.get(b"big") is None
    cache.clear()
    assert cache.statistics.size_bytes == 0


def test_the_key_covers_all_that_features_depend_on() -> None:
    row = make_row(2, 3, 8, FeatureKind.QUERIES, 0)
    turned = Row(images=row.images[::-1], prompt=row.prompt, num_queries=8)
    keys = [
        row_key(row, "queries", b"base"),
        row_key(row, "hidden", b"base"),
        row_key(row, "queries", b"other"),
        row_key(turned, "queries", b"base"),
        row_key(Row(row.images, row.prompt + "!", 8), "queries", b"base"),
        row_key(Row(row.images, row.prompt, 7), "queries", b"base"),
        row_key(Row(row.images[:1], row.prompt, 8), "queries", b"base"),
    ]
    assert len(keys) == len(set(keys))


def test_stacked_rows_are_padded_on_the_left_and_masked() -> None:
    rows = [torch.ones(3, 2), torch.full((5, 2), 2.0)]
    feature = stack_features(rows, FeatureKind.HIDDEN)
    assert feature.mask is not None
    assert tuple(feature.values.shape) == (2, 32, 2)
    assert feature.mask.sum(dim=1).tolist() == [3, 5]
    assert torch.equal(feature.values[1, -5:], rows[1])
    assert float(feature.values[~feature.mask].abs().sum()) == 0.0
