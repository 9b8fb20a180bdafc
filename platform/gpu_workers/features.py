"""Rows of all tenants in, features per row out: the one path for training and inference.

Rows are grouped by their own padded length; each group is one backbone forward whatever tenants
its rows belong to. Equal rows of one call are encoded once, rows seen before come from the cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from vla_platform.gpu_workers.backbone import Backbone, FeatureKind
from vla_platform.gpu_workers.canonical import LENGTH_BUCKET, Layout, Row
from vla_platform.gpu_workers.feature_cache import FeatureCache, row_key

MAX_ROWS = {"cpu": 32}
"""Rows of one forward at most. On a CPU the cost of a row stops falling there (measured)."""
MAX_ROWS_ELSEWHERE = 256


@dataclass(frozen=True)
class VLAFeature:
    """Features of B rows of one tenant.

    values  (B, T, D) for `queries`; (B, L, D), (B, N, L, D), (B, N, 2, heads, L, d) for the others.
    mask    (B, L), true at the row's own tokens; none for `queries`.
    """

    kind: FeatureKind
    values: Tensor
    mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def at(self, index: Tensor) -> VLAFeature:
        """The rows of `index`, (N,)."""
        mask = None if self.mask is None else self.mask[index]
        return VLAFeature(self.kind, self.values[index], mask)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, without padding."""
        if self.mask is None:
            return [self.values.shape[-2]] * len(self.values)
        found: list[int] = self.mask.sum(dim=1).tolist()
        return found

    def trimmed(self) -> VLAFeature:
        """Without the padding that all rows have in front, in steps of `LENGTH_BUCKET`."""
        if self.mask is None or not len(self.values):
            return self
        longest = -(-max(self.lengths) // LENGTH_BUCKET) * LENGTH_BUCKET
        if longest >= self.mask.shape[1]:
            return self
        return VLAFeature(self.kind, self.values[..., -longest:, :], self.mask[:, -longest:])

    def rows(self, start: int, stop: int) -> VLAFeature:
        mask = None if self.mask is None else self.mask[start:stop]
        return VLAFeature(self.kind, self.values[start:stop], mask)


@dataclass(frozen=True)
class Encoded:
    """Features of one call, in the order of its rows, and what they cost."""

    features: list[Tensor]
    hit: list[bool]
    num_forwards: int
    forward_ms: float


class FeatureEncoder:
    """Encodes rows with a shared backbone; counts forwards and encoded rows. Not thread-safe."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        cache: FeatureCache | None = None,
        max_rows: int | None = None,
        share_length: bool = False,
    ) -> None:
        """`share_length` pads the rows of one call to the longest of them: fewer forwards, equal
        to each row's own length within 1e-5 in float32, not bit by bit."""
        self.backbone = backbone
        self.cache = cache
        self.max_rows = max_rows or MAX_ROWS.get(backbone.device.type, MAX_ROWS_ELSEWHERE)
        self.share_length = share_length
        self.num_forwards = 0
        self.num_rows_encoded = 0
        self._base = f"{backbone.digest} {backbone.preprocessing_digest}".encode()

    def encode(self, rows: Sequence[Row], kinds: Sequence[FeatureKind]) -> Encoded:
        """One feature per row, without padding: see `FeatureKind` for shapes."""
        started = time.perf_counter()
        forwards = self.num_forwards
        features: list[Tensor | None] = [None] * len(rows)
        pending: dict[int, list[tuple[int, Layout]]] = {}
        keys: list[bytes] = []
        copies: list[tuple[int, int]] = []
        if self.cache is not None:
            keys = [row_key(row, kind, self._base) for row, kind in zip(rows, kinds, strict=True)]
            first_of = {key: at for at, key in reversed(list(enumerate(keys)))}
            sources = [first_of[key] for key in keys]
        else:
            sources = equal_rows(rows, kinds)
        for at, (row, source) in enumerate(zip(rows, sources, strict=True)):
            if source != at:
                copies.append((at, source))
                continue
            if self.cache is not None:
                features[at] = self.cache.get(keys[at])
                if features[at] is not None:
                    continue
            layout = self.backbone.canonicalizer.layout(
                row.prompt, num_images=len(row.images), num_queries=row.num_queries
            )
            pending.setdefault(layout.padded_length, []).append((at, layout))
        hit = [feature is not None for feature in features]
        if self.share_length and pending:
            pending = {max(pending): sorted(m for part in pending.values() for m in part)}
        for length in sorted(pending):
            members = pending[length]
            for start in range(0, len(members), self.max_rows):
                part = members[start : start + self.max_rows]
                encoded = self._forward(rows, kinds, part, length)
                for (at, _), feature in zip(part, encoded, strict=True):
                    features[at] = feature
                    if self.cache is not None:
                        self.cache.put(keys[at], feature)
        for at, source in copies:
            features[at], hit[at] = features[source], True
        return Encoded(
            features=[feature for feature in features if feature is not None],
            hit=hit,
            num_forwards=self.num_forwards - forwards,
            forward_ms=(time.perf_counter() - started) * 1e3,
        )

    def _forward(
        self,
        rows: Sequence[Row],
        kinds: Sequence[FeatureKind],
        part: list[tuple[int, Layout]],
        length: int,
    ) -> list[Tensor]:
        batch = self.backbone.canonicalizer.batch(
            [rows[at] for at, _ in part], [layout for _, layout in part], length=length
        )
        found = self.backbone.forward(batch, frozenset(kinds[at] for at, _ in part))
        self.num_forwards += 1
        self.num_rows_encoded += len(part)
        return [
            _row_feature(found, index, kinds[at], layout, length)
            for index, (at, layout) in enumerate(part)
        ]


def equal_rows(rows: Sequence[Row], kinds: Sequence[FeatureKind]) -> list[int]:
    """For each row the place of the first that equals it, often its own.

    The sessions of a group start alike, so most of their first rows are encoded for nothing.
    """
    sources = list(range(len(rows)))
    if len(rows) < 2:
        return sources
    found: dict[object, list[int]] = {}
    for at, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        # A fast digest finds candidates; whoever makes two of them meet gains nothing.
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(row.images).data)
        candidates = found.setdefault((kind, row.prompt, row.num_queries, digest), [])
        for one in candidates:
            if np.array_equal(rows[one].images, row.images):
                sources[at] = one
                break
        else:
            candidates.append(at)
    return sources


def _row_feature(
    found: dict[FeatureKind, Tensor], index: int, kind: FeatureKind, layout: Layout, length: int
) -> Tensor:
    padding = length - layout.length
    if kind is FeatureKind.QUERIES:
        places = [padding + position for position in layout.query_positions]
        return found[FeatureKind.HIDDEN][index, places]
    row = found[kind][index]
    return row[..., padding:, :].clone()


def stack_features(features: Sequence[Tensor], kind: FeatureKind) -> VLAFeature:
    """Rows of one tenant as one feature, padded on the left to a multiple of `LENGTH_BUCKET`."""
    if kind is FeatureKind.QUERIES:
        return VLAFeature(kind, torch.stack(list(features)))
    lengths = [feature.shape[-2] for feature in features]
    longest = -(-max(lengths) // LENGTH_BUCKET) * LENGTH_BUCKET
    shape = features[0].shape
    values = features[0].new_zeros((len(features), *shape[:-2], longest, shape[-1]))
    mask = torch.zeros((len(features), longest), dtype=torch.bool, device=values.device)
    for at, (feature, length) in enumerate(zip(features, lengths, strict=True)):
        values[at, ..., longest - length :, :] = feature
        mask[at, longest - length :] = True
    return VLAFeature(kind, values, mask)
