"""The control worker's own step: it consumes the ingress queue of every tenant, also new ones."""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery import Celery, bootsteps
from celery.worker.consumer.tasks import Tasks

from vla_platform.broker import ingress_queue, queue
from vla_platform.control.reconciler import restore_tenants
from vla_platform.control.recovery import recover_if_lost
from vla_platform.control.services import services
from vla_platform.control.tenant_records import TENANTS_KEY

POLL_S = 0.5
_log = logging.getLogger(__name__)


class IngressStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Adds a consumer per tenant; looks for new tenants every half second."""

    requires = (Tasks,)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        services().ledger.load()
        recover_if_lost(services())
        restore_tenants(services())
        self._stop = threading.Event()
        consumed: set[str] = set()
        self._watch(parent, consumed)
        self._thread = threading.Thread(
            target=self._loop, args=(parent, consumed, self._stop), name="ingress", daemon=True
        )
        self._thread.start()

    def stop(self, parent: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def _loop(self, parent: Any, consumed: set[str], stop: threading.Event) -> None:
        while not stop.wait(POLL_S):
            # Channels belong to the consumer's own thread: only schedule the work here.
            parent.call_soon(self._watch, parent, consumed)

    def _watch(self, parent: Any, consumed: set[str]) -> None:
        for tenant in services().ledger.client.smembers(TENANTS_KEY) - consumed:
            name = ingress_queue(tenant)
            parent.app.amqp.queues.select_add(queue(name))
            parent.task_consumer.add_queue(parent.app.amqp.queues[name])
            parent.task_consumer.consume()
            consumed.add(tenant)
            _log.info("action=tenant_consumed tenant=%s", tenant)


def install(app: Celery) -> None:
    app.steps["consumer"].add(IngressStep)
