"""The loop of whoever computes a stage on metadata: lease, compute, again, for one slice."""

from __future__ import annotations

import time
from collections.abc import Callable

from vla_platform import work
from vla_platform.control.services import Services
from vla_platform.control.states import Stage
from vla_platform.control.training_job import TrainingJob


def compute_waiting(
    services: Services,
    stage: Stage,
    worker: str,
    compute: Callable[[Services, TrainingJob], None],
) -> int:
    """Lease and compute what waits for `stage`, for one slice; returns how many jobs that were."""
    done = 0
    end = time.monotonic() + services.settings.slice_s
    while time.monotonic() < end:
        job = services.ledger.lease_stage(stage, worker, lease_s=services.settings.lease_s)
        if job is not None:
            with work.on_job(str(stage), job):
                compute(services, job)
            done += 1
        elif not services.ledger.wait_for_stage(stage, timeout_s=0.5) and not done:
            break
    return done
