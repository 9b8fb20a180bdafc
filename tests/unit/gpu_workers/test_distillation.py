"""What a teacher says of a student's actions: by hand, in other units, on features of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.gpu_workers.conftest import make_columns, wide_statistics
from vla_platform.errors import DataError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.distillation import reads_pixels, teacher_log_probs
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.normalization import Normalizer
from vla_platform.gpu_workers.rollout_samples import encode_rows
from vla_platform.gpu_workers.slot_state import SlotConfig
from vla_platform.gpu_workers.slots import Slot
from vla_platform.specs import FlowMatchingModule, OFTModule, PPOSpec

ROWS = 4
MODULES = [
    OFTModule(chunk=3, hidden_dim=16),
    FlowMatchingModule(chunk=3, hidden_dim=16, num_layers=2, num_heads=2, num_inference_steps=2),
]


def policy(backbone: Backbone, make_config: Callable[..., SlotConfig], **changes: Any) -> Slot:
    config = make_config(algorithm=PPOSpec(), **changes)
    slot = Slot(config, feature_dim=backbone.hidden_dim, device=backbone.device)
    slot.module.eval()
    return slot


def units_of(slot: Slot, limit: float = 2.0) -> Normalizer:
    dim = slot.config.schema.action_dim
    return Normalizer("min_max", wide_statistics(dim, limit), dim=dim)


def rolled_out(slot: Slot, encoder: FeatureEncoder) -> dict[str, Any]:
    """Decisions of the slot's own policy with their features; the last row decides nothing."""
    module = slot.module
    columns: dict[str, Any] = dict(make_columns(slot.config, 3, num=ROWS))
    rows = np.arange(ROWS)
    features, _ = encode_rows(columns, module, encoder, rows)
    feature = stack_features(features, module.feature_kind)
    noise = torch.randn(
        (ROWS, *module.sample_noise_shape), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        drawn = module.sample(feature, torch.from_numpy(columns["state"]), noise)
    return {
        **columns,
        "feature": [one.numpy() for one in features],
        "latent": drawn.latent.numpy(),
        "log_prob": drawn.log_prob.numpy(),
        "is_transition": np.arange(ROWS) < ROWS - 1,
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda one: one.kind)
def test_a_policy_says_of_itself_what_it_said_then(
    backbone: Backbone, make_config: Callable[..., SlotConfig], module: Any
) -> None:
    slot, encoder = policy(backbone, make_config, module=module), FeatureEncoder(backbone)
    columns = rolled_out(slot, encoder)
    found = teacher_log_probs(slot.module, units_of(slot), slot.config.schema, columns, encoder)
    np.testing.assert_allclose(found[:-1], columns["log_prob"][:-1], rtol=1e-4, atol=1e-4)
    assert not found[-1].any()


def test_features_that_were_kept_are_used_and_give_the_same_as_pixels(
    backbone: Backbone, make_config: Callable[..., SlotConfig]
) -> None:
    student = policy(backbone, make_config, module=MODULES[0])
    teacher = policy(backbone, make_config, module=MODULES[0], seed=5)
    encoder = FeatureEncoder(backbone)
    columns = rolled_out(student, encoder)
    schema = student.config.schema
    assert not reads_pixels(schema, backbone.digest)
    before = encoder.num_forwards
    kept = teacher_log_probs(teacher.module, units_of(student), schema, columns, encoder)
    assert encoder.num_forwards == before
    # A student of another base model: the teacher looks for itself.
    other = replace(schema, base_digest="another")
    assert reads_pixels(other, backbone.digest)
    looked = teacher_log_probs(teacher.module, units_of(student), other, columns, encoder)
    assert encoder.num_forwards > before
    np.testing.assert_allclose(looked, kept, rtol=1e-4, atol=1e-4)


def test_a_student_with_larger_pictures_is_seen_at_the_teachers_size(
    backbone: Backbone, make_config: Callable[..., SlotConfig]
) -> None:
    slot, encoder = policy(backbone, make_config, module=MODULES[0]), FeatureEncoder(backbone)
    columns = rolled_out(slot, encoder)
    large = np.repeat(np.repeat(columns["images"], 2, axis=2), 2, axis=3)
    schema = replace(slot.config.schema, base_digest="another", image_size=2 * backbone.image_size)
    found = teacher_log_probs(
        slot.module, units_of(slot), schema, {**columns, "images": large}, encoder
    )
    assert np.isfinite(found).all()
    assert found[:-1].all()


def test_other_units_change_the_density_by_the_determinant(
    backbone: Backbone, make_config: Callable[..., SlotConfig]
) -> None:
    """The same action has the same probability: densities over student units, by hand."""
    teacher = policy(backbone, make_config, module=MODULES[0])
    encoder = FeatureEncoder(backbone)
    columns = rolled_out(teacher, encoder)  # in the teacher's units, whose limits are 2
    narrow = units_of(teacher, 0.5)
    raw = teacher.module.action_normalizer.denormalize(torch.from_numpy(columns["latent"]))
    given = {**columns, "latent": narrow.normalize(raw).numpy()}
    found = teacher_log_probs(teacher.module, narrow, teacher.config.schema, given, encoder)
    dim = teacher.config.schema.action_dim
    expected = columns["log_prob"][:-1] + dim * np.log(0.5 / 2.0)
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-3, atol=1e-3)


def test_teachers_that_do_not_fit_are_refused_b17(
    backbone: Backbone, make_config: Callable[..., SlotConfig]
) -> None:
    slot = policy(backbone, make_config, module=MODULES[1])
    encoder = FeatureEncoder(backbone)
    columns = rolled_out(slot, encoder)
    with pytest.raises(DataError, match="share its statistics"):
        teacher_log_probs(slot.module, units_of(slot, 0.5), slot.config.schema, columns, encoder)
    other = replace(slot.config.schema, chunk=8, action_module="oft")
    with pytest.raises(DataError, match="action_module is 'flow_matching', not 'oft', chunk is 3"):
        teacher_log_probs(slot.module, units_of(slot), other, columns, encoder)
