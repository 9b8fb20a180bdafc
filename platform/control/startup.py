"""Start-up gates: no worker takes work from services that could lose it."""

from __future__ import annotations

from typing import Any

from celery import Celery, bootsteps

from vla_platform.control.services import services
from vla_platform.stack.gates import (
    check_celery,
    check_clock,
    check_control_redis,
    check_object_store,
    check_payload_redis,
)


class GateStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Ends the worker with `ConfigurationError`, which says what to change."""

    def start(self, parent: Any) -> None:
        settings = services().settings
        check_celery(parent.app)
        check_clock(services().ledger.client)
        if not settings.is_a("control"):
            return  # the services themselves are probed once, by the worker that admits work
        check_control_redis(settings.redis_url)
        for url in settings.payload_urls:
            check_payload_redis(url, settings.redis_url)
        check_object_store(services().objects)


def install_gates(app: Celery) -> None:
    app.steps["worker"].add(GateStep)
