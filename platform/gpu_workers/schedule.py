"""Learning rate as a pure function of the step, so that nothing has to be restored."""

from __future__ import annotations

import math

from vla_platform.specs import AdamWSpec


def learning_rate(spec: AdamWSpec, step: int, total_steps: int) -> float:
    """Rate of update `step`, counted from 0: linear warm-up, then the schedule to `min_lr`."""
    schedule = spec.schedule
    if step < schedule.warmup_steps:
        return spec.lr * (step + 1) / schedule.warmup_steps
    span = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    if schedule.kind == "constant":
        return spec.lr
    if schedule.kind == "linear":
        return spec.lr + (schedule.min_lr - spec.lr) * progress
    return schedule.min_lr + (spec.lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
