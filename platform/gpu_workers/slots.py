"""Where a worker mounts one policy: module, optimizer, schedule, scaler, random numbers, counters.

Nothing in a slot is shared, so one policy's step cannot change another's numbers; and a slot's
state, restored into a fresh slot, continues bit by bit as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Generator, Tensor

from vla_platform.errors import DivergedError, ModuleLoadError
from vla_platform.failpoints import Failpoint, reach
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.action_modules.build import build_action_module
from vla_platform.gpu_workers.action_modules.stochastic import trained_by_rl
from vla_platform.gpu_workers.algorithms.awr import WeightedSamples, run_awr_update
from vla_platform.gpu_workers.algorithms.minibatches import MAX_TOKENS, picked
from vla_platform.gpu_workers.algorithms.policy_gradient import (
    PolicySamples,
    PolicyUpdate,
    run_policy_update,
)
from vla_platform.gpu_workers.algorithms.sft import Samples, sft_loss
from vla_platform.gpu_workers.ranks.base import Alone, Ranks
from vla_platform.gpu_workers.ranks.gradients import GradientSum, taken_by_all
from vla_platform.gpu_workers.ranks.share import BatchShare
from vla_platform.gpu_workers.schedule import learning_rate
from vla_platform.gpu_workers.slot_state import (
    STATE_VERSION,
    Arrays,
    MixedPrecision,
    SlotConfig,
    SlotState,
)
from vla_platform.specs import AWRSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    loss: float
    grad_norm: float
    lr: float
    step: int
    skipped: bool


class Slot:
    """One mounted policy. `step` counts updates, `policy_version` rises with every change."""

    def __init__(
        self,
        config: SlotConfig,
        *,
        feature_dim: int,
        device: torch.device,
        mixed_precision: MixedPrecision = "no",
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks` train it together, each on its own rows of every batch; None: this one alone."""
        self.config = config
        self.step = 0
        self.policy_version = 0
        self.samples_seen = 0
        module = build_action_module(
            config.action_module,
            config.schema,
            feature_dim=feature_dim,
            seed=_seed(config.seed, "module"),
            normalization=config.normalization,
            state_statistics=config.statistics.get("state"),
            action_statistics=config.statistics.get("action"),
            rl=config.algorithm is not None,
        )
        module.select_trainable(config.trainable)
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ModuleLoadError(
                f"nothing to train in {config.trainable}", policy_key=config.policy_key
            )
        # Its own accelerator: accumulation counter and gradient scaler are the policy's state.
        self._accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=mixed_precision,
            step_scheduler_with_optimizer=False,
        )
        self.module: ActionModule = module.to(device)
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        spec = config.optimizer
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )
        self._optimizer = self._accelerator.prepare_optimizer(self._adamw)
        if (scaler := self._accelerator.scaler) is not None:
            # It begins with the first loss, which a rank without rows never has.
            scaler.scale(torch.zeros((), device=device))
        self._ranks = ranks or Alone()
        self._sum = GradientSum(self._parameters.values(), self._ranks)
        self._noise = Generator().manual_seed(_seed(config.seed, "noise"))
        self._dropout = Generator().manual_seed(_seed(config.seed, "dropout")).get_state()

    def update(
        self,
        samples: Samples | None,
        *,
        num_microbatches: int = 1,
        share: BatchShare | None = None,
    ) -> Update:
        """One optimizer step on `samples`. Raises `DivergedError` and then changes nothing.

        With `share`, they are this rank's rows of that batch (None: it has none); the others make
        the same call with theirs. Where every step of every row is padding there is nothing to
        learn: loss 0, no optimizer step, and the policy keeps its version.
        """
        share = share or _whole(samples)
        lr = learning_rate(self.config.optimizer, self.step, self.config.total_steps)
        if share.num_valid == 0:
            _log.warning(
                "action=update_skipped policy=%s reason=all action steps are padding, nothing to "
                "learn",
                self.config.policy_key,
            )
            self.step += 1
            self.samples_seen += share.num_rows
            return Update(0.0, 0.0, lr, self.step, skipped=True)
        before = self._noise.get_state(), self._dropout
        try:
            loss, norm = self._gradients(samples, share, num_microbatches)
            with taken_by_all(self._ranks):
                for group in self._adamw.param_groups:
                    group["lr"] = lr
                reach(Failpoint.BEFORE_OPTIMIZER)
                self._optimizer.step()
        except BaseException:
            self._noise.set_state(before[0])
            self._dropout = before[1]
            raise
        finally:
            self._adamw.zero_grad(set_to_none=True)
        self.step += 1
        self.policy_version += 1
        self.samples_seen += share.num_rows
        return Update(loss, norm, lr, self.step, skipped=False)

    def _gradients(
        self, samples: Samples | None, share: BatchShare, num_microbatches: int
    ) -> tuple[float, float]:
        with self.abandoned_on_error():
            own = self._own_gradients(samples, share, num_microbatches)
        summed = self._sum(own[None])
        with taken_by_all(self._ranks):
            loss = float(summed)
            if not math.isfinite(loss):
                raise self._diverged("loss", loss)
            return loss, self._clip()

    def _own_gradients(
        self, samples: Samples | None, share: BatchShare, num_microbatches: int
    ) -> Tensor:
        """Those of the rows that are here; returns their share of the loss."""
        accelerator = self._accelerator
        accelerator.step = 0
        accelerator.gradient_accumulation_steps = num_microbatches
        total = torch.zeros((), device=self.module.device)
        bounds = [share.num_rows * i // num_microbatches for i in range(num_microbatches + 1)]
        self.module.train()
        with self._own_dropout():
            for start, stop in itertools.pairwise(bounds):
                drawn = self.module.draw(stop - start, self._noise)
                part = share.part(range(start, stop))
                with accelerator.accumulate(self.module), accelerator.autocast():
                    if samples is None or not part.own:
                        continue
                    loss = sft_loss(
                        self.module,
                        samples.rows(part.own[0], part.own[-1] + 1),
                        num_valid=share.num_valid,
                        drawn=picked(drawn, part),
                    )
                    # accelerate divides by the number of parts, but ours already add up.
                    accelerator.backward(loss * num_microbatches)
                total += loss.detach()
        return total

    def _clip(self) -> float:
        limit = self.config.optimizer.grad_clip
        parameters = list(self._parameters.values())
        norm = float(
            self._accelerator.clip_grad_norm_(parameters, math.inf if limit is None else limit)
        )
        # With a gradient scaler, overflow is normal: the scaler leaves the step out and backs off.
        if not math.isfinite(norm) and self._accelerator.scaler is None:
            raise self._diverged("gradient norm", norm)
        return norm

    def _diverged(self, what: str, value: float) -> DivergedError:
        return DivergedError(
            f"the {what} of {self.config.policy_key} is {value} at step {self.step}",
            policy_key=self.config.policy_key,
            step=self.step,
        )

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """What fails within fails before the ranks add up their parts: none takes the step."""
        try:
            yield
        except Exception:
            self._sum.abandon()
            raise

    def update_policy(
        self,
        samples: PolicySamples | WeightedSamples | None,
        *,
        max_tokens: int = MAX_TOKENS,
        share: BatchShare | None = None,
    ) -> PolicyUpdate:
        """One RL update: the algorithm's epochs over `samples`, in minibatches of its own order.

        With `share`, they are this rank's rows of that batch, as in `update`. Counts as one step
        and one version however many optimizer steps it takes; `max_tokens` bounds one pass of the
        module. Raises `DivergedError`; the slot's numbers are then those of the middle of an
        update.
        """
        algorithm = self.config.algorithm
        share = share or _whole(samples)
        lr = learning_rate(self.config.optimizer, self.step, self.config.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self.module.eval()  # dropout would make ratios of noise
        how: dict[str, Any] = {
            "share": share, "generator": self._noise, "descent": _Descent(self),
            "max_tokens": max_tokens,
        }  # fmt: skip
        try:
            if isinstance(algorithm, AWRSpec):
                assert not isinstance(samples, PolicySamples)
                update = run_awr_update(self.module, samples, algorithm, **how)
            else:
                assert algorithm is not None
                assert not isinstance(samples, WeightedSamples)
                update = run_policy_update(self.module, samples, algorithm, **how)
        finally:
            self._adamw.zero_grad(set_to_none=True)
        if not math.isfinite(update.loss):
            raise self._diverged("loss", update.loss)
        self.step += 1
        self.policy_version += 1
        self.samples_seen += update.num_rows
        return replace(update, lr=lr, step=self.step)

    @contextlib.contextmanager
    def _own_dropout(self) -> Iterator[None]:
        """Let torch's global generator be this slot's: dropout offers no other way."""
        if not self.module.uses_dropout:
            yield
            return
        device = self.module.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.set_state(self._dropout)
            if self._ranks.num_ranks > 1:
                # Every rank draws masks of its own, and all go on from the same state.
                of_step = int(torch.randint(2**62, ()))
                self._dropout = torch.default_generator.get_state()
                torch.default_generator.manual_seed(_seed(of_step, f"rank {self._ranks.rank}"))
            if devices:
                # On a GPU masks come from the device's generator: seed it from ours.
                torch.cuda.manual_seed(int(torch.randint(2**62, ())))
            yield
            if self._ranks.num_ranks == 1:
                self._dropout = torch.default_generator.get_state()

    @torch.no_grad()
    def heldout_loss(self, samples: Samples) -> float:
        """Loss without dropout and with the same noise at every call. Changes nothing."""
        self.module.eval()
        noise = Generator().manual_seed(_seed(self.config.seed, "heldout"))
        num_valid = int(samples.valid.sum())
        drawn = self.module.draw(samples.num_rows, noise)
        with self._accelerator.autocast():
            return float(sft_loss(self.module, samples, num_valid=num_valid, drawn=drawn))

    def export_params(self) -> Arrays:
        """The payload as arrays of its own: further training does not alter them."""
        return {
            name: tensor.detach().cpu().numpy().copy()
            for name, tensor in self.module.state_dict().items()
        }

    def state(self) -> SlotState:
        optimizer: Arrays = {
            "rng/noise": self._noise.get_state().numpy().copy(),
            "rng/dropout": self._dropout.numpy().copy(),
        }
        for name, parameter in self._parameters.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                optimizer[f"{key}/{name}"] = value.detach().cpu().numpy().copy()
        scaler = self._accelerator.scaler
        return SlotState(
            module=self.export_params(),
            optimizer=optimizer,
            scalars={
                "version": STATE_VERSION,
                "policy_key": self.config.policy_key,
                "schema_signature": self.config.schema.signature,
                "step": self.step,
                "policy_version": self.policy_version,
                "samples_seen": self.samples_seen,
                "scaler": None if scaler is None else scaler.state_dict(),
            },
        )

    def load_params(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a payload, statistics included: its weights were trained in those units."""
        own = self.module.state_dict()
        if not trained_by_rl(arrays):
            # Reinforcement learning begins from a fine-tuned module, with heads of its own.
            own = {name: tensor for name, tensor in own.items() if not trained_by_rl([name])}
        if own.keys() != arrays.keys():
            odd = sorted(own.keys() ^ arrays.keys())
            raise ModuleLoadError(f"the payload does not fit: {', '.join(odd[:8])}", names=odd[:8])
        for name, tensor in own.items():
            if tuple(tensor.shape) != arrays[name].shape:
                raise ModuleLoadError(
                    f"{name} has shape {arrays[name].shape} instead of {tuple(tensor.shape)}",
                    names=[name],
                )
        self.module.load_state_dict(
            {name: torch.tensor(arrays[name]) for name in own}, strict=False
        )

    def restore(self, state: SlotState) -> None:
        """Continue where `state` was taken. The schema must be the same."""
        scalars = state.scalars
        if scalars.get("version") != STATE_VERSION:
            raise ModuleLoadError(f"unknown slot state version {scalars.get('version')!r}")
        if scalars["schema_signature"] != self.config.schema.signature:
            raise ModuleLoadError("the checkpoint belongs to another schema")
        self.load_params(state.module)
        moments: dict[str, dict[str, Tensor]] = {}
        for key, array in state.optimizer.items():
            kind, _, name = key.partition("/")
            if kind == "rng":
                continue
            if name not in self._parameters:
                raise ModuleLoadError(f"optimizer state for unknown parameter {name!r}")
            moments.setdefault(name, {})[kind] = torch.tensor(array).to(self.module.device)
        self._adamw.state.clear()
        for name, values in moments.items():
            self._adamw.state[self._parameters[name]] = values
        self._noise.set_state(torch.tensor(np.asarray(state.optimizer["rng/noise"])))
        self._dropout = torch.tensor(np.asarray(state.optimizer["rng/dropout"]))
        self.step = int(scalars["step"])
        self.policy_version = int(scalars["policy_version"])
        self.samples_seen = int(scalars["samples_seen"])
        if self._accelerator.scaler is not None and scalars["scaler"] is not None:
            self._accelerator.scaler.load_state_dict(scalars["scaler"])


class _Descent:
    """A slot's way down the losses of an RL update: the gradients of several passes, one step."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        accelerator = slot._accelerator
        accelerator.gradient_accumulation_steps = 1
        accelerator.step = 0
        with accelerator.accumulate(slot.module):
            pass  # whatever was accumulated before: from here on a step is one, rows or none

    def add(self, share: Tensor) -> None:
        self._slot._accelerator.backward(share)

    def together(self, numbers: Tensor) -> Tensor:
        found = self._slot._sum(numbers)
        with taken_by_all(self._slot._ranks):
            if not math.isfinite(loss := float(found[0])):
                raise self._slot._diverged("loss", loss)
            return found

    def abandoned_on_error(self) -> contextlib.AbstractContextManager[None]:
        return self._slot.abandoned_on_error()

    def step(self) -> float:
        with taken_by_all(self._slot._ranks):
            norm = self._slot._clip()
            self._slot._optimizer.step()
            self.discard()
            return norm

    def discard(self) -> None:
        self._slot._adamw.zero_grad(set_to_none=True)


def _whole(samples: Samples | PolicySamples | WeightedSamples | None) -> BatchShare:
    """A batch whose rows are all here."""
    assert samples is not None
    lengths = () if isinstance(samples, Samples) else samples.lengths  # it is cut by rows
    return BatchShare.whole(samples.valid.sum(dim=1).tolist(), lengths)


def _seed(seed: int, use: str) -> int:
    """Independent streams from one seed: 63 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed} {use}".encode()).digest()[:8], "big") >> 1
