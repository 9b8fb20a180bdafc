"""Inference in a GPU worker: everything put together, started and stopped with the worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import redis

from vla_platform.control.services import Services
from vla_platform.control.tenant_records import TENANTS_KEY
from vla_platform.errors import UnavailableError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.consumer import InferenceConsumer
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.group_batching import GroupBatching
from vla_platform.gpu_workers.inference import InferenceModelService
from vla_platform.gpu_workers.inference_metrics import InferenceMetrics
from vla_platform.gpu_workers.published_modules import published_versions
from vla_platform.inference.channel.redis_streams import RedisStreamsChannel, open_client
from vla_platform.vital import vital_thread
from vla_storage.errors import CodedError

FEATURES_TTL_S = 3600.0
NOTICE_S = 1.0

_log = logging.getLogger(__name__)


class InferenceServer:
    """One base model's inference. `dispatch` sends Celery events, where there is a worker."""

    def __init__(
        self,
        services: Services,
        backbone: Backbone,
        *,
        base_model: str,
        turns: DeviceTurns,
        dispatch: Callable[..., Any] | None = None,
    ) -> None:
        settings = services.settings
        self._services = services
        self.versions = published_versions(services, backbone)
        service = InferenceModelService(
            backbone,
            self.versions,
            share_length=backbone.device.type != "cpu",
            save_features=self._save_features,
        )
        self._metrics = InferenceMetrics(
            services.emitter.emit, base_model=base_model, dispatch=dispatch
        )
        self.consumer = InferenceConsumer(
            RedisStreamsChannel(
                open_client(settings.payload_urls[0]), base_model, tenants=self._tenants
            ),
            service,
            GroupBatching(
                max_samples=settings.inference_batch,
                max_wait_s=settings.inference_wait_ms / 1e3,
            ),
            turns=turns,
            observers=[self._metrics],
            watchdog_s=settings.inference_watchdog_s,
        )
        self._stopping = threading.Event()
        self._notices = vital_thread(self._follow, name="infer-notices")

    def start(self) -> None:
        self.consumer.start()
        self._notices.start()

    def stop(self) -> None:
        """Warm shutdown."""
        self._stopping.set()
        self.consumer.stop()
        self._metrics.close()
        self.versions.close()
        self._notices.join(NOTICE_S + 1)

    def _save_features(self, tenant: str, key: str, columns: dict[str, Any]) -> None:
        self._services.payloads.put(key, tenant, columns, ttl_s=FEATURES_TTL_S)

    def _tenants(self) -> Iterable[str]:
        try:
            found: set[str] = self._services.ledger.client.smembers(TENANTS_KEY)
            return found
        except (redis.RedisError, OSError) as error:
            raise UnavailableError(f"the control Redis does not answer: {error}") from error

    def _follow(self) -> None:
        """Pull new versions of the policies served here as they are published."""
        last = "$"
        while not self._stopping.is_set():
            try:
                last, notices = self._services.ledger.wait_for_published(last, timeout_s=NOTICE_S)
            except CodedError as error:
                _log.warning("action=notices_failed reason=%s", error)
                self._stopping.wait(NOTICE_S)
                continue
            for policy_key, version in notices:
                self.versions.notice(policy_key, version)
