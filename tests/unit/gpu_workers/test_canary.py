"""A checkpoint says what its policy answers; loaded elsewhere, the policy answers the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.unit.gpu_workers.conftest import make_columns  # noqa: E402
from vla_platform.control.prepared import Prepared, prepared_key  # noqa: E402
from vla_platform.errors import ModuleLoadError, NotFoundError  # noqa: E402
from vla_platform.gpu_workers import canary  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.canary import CanaryProbe, reproduce  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.slots import Slot  # noqa: E402
from vla_platform.gpu_workers.training import TrainingModelService  # noqa: E402
from vla_platform.specs import PPOSpec  # noqa: E402
from vla_storage.canary import CANARY_VERSION, Match  # noqa: E402
from vla_storage.checkpoints import Checkpoint, CheckpointHeader, CheckpointStore  # noqa: E402
from vla_storage.manifests import Lineage  # noqa: E402
from vla_storage.objects import MemoryObjectStore  # noqa: E402

RUN = "w1"


@pytest.fixture
def store() -> CheckpointStore:
    return CheckpointStore(objects=MemoryObjectStore(), tenant_id="a", signing_key=b"k" * 32)


def trained(backbone: Backbone, config: SlotConfig, *, steps: int = 2) -> Slot:
    service = TrainingModelService(backbone)
    slot = service.mount(config)
    if config.algorithm is None:
        for seed in range(steps):
            service.train_batch(config.policy_key, make_columns(config, seed))
    return slot


def saved(store: CheckpointStore, slot: Slot, probe: CanaryProbe) -> str:
    """As the platform saves it; returns its id."""
    config, state = slot.config, slot.state()
    header = CheckpointHeader(
        policy="task", workload_id=RUN, step=slot.step, policy_version=slot.policy_version,
        position=slot.step, canary=probe.ask(slot.module),
        lineage=Lineage(
            spec_digest="s", dataset_digest="d", base_digest=config.schema.base_digest,
            schema_signature=config.schema.signature,
        ),
    )  # fmt: skip
    prepared = Prepared(
        schema=config.schema, dataset_digest="d", train_episodes=(0,), heldout_episodes=(),
        num_samples=1, num_heldout=0, statistics=dict(config.statistics),
        action_module=config.action_module, normalization=config.normalization,
    )  # fmt: skip
    store.objects.put(prepared_key("a", RUN), prepared.to_json())
    return store.save(
        Checkpoint(
            header=header, module=state.module, optimizer=state.optimizer, state=state.scalars
        )
    ).checkpoint_id


@pytest.mark.parametrize("which", range(3))
def test_a_checkpoint_answers_as_at_its_save(store, backbone, three_tenants, which: int):
    slot = trained(backbone, three_tenants[which])
    found = reproduce(store, saved(store, slot, CanaryProbe(backbone)))
    assert found.comparison is not None and found.answer is not None
    assert Match.EXACT is found.comparison.match
    assert (1, slot.config.schema.chunk, slot.config.schema.action_dim) == found.answer.shape
    assert found.manifest.canary == found.answer


def test_a_policy_of_rl_answers_as_well(store, backbone, make_config):
    slot = trained(backbone, make_config("a", algorithm=PPOSpec()))
    found = reproduce(store, saved(store, slot, CanaryProbe(backbone)))
    assert found.comparison is not None
    assert Match.EXACT is found.comparison.match


def test_asking_costs_the_training_nothing_of_its_numbers(backbone, three_tenants):
    """Also where dropout and noise draw random numbers (tenant b)."""
    asked, alone = (TrainingModelService(backbone) for _ in range(2))
    probe = CanaryProbe(backbone)
    for config in three_tenants:
        for service in (asked, alone):
            service.mount(config)
        for seed in range(3):
            probe.ask(asked.slot(config.policy_key).module)
            losses = [
                service.train_batch(config.policy_key, make_columns(config, seed)).loss
                for service in (asked, alone)
            ]
            assert losses[0] == losses[1]


def test_the_backbone_runs_once_per_layout(backbone, make_config):
    slot = trained(backbone, make_config())
    probe = CanaryProbe(backbone)
    before = backbone.num_forwards
    answers = {probe.ask(slot.module).digest for _ in range(3)}
    assert (len(answers), backbone.num_forwards - before) == (1, 1)


def test_every_step_gives_another_answer(backbone, make_config):
    config = make_config()
    probe = CanaryProbe(backbone)
    digests = {
        probe.ask(trained(backbone, config, steps=steps).module).digest for steps in range(3)
    }
    assert len(digests) == 3


def test_another_answer_is_told(store, backbone, make_config):
    """What digests cannot show: a manifest that was signed with the numbers of another module."""
    slot = trained(backbone, make_config())
    probe = CanaryProbe(backbone)
    other = trained(backbone, make_config(), steps=1)

    class Liar(CanaryProbe):
        def ask(self, module):
            return probe.ask(other.module)

    found = reproduce(store, saved(store, slot, Liar(backbone)))
    assert found.comparison is not None
    assert Match.DIFFERENT is found.comparison.match


def test_no_answer_where_numbers_are_not_finite(backbone, make_config):
    slot = trained(backbone, make_config())
    with torch.no_grad():
        slot.module.action_normalizer.centre.fill_(float("nan"))
    assert CanaryProbe(backbone).ask(slot.module) is None


def test_it_needs_the_same_base_model_and_the_runs_record(store, backbone, make_config):
    checkpoint = saved(store, trained(backbone, make_config()), CanaryProbe(backbone))
    with pytest.raises(ModuleLoadError, match="--base-model"):
        reproduce(store, checkpoint, base_model="tiny")
    record = store.objects.get(prepared_key("a", RUN))
    other = Prepared.from_json(record)
    altered = replace(other, schema=replace(other.schema, chunk=other.schema.chunk + 1))
    store.objects.put(prepared_key("a", RUN), altered.to_json())
    with pytest.raises(ModuleLoadError, match="another interface"):
        reproduce(store, checkpoint)
    store.objects.delete(prepared_key("a", RUN))
    with pytest.raises(NotFoundError):
        reproduce(store, checkpoint)


def test_the_question_never_changes():
    """Its bytes are part of what manifests mean: another question needs another version."""
    assert int(canary._pictures(1, 32)[0, 0, 0, 0]) == 82
    assert np.allclose([0.351919, -0.706162], canary._normal(2), atol=1e-6)
    assert np.allclose([0.637550, 0.240044], canary._uniform("noise", 2), atol=1e-6)
    assert CANARY_VERSION == 1
