"""The Training Model Service: mounted policies, trained one by one or as a group.

A group shares one encoding of all its rows by the frozen backbone; losses, gradients, optimizers
and versions stay private. On CPU in float32 each policy ends with the same bits as if it had been
alone (see `backbone` for why), and one policy's bad data or divergence touches nobody else.
The service knows no queue, store or thread; one thread at a time may call it.

With several ranks each has a service, and rank 0's leads: what changes a slot is done on all, each
with its own rows of every item. They tell each other what became of these rows before anything is
computed from them, so an item that is bad on one rank is left out on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from vla_platform.errors import (
    ModuleLoadError,
    NotFoundError,
    PlatformError,
    RankLostError,
    UnsoundWorkerError,
)
from vla_platform.gpu_workers.algorithms.minibatches import MAX_TOKENS
from vla_platform.gpu_workers.backbone import Backbone, digest_of
from vla_platform.gpu_workers.device import DeviceCheck, is_alive
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.group_training import GroupTraining
from vla_platform.gpu_workers.policy_training import PolicyTraining
from vla_platform.gpu_workers.ranks.base import Alone, Ranks
from vla_platform.gpu_workers.ranks.commands import (
    Digest,
    Mount,
    Source,
    TrainGroup,
    TrainPolicy,
    Unmount,
)
from vla_platform.gpu_workers.ranks.state import PackedState
from vla_platform.gpu_workers.ranks.telling import explained
from vla_platform.gpu_workers.samples import (
    Columns,
    samples_of,
)
from vla_platform.gpu_workers.slot_state import Arrays, MixedPrecision, SlotConfig, SlotState
from vla_platform.gpu_workers.slots import Slot
from vla_platform.gpu_workers.training_items import MISFITS, PolicyResult, TrainItem, TrainResult
from vla_platform.settings import Settings
from vla_storage.errors import CodedError


class TrainingModelService:
    """Trains policies on one resident backbone."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        cache: FeatureCache | None = None,
        mixed_precision: MixedPrecision = "no",
        max_tokens: int = MAX_TOKENS,
        ranks: Ranks | None = None,
        between: Callable[[], None] = lambda: None,
        is_alive: Callable[[torch.device], bool] = is_alive,
    ) -> None:
        """`cache=None` encodes every row every time; `max_tokens` bounds one pass of a module in an
        RL update; `ranks` train together; `between` runs between two updates."""
        self.backbone = backbone
        self.ranks: Ranks = ranks or Alone()
        self.encoder = FeatureEncoder(backbone, cache=cache)
        self.mixed_precision: MixedPrecision = mixed_precision
        self._check_device = DeviceCheck(backbone.device, is_alive)
        self._slots: dict[str, Slot] = {}
        self._groups = GroupTraining(
            self.encoder,
            ranks=self.ranks,
            slot_of=self.slot,
            between=between,
            check_device=self._check_device,
        )
        self._policies = PolicyTraining(
            self.encoder,
            ranks=self.ranks,
            max_tokens=max_tokens,
            check_device=self._check_device,
        )

    def mount(
        self,
        config: SlotConfig,
        *,
        state: SlotState | None = None,
        params: Mapping[str, npt.NDArray[Any]] | None = None,
        policy_version: int | None = None,
    ) -> Slot:
        """Give a policy a slot: fresh from its seed, continued from `state`, or from `params` only.

        Mounting a mounted policy replaces its slot. `policy_version` is what a fresh slot begins
        with. Raises `ModuleLoadError` where schema, base model, state or payload do not fit, and
        leaves what was mounted. Where another rank cannot mount it, it is mounted on none.
        """
        slot = self.build(config, state=state, params=params)
        if policy_version is not None:
            slot.policy_version = policy_version
        if self.ranks.num_ranks > 1:
            packed = PackedState.of(slot.state())
            mount = Mount(config=config, scalars=packed.scalars, state_bytes=len(packed.data))
            with self.ranks.lead(lambda: mount) as answers:
                self.ranks.hand_out(packed.data)
            failed = next((error for error in answers if error is not None), None)
            if failed is not None:
                self._slots[config.policy_key] = slot  # as on the ranks that could
                self.unmount(config.policy_key)
                raise failed
        self._slots[config.policy_key] = slot
        return slot

    def follow_mount(self, mount: Mount) -> CodedError | None:
        """Mount what rank 0 has mounted, in the state in which it hands it out. Returns what is
        wrong with it here."""
        policy_key = mount.config.policy_key
        data = torch.empty(mount.state_bytes, dtype=torch.uint8)
        self.ranks.hand_out(data)
        try:
            state = PackedState(data, mount.scalars).state()
            self._slots[policy_key] = self.build(mount.config, state=state)
        except UnsoundWorkerError:
            raise
        except CodedError as error:
            return error
        except MISFITS as error:
            self._check_device(error)
            return PlatformError(
                f"rank {self.ranks.rank} cannot mount {policy_key}: {error}", policy_key=policy_key
            )
        return None

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
            ranks=self.ranks,
        )
        if params is not None:
            slot.load_params(params)
        if state is not None:
            slot.restore(state)
        return slot

    def unmount(self, policy_key: str) -> None:
        """Forget a policy's slot, if there is one."""
        if policy_key in self._slots:
            with self.ranks.lead(lambda: Unmount(policy_key=policy_key)):
                del self._slots[policy_key]

    def check_ranks(self, policy_key: str) -> None:
        """Raise `RankLostError` where another rank has another module than this one: whatever is
        trained from here on would be wrong."""
        with self.ranks.lead(lambda: Digest(policy_key=policy_key)) as others:
            own = digest_of(self.slot(policy_key).module) if self.ranks.num_ranks > 1 else ""
        if any(other != own for other in others):
            raise RankLostError(
                f"the ranks differ in what they hold of {policy_key}", policy_key=policy_key
            )

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
        if not items:
            return []
        with self.ranks.lead(lambda: _group_of(items)) as answers:
            outcomes = self._groups.train(items)
        return [
            explained(outcome, [errors[at] for errors in answers])
            for at, outcome in enumerate(outcomes)
        ]

    def check_device(self, error: Exception) -> None:
        """Raise `DeviceLostError` where `error` is nobody's fault, for the device is broken."""
        self._check_device(error)

    def train_policy(
        self,
        policy_key: str,
        columns: Mapping[str, Any],
        *,
        source: Source | None = None,
        problem: CodedError | None = None,
    ) -> PolicyResult:
        """One RL update of one policy on the columns of a rollout with advantages.

        `source` and `problem` as in `TrainItem`. Raises `DataError`, `DivergedError`: the policy's
        slot is then to be forgotten.
        """
        item = TrainItem(policy_key, columns, source=source, problem=problem)
        slot = self.slot(policy_key)
        with self.ranks.lead(lambda: TrainPolicy(job=item.job())) as answers:
            outcome = self._policies.train(slot, item)
        outcome = explained(outcome, answers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def actor_forward(self, slot: Slot, columns: Mapping[str, Any]) -> Arrays:
        """What an actor says of a rollout: see `PolicyTraining.actor_forward`."""
        return self._policies.actor_forward(slot, columns)

    def train_batch(
        self, policy_key: str, columns: Columns, *, num_microbatches: int = 1
    ) -> TrainResult:
        """One update of one policy, by one rank: no other finds these rows. Raises what went
        wrong."""
        outcome = self.train_group([TrainItem(policy_key, columns, num_microbatches)])[0]
        if isinstance(outcome, CodedError):
            raise outcome
        return outcome

    def heldout_loss(self, policy_key: str, columns: Columns) -> float:
        """Loss on held-out rows; no update, and the same noise at every call."""
        one = self._groups.prepare(TrainItem(policy_key, columns))
        encoded = self._groups.encode([one])
        feature = stack_features(encoded.features, one.slot.module.feature_kind)
        schema = one.slot.config.schema
        return one.slot.heldout_loss(samples_of(columns, feature, schema))

    def export_params(self, policy_key: str) -> Arrays:
        """The policy's payload: module tensors with statistics, copied."""
        return self.slot(policy_key).export_params()

    def save(self, policy_key: str) -> SlotState:
        """All that a fresh slot needs to continue bit by bit, copied."""
        return self.slot(policy_key).state()


def _group_of(items: Sequence[TrainItem]) -> TrainGroup:
    return TrainGroup(jobs=tuple(item.job() for item in items))


def training_service(
    backbone: Backbone,
    settings: Settings,
    ranks: Ranks,
    *,
    between: Callable[[], None] = lambda: None,
) -> TrainingModelService:
    """As a worker's settings want it: the same on all its ranks."""
    size = settings.feature_cache_bytes
    return TrainingModelService(
        backbone,
        cache=FeatureCache(size) if size else None,
        mixed_precision=settings.mixed_precision,
        max_tokens=settings.update_tokens,
        ranks=ranks,
        between=between,
    )


def use_one_thread() -> None:
    """Bit-equality holds for one thread: with more, sums are cut differently."""
    torch.set_num_threads(1)
