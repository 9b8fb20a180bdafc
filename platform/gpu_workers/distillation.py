"""On-policy distillation: what a teacher says of the actions that a student drew.

The teacher evaluates them on the features of the student's own rollout where the two share a base
model (encode once), and on features of its own otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vla_platform.datasets.frames import resize
from vla_platform.errors import DataError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.normalization import Normalizer
from vla_platform.gpu_workers.rollout_samples import FALLBACK_COLUMNS, encode_rows
from vla_platform.gpu_workers.samples import reads_state
from vla_platform.schema import Schema

STUDENT_COLUMNS = ("latent", "state", "is_transition", "feature")


def reads_pixels(student: Schema, base_digest: str) -> bool:
    """Whether a teacher on that backbone needs features of its own: those of another backbone, or
    of a prompt with the state in its own bins."""
    return student.base_digest != base_digest or student.state_input == "prompt"


@torch.no_grad()
def teacher_log_probs(
    teacher: ActionModule,
    units: Normalizer,
    student: Schema,
    columns: Mapping[str, Any],
    encoder: FeatureEncoder,
) -> npt.NDArray[np.float32]:
    """Log-density of each recorded action, (R, H), 0 for rows without a decision.

    columns: `STUDENT_COLUMNS`, and `FALLBACK_COLUMNS` where `reads_pixels`. `units` normalised the
    recorded actions. Raises `DataError` for a teacher that sees or does something else.
    """
    odd = student.differs_beside_base(teacher.schema)
    if odd:
        raise DataError(f"the teacher does not fit: {odd}", column="latent")
    rows = np.flatnonzero(columns["is_transition"])
    device = encoder.backbone.device

    def chosen(name: str) -> Tensor:
        return torch.tensor(np.asarray(columns[name])[rows], dtype=torch.float32, device=device)

    features, _ = encode_rows(_seen(teacher, student, columns), teacher, encoder, rows)
    state = chosen("state") if reads_state(teacher.schema) else None
    latent, offset = in_units_of(teacher, units.to(device), chosen("latent"))
    judged = teacher.evaluate(stack_features(features, teacher.feature_kind), state, latent)
    log_prob = np.zeros((len(columns["is_transition"]), student.chunk), np.float32)
    log_prob[rows] = (judged.log_prob + offset).cpu().numpy()
    return log_prob


def _seen(teacher: ActionModule, student: Schema, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    if not reads_pixels(student, teacher.schema.base_digest):
        return columns
    seen = {name: columns[name] for name in FALLBACK_COLUMNS if name in columns}
    size = teacher.schema.image_size
    if size != student.image_size:
        images = [[resize(frame, size) for frame in row] for row in np.asarray(seen["images"])]
        seen["images"] = np.asarray(images)
    return seen


def in_units_of(teacher: ActionModule, student: Normalizer, latent: Tensor) -> tuple[Tensor, float]:
    """Recorded actions (B, K, H, A) in the teacher's units, and what its log-density has to be
    raised by to be one over the student's: the log-determinant of the change.

    A flow's chain (K > 1) begins with noise in units of its own, so there both must agree.
    """
    theirs = teacher.action_normalizer
    if torch.equal(theirs.centre, student.centre) and torch.equal(theirs.scale, student.scale):
        return latent, 0.0
    if latent.shape[1] > 1:
        raise DataError(
            "the teacher's actions are normalised otherwise than the student's; a flow-matching "
            "teacher must share its statistics",
            column="latent",
        )
    both = student.varies & theirs.varies
    ratio = torch.log(student.scale / theirs.scale)
    offset = float(torch.where(both, ratio, torch.zeros_like(ratio)).sum())
    return theirs.normalize(student.denormalize(latent)), offset
