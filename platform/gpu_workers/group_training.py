"""One update each of a group of policies, on one encoding of all their rows.

Ranks tell each other what became of their rows before anything is computed from them, so an item
that is bad on one is left out on all; who fails later gives the step up for all (`gradients`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vla_platform.errors import PlatformError, RankFailedError, UnsoundWorkerError
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.device import DeviceCheck
from vla_platform.gpu_workers.features import Encoded, FeatureEncoder, stack_features
from vla_platform.gpu_workers.ranks.base import Ranks
from vla_platform.gpu_workers.ranks.share import OwnRows
from vla_platform.gpu_workers.ranks.telling import GroupHeard, GroupTold, ItemTold
from vla_platform.gpu_workers.samples import check_columns, rows_of, samples_of
from vla_platform.gpu_workers.slots import Slot
from vla_platform.gpu_workers.training_items import TrainItem, TrainResult
from vla_storage.errors import CodedError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """An item whose data are in order, and what the backbone reads of it."""

    slot: Slot
    item: TrainItem
    rows: list[Row]


class GroupTraining:
    """`slot_of` finds a mounted policy's slot; `between` runs between two updates."""

    def __init__(
        self,
        encoder: FeatureEncoder,
        *,
        ranks: Ranks,
        slot_of: Callable[[str], Slot],
        between: Callable[[], None],
        check_device: DeviceCheck,
    ) -> None:
        self._encoder = encoder
        self._ranks = ranks
        self._slot_of = slot_of
        self._between = between
        self._check_device = check_device

    def train(self, items: Sequence[TrainItem]) -> list[TrainResult | CodedError]:
        """One update per item, in order; the items and their order are the same on all ranks."""
        found: list[Prepared | CodedError] = []
        for item in items:
            try:
                found.append(self.prepare(item))
            except CodedError as error:
                found.append(error)
        encoded, broken = Encoded([], [], 0, 0.0), None
        try:
            encoded = self.encode([one for one in found if isinstance(one, Prepared)])
        except RuntimeError as error:
            broken = error
        told = self._ranks.exchange(self._tell(found, encoded, failed=broken is not None))
        heard = GroupHeard(told, rank=self._ranks.rank)
        if heard.failed:
            return self._one_by_one(items, broken)
        outcomes: list[TrainResult | CodedError] = []
        features = iter(encoded.features)
        for at, one in enumerate(found):
            if isinstance(one, CodedError):
                outcomes.append(one)
                continue
            own = list(itertools.islice(features, len(one.rows)))
            if (wrong := heard.error(at)) is not None:
                outcomes.append(wrong)
                continue
            self._between()
            outcomes.append(self._update_alone(one, own, heard, at))
        return outcomes

    def _tell(
        self, found: Sequence[Prepared | CodedError], encoded: Encoded, *, failed: bool
    ) -> GroupTold:
        """This rank's part of a group, as all ranks are told of it."""
        hit = iter(encoded.hit)
        return GroupTold(
            items=tuple(
                one
                if isinstance(one, CodedError)
                else ItemTold(self._own_rows(one.item), sum(itertools.islice(hit, len(one.rows))))
                for one in found
            ),
            failed=failed,
            num_forwards=encoded.num_forwards,
            forward_ms=encoded.forward_ms,
            misses=len(encoded.hit) - sum(encoded.hit),
        )

    def _own_rows(self, item: TrainItem) -> OwnRows:
        rows = item.rows_of(self._ranks.rank)
        if not rows:
            return OwnRows()
        valid = (~np.asarray(item.columns["actions_is_pad"], np.bool_)).sum(axis=1).tolist()
        return OwnRows(rows=tuple(rows), valid=tuple(valid), lengths=(0,) * len(valid))

    def _one_by_one(
        self, items: Sequence[TrainItem], error: RuntimeError | None
    ) -> list[TrainResult | CodedError]:
        """The shared forward failed, for want of memory most likely: whose rows it was shows
        alone. Without `error` it was another rank's."""
        if error is not None:
            self._check_device(error)
        if len(items) == 1:
            if error is None:
                return [RankFailedError("another rank could not encode its rows")]
            return [self._failed(items[0], error)]
        if self._encoder.backbone.device.type == "cuda":
            torch.cuda.empty_cache()  # what the group took in vain
        _log.warning("action=group_failed size=%d reason=%r", len(items), error)
        return [self.train([item])[0] for item in items]

    def _update_alone(
        self, one: Prepared, features: list[torch.Tensor], heard: GroupHeard, at: int
    ) -> TrainResult | CodedError:
        """One item's update; its error is its own."""
        try:
            return self._update(one, features, heard, at)
        except UnsoundWorkerError:
            raise
        except CodedError as error:
            return error
        except (RuntimeError, ValueError) as error:
            return self._failed(one.item, error)

    def _failed(self, item: TrainItem, error: RuntimeError | ValueError) -> PlatformError:
        self._check_device(error)
        if self._encoder.backbone.device.type == "cuda":
            torch.cuda.empty_cache()
        return PlatformError(
            f"the update of {item.policy_key} failed: {error}", policy_key=item.policy_key
        )

    def prepare(self, item: TrainItem) -> Prepared:
        """Check what this rank has of an item. Raises what is wrong with it."""
        slot = self._slot_of(item.policy_key)
        if item.problem is not None:
            raise item.problem
        if not item.is_here(self._ranks.rank):
            return Prepared(slot, item, [])
        check_columns(item.columns, slot.config.schema)
        rows = rows_of(item.columns, slot.module)
        for row in rows:  # a prompt that cannot be laid out is this tenant's error
            self._encoder.backbone.canonicalizer.layout(
                row.prompt, num_images=len(row.images), num_queries=row.num_queries
            )
        return Prepared(slot, item, rows)

    def encode(self, prepared: Sequence[Prepared]) -> Encoded:
        """All their rows in one go, in order."""
        rows = [row for one in prepared for row in one.rows]
        kinds = [one.slot.module.feature_kind for one in prepared for _ in one.rows]
        return self._encoder.encode(rows, kinds)

    def _update(
        self, one: Prepared, features: list[torch.Tensor], heard: GroupHeard, at: int
    ) -> TrainResult:
        slot, share = one.slot, heard.share(at)
        begun = time.perf_counter()
        samples = None
        # Where nothing is valid there is no step, and no sum that could be abandoned.
        with slot.abandoned_on_error():
            if one.rows and share.num_valid:
                feature = stack_features(features, slot.module.feature_kind)
                samples = samples_of(one.item.columns, feature, slot.config.schema)
        update = slot.update(samples, num_microbatches=one.item.num_microbatches, share=share)
        hits = heard.hits(at)
        misses = share.num_rows - hits
        own_s = self._ranks.num_ranks * (time.perf_counter() - begun)
        return TrainResult(
            policy_key=one.item.policy_key,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=update.lr,
            step=update.step,
            policy_version=slot.policy_version,
            samples=share.num_rows,
            skipped=update.skipped,
            forward_ms=heard.forward_ms,
            backbone_forwards=heard.num_forwards,
            group_size=heard.size,
            cache_hits=hits,
            cache_misses=misses,
            cost_s=own_s + misses / max(1, heard.misses) * heard.forward_s,
        )
