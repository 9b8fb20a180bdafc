"""F66, PF-19, PF-22: a run that is killed anywhere goes on with the same samples, learning rates
and numbers as one that was not, and a finished one does nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.gpu_workers.conftest import make_columns  # noqa: E402
from vla_platform.control.plan import Domain, Plan  # noqa: E402
from vla_platform.datasets.sample_order import samples_at  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.feature_cache import FeatureCache  # noqa: E402
from vla_platform.gpu_workers.schedule import learning_rate  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig, SlotState  # noqa: E402
from vla_platform.gpu_workers.training import TrainingModelService  # noqa: E402
from vla_platform.specs import AdamWSpec, FlowMatchingModule, ScheduleSpec  # noqa: E402

NUM_SAMPLES, BATCH, SEED = 18, 2, 5  # 9 batches an epoch
PLAN = Plan(steps=18, batch_size=BATCH, evaluate_every=None)  # two epochs
Done = list[tuple[list[int], float, float]]


class Run:
    """One worker's life with a run: batches by position, checkpoints as the platform has them."""

    def __init__(self, backbone: Backbone, config: SlotConfig, rows: dict[str, Any]) -> None:
        self._service = TrainingModelService(backbone, cache=FeatureCache(64 << 20))
        self._config, self._rows = config, rows
        self.done: Done = []

    def start(self, checkpoint: tuple[int, SlotState] | None) -> int:
        """Returns the position at which it goes on."""
        if checkpoint is None:
            self._service.mount(self._config)
            return 0
        position, state = checkpoint
        travelled = SlotState(state.module, state.optimizer, json.loads(json.dumps(state.scalars)))
        self._service.mount(self._config, state=travelled)
        return position

    def train(self, position: int) -> None:
        place = PLAN.place(position)
        assert place.domain is Domain.TRAIN
        chosen = samples_at(
            seed=SEED, num_samples=NUM_SAMPLES, start=place.first_sample, count=BATCH
        )
        columns = {name: column[chosen] for name, column in self._rows.items()}
        result = self._service.train_batch(self._config.policy_key, columns)
        self.done.append((chosen, result.lr, result.loss))

    def checkpoint(self, position: int) -> tuple[int, SlotState]:
        return position, self._service.save(self._config.policy_key)

    def weights(self) -> dict[str, Any]:
        return self._service.export_params(self._config.policy_key)


@pytest.fixture
def config(make_config: Any) -> SlotConfig:
    spec: SlotConfig = make_config(
        module=FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2, dropout=0.2),
        optimizer=AdamWSpec(schedule=ScheduleSpec(kind="cosine", warmup_steps=3)),
        total_steps=PLAN.steps,
    )
    return spec


@pytest.mark.parametrize("killed_at", [0, 4, 9, 13, 17, 18])
def test_f66_killed_anywhere_it_ends_as_undisturbed(
    backbone: Backbone, config: SlotConfig, killed_at: int
) -> None:
    """At step 0, in epoch 1, at its end, in epoch 2, before the last step, after the finish;
    checkpoints every 3 steps."""
    rows = make_columns(config, seed=1, num=NUM_SAMPLES)
    whole = Run(backbone, config, rows)
    for position in range(whole.start(None), PLAN.positions):
        whole.train(position)

    saved: tuple[int, SlotState] | None = None
    first = Run(backbone, config, rows)
    for position in range(first.start(None), killed_at):
        first.train(position)
        if (position + 1) % 3 == 0:
            saved = first.checkpoint(position + 1)
    second = Run(backbone, config, rows)
    begun = second.start(saved)
    for position in range(begun, PLAN.positions):
        second.train(position)

    assert 3 * (killed_at // 3) == begun
    assert (0 if killed_at == PLAN.positions else PLAN.positions - begun) == len(second.done)
    assert whole.done == first.done[:begun] + second.done
    expected, found = whole.weights(), second.weights()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_pf19_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    """2 epochs of 9 batches, extended to 3: 9 more steps at the rates of an uninterrupted run."""
    longer = Plan(steps=27, batch_size=BATCH, evaluate_every=None)
    last = PLAN.place(PLAN.positions - 1)
    assert (last.step, last.first_sample) == (18, 34)
    more = [longer.place(position) for position in range(PLAN.positions, longer.positions)]
    assert list(range(19, 28)) == [place.step for place in more]
    assert list(range(36, 54, 2)) == [place.first_sample for place in more]
    third = [
        one
        for place in more
        for one in samples_at(
            seed=SEED, num_samples=NUM_SAMPLES, start=place.first_sample, count=BATCH
        )
    ]
    assert list(range(NUM_SAMPLES)) == sorted(third)  # epoch 3, whole
    spec = AdamWSpec(schedule=ScheduleSpec(kind="cosine", warmup_steps=3))
    rates = [learning_rate(spec, step, 27) for step in range(27)]
    assert rates[18:] == [learning_rate(spec, place.step - 1, 27) for place in more]
    assert rates[3:] == sorted(rates[3:], reverse=True)
