"""The Training Model Service: mounted policies, trained one by one or as a group.

A group shares one encoding of all its rows by the frozen backbone; losses, gradients, optimizers
and versions stay private. On CPU in float32 each policy ends with the same bits as if it had been
alone (see `backbone` for why), and one policy's bad data or divergence touches nobody else.
The service knows no queue, store or thread; one thread at a time may call it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vla_platform.errors import (
    DeviceLostError,
    ModuleLoadError,
    NotFoundError,
    PlatformError,
    UnsoundWorkerError,
)
from vla_platform.gpu_workers.algorithms.minibatches import MAX_TOKENS
from vla_platform.gpu_workers.algorithms.policy_gradient import PolicyUpdate
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.device import is_alive
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.features import Encoded, FeatureEncoder, stack_features
from vla_platform.gpu_workers.rollout_samples import encode_rows, policy_samples, weighted_samples
from vla_platform.gpu_workers.samples import (
    Columns,
    check_columns,
    reads_state,
    rows_of,
    samples_of,
)
from vla_platform.gpu_workers.slots import Arrays, MixedPrecision, Slot, SlotConfig, SlotState
from vla_platform.specs import AWRSpec
from vla_storage.errors import CodedError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainItem:
    """One training job's data: the columns of a `Batch`, for one mounted policy."""

    policy_key: str
    columns: Columns
    num_microbatches: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    policy_key: str
    loss: float
    grad_norm: float
    lr: float
    step: int  # updates of the policy so far
    policy_version: int
    samples: int
    skipped: bool  # every action step was padding
    forward_ms: float  # encoding of the whole group
    backbone_forwards: int  # of the whole group
    group_size: int  # jobs that shared the encoding
    cache_hits: int  # rows of this job
    cache_misses: int
    cost_s: float  # own update, and a share of the encoding by rows that were not cached


@dataclass(frozen=True, kw_only=True)
class PolicyResult(PolicyUpdate):
    """An RL update; see `PolicyUpdate`."""

    policy_key: str
    policy_version: int
    backbone_forwards: int  # 0 where the rollout's features were kept
    cost_s: float


@dataclass(frozen=True)
class _Prepared:
    """An item whose data are in order, and where its rows are in the group."""

    slot: Slot
    item: TrainItem
    rows: list[Row]


class TrainingModelService:
    """Trains policies on one resident backbone."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        cache: FeatureCache | None = None,
        mixed_precision: MixedPrecision = "no",
        max_tokens: int = MAX_TOKENS,
        between: Callable[[], None] = lambda: None,
        is_alive: Callable[[torch.device], bool] = is_alive,
    ) -> None:
        """`cache=None` encodes every row every time; `max_tokens` bounds one pass of a module in an
        RL update; `between` runs between two updates."""
        self.backbone = backbone
        self.encoder = FeatureEncoder(backbone, cache=cache)
        self.mixed_precision: MixedPrecision = mixed_precision
        self._max_tokens = max_tokens
        self._between = between
        self._is_alive = is_alive
        self._slots: dict[str, Slot] = {}

    def mount(
        self,
        config: SlotConfig,
        *,
        state: SlotState | None = None,
        params: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Slot:
        """Give a policy a slot: fresh from its seed, continued from `state`, or from `params` only.

        Mounting a mounted policy replaces its slot. Raises `ModuleLoadError` where schema, base
        model, state or payload do not fit, and leaves what was mounted.
        """
        slot = self.build(config, state=state, params=params)
        self._slots[config.policy_key] = slot
        return slot

    def build(
        self,
        config: SlotConfig,
        *,
        state: SlotState | None = None,
        params: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Slot:
        """A slot that is not mounted."""
        found = config.schema.base_digest
        if found != self.backbone.digest:
            raise ModuleLoadError(
                f"the schema was made for base model {found[:12]}, "
                f"this worker has {self.backbone.digest[:12]}",
                policy_key=config.policy_key,
            )
        slot = Slot(
            config,
            feature_dim=self.backbone.hidden_dim,
            device=self.backbone.device,
            mixed_precision=self.mixed_precision,
        )
        if params is not None:
            slot.load_params(params)
        if state is not None:
            slot.restore(state)
        return slot

    def unmount(self, policy_key: str) -> None:
        """Forget a policy's slot, if there is one."""
        self._slots.pop(policy_key, None)

    def slot(self, policy_key: str) -> Slot:
        try:
            return self._slots[policy_key]
        except KeyError:
            raise NotFoundError(f"{policy_key} is not mounted", policy_key=policy_key) from None

    @property
    def mounted(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def train_group(self, items: Sequence[TrainItem]) -> list[TrainResult | CodedError]:
        """One update per item, in order; an item that fails gets its error and changes nothing."""
        outcomes: list[TrainResult | CodedError | None] = [None] * len(items)
        prepared: dict[int, _Prepared] = {}
        for at, item in enumerate(items):
            try:
                prepared[at] = self._prepare(item)
            except CodedError as error:
                outcomes[at] = error
        try:
            encoded = self._encode([one for one in prepared.values()])
        except RuntimeError as error:
            return self._one_by_one(items, error)
        first = 0
        for at, one in prepared.items():
            stop = first + len(one.rows)
            self._between()
            try:
                outcomes[at] = self._update(one, encoded, first, stop, len(prepared))
            except UnsoundWorkerError:
                raise
            except CodedError as error:
                outcomes[at] = error
            except (RuntimeError, ValueError) as error:
                outcomes[at] = self._failed(one.item, error)
            first = stop
        return [outcome for outcome in outcomes if outcome is not None]

    def _one_by_one(
        self, items: Sequence[TrainItem], error: RuntimeError
    ) -> list[TrainResult | CodedError]:
        """The shared forward failed, for want of memory most likely: whose rows it was shows
        alone."""
        failed = self._failed(items[0], error)
        if len(items) == 1:
            return [failed]
        _log.warning("action=group_failed size=%d reason=%r", len(items), error)
        return [self.train_group([item])[0] for item in items]

    def _failed(self, item: TrainItem, error: RuntimeError | ValueError) -> PlatformError:
        self.check_device(error)
        if self.backbone.device.type == "cuda":
            torch.cuda.empty_cache()
        return PlatformError(
            f"the update of {item.policy_key} failed: {error}", policy_key=item.policy_key
        )

    def check_device(self, error: Exception) -> None:
        """Raise `DeviceLostError` where `error` is nobody's fault, for the device is broken."""
        if not self._is_alive(self.backbone.device):
            raise DeviceLostError(f"the device is lost: {error}") from error

    def train_policy(self, policy_key: str, columns: Mapping[str, Any]) -> PolicyResult:
        """One RL update of one policy on the columns of a rollout with advantages.

        Raises `DataError`, `DivergedError`: the policy's slot is then to be forgotten.
        """
        slot = self.slot(policy_key)
        begun = time.perf_counter()
        weighted = isinstance(slot.config.algorithm, AWRSpec)
        read = weighted_samples if weighted else policy_samples
        samples, num_forwards = read(columns, slot.module, self.encoder)
        update = slot.update_policy(samples, max_tokens=self._max_tokens)
        return PolicyResult(
            policy_key=policy_key,
            policy_version=slot.policy_version,
            backbone_forwards=num_forwards,
            cost_s=time.perf_counter() - begun,
            **asdict(update),
        )

    @torch.no_grad()
    def actor_forward(self, slot: Slot, columns: Mapping[str, Any]) -> Arrays:
        """What an actor says of a rollout: `actor_value` (R,), and of drawn actions
        `actor_log_prob` (R, H).

        Rows without a feature ended an episode for good: their value is 0.
        """
        module = slot.module.eval()
        num_rows = len(columns["is_transition"])
        rows = np.arange(num_rows)
        if "feature" in columns:
            rows = np.flatnonzero([len(feature) > 0 for feature in columns["feature"]])
        features, _ = encode_rows(columns, module, self.encoder, rows)
        device = self.backbone.device
        state = None
        if reads_state(module.schema):
            chosen = np.asarray(columns["state"])[rows]
            state = torch.tensor(chosen, dtype=torch.float32, device=device)
        feature = stack_features(features, module.feature_kind)
        value = np.zeros(num_rows, np.float32)
        found: Arrays = {"actor_value": value}
        if "latent" in columns:
            latent = torch.tensor(
                np.asarray(columns["latent"])[rows], dtype=torch.float32, device=device
            )
            judged = module.evaluate(feature, state, latent)
            log_prob = np.zeros((num_rows, slot.config.schema.chunk), np.float32)
            log_prob[rows], value[rows] = judged.log_prob.cpu().numpy(), judged.value.cpu().numpy()
            found["actor_log_prob"] = log_prob
        else:
            value[rows] = module.value(feature, state).cpu().numpy()
        # Termination has no future, whatever the value head makes of what was seen last.
        ended = np.asarray(columns["next_row"])[np.asarray(columns["terminated"], np.bool_)]
        value[ended] = 0.0
        return found

    def train_batch(
        self, policy_key: str, columns: Columns, *, num_microbatches: int = 1
    ) -> TrainResult:
        """One update of one policy. Raises what went wrong."""
        outcome = self.train_group([TrainItem(policy_key, columns, num_microbatches)])[0]
        if isinstance(outcome, CodedError):
            raise outcome
        return outcome

    def heldout_loss(self, policy_key: str, columns: Columns) -> float:
        """Loss on held-out rows; no update, and the same noise at every call."""
        one = self._prepare(TrainItem(policy_key, columns))
        encoded = self._encode([one])
        feature = stack_features(encoded.features, one.slot.module.feature_kind)
        schema = one.slot.config.schema
        return one.slot.heldout_loss(samples_of(columns, feature, schema))

    def export_params(self, policy_key: str) -> Arrays:
        """The policy's payload: module tensors with statistics, copied."""
        return self.slot(policy_key).export_params()

    def save(self, policy_key: str) -> SlotState:
        """All that a fresh slot needs to continue bit by bit, copied."""
        return self.slot(policy_key).state()

    def _prepare(self, item: TrainItem) -> _Prepared:
        slot = self.slot(item.policy_key)
        check_columns(item.columns, slot.config.schema)
        rows = rows_of(item.columns, slot.module)
        for row in rows:  # a prompt that cannot be laid out is this tenant's error
            self.backbone.canonicalizer.layout(
                row.prompt, num_images=len(row.images), num_queries=row.num_queries
            )
        return _Prepared(slot, item, rows)

    def _encode(self, prepared: Sequence[_Prepared]) -> Encoded:
        rows = [row for one in prepared for row in one.rows]
        kinds = [one.slot.module.feature_kind for one in prepared for _ in one.rows]
        return self.encoder.encode(rows, kinds)

    def _update(
        self, one: _Prepared, encoded: Encoded, first: int, stop: int, group_size: int
    ) -> TrainResult:
        slot, columns = one.slot, one.item.columns
        begun = time.perf_counter()
        feature = stack_features(encoded.features[first:stop], slot.module.feature_kind)
        samples = samples_of(columns, feature, slot.config.schema)
        update = slot.update(samples, num_microbatches=one.item.num_microbatches)
        hits = sum(encoded.hit[first:stop])
        misses = samples.num_rows - hits
        share = misses / max(1, len(encoded.hit) - sum(encoded.hit))
        return TrainResult(
            policy_key=one.item.policy_key,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=update.lr,
            step=update.step,
            policy_version=slot.policy_version,
            samples=samples.num_rows,
            skipped=update.skipped,
            forward_ms=encoded.forward_ms,
            backbone_forwards=encoded.num_forwards,
            group_size=group_size,
            cache_hits=hits,
            cache_misses=misses,
            cost_s=time.perf_counter() - begun + share * encoded.forward_ms / 1000,
        )


def use_one_thread() -> None:
    """Bit-equality holds for one thread: with more, sums are cut differently."""
    torch.set_num_threads(1)
