"""The GPU worker's own step: it loads the base models before the first task is taken."""

from __future__ import annotations

import logging
from typing import Any

import torch
from celery import Celery, bootsteps

from vla_platform.control.services import services
from vla_platform.errors import ConfigurationError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.runner import TrainingRunner
from vla_platform.gpu_workers.training import TrainingModelService, use_one_thread

_log = logging.getLogger(__name__)
_runners: dict[str, TrainingRunner] = {}


def runner(base_model: str) -> TrainingRunner:
    """The runner of a base model that this worker serves."""
    try:
        return _runners[base_model]
    except KeyError:
        raise ConfigurationError(
            f"this worker serves {', '.join(_runners) or 'no base model'}, not {base_model}; "
            "set VLA_BASE_MODELS"
        ) from None


class ModelStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads at worker start; publishes what is staged at shutdown."""

    def start(self, parent: Any) -> None:
        settings = services().settings
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            use_one_thread()
        services().ledger.load()
        for name, source in settings.served_models().items():
            backbone = Backbone.load(source, device=device)
            size = settings.feature_cache_bytes
            service = TrainingModelService(
                backbone,
                cache=FeatureCache(size) if size else None,
                mixed_precision=settings.mixed_precision,
            )
            _runners[name] = TrainingRunner(services(), service, base_model=name)
            services().ledger.register_base_model(name, service.facts())
            _log.info("action=base_model_loaded name=%s digest=%s", name, backbone.digest)

    def stop(self, parent: Any) -> None:
        for one in _runners.values():
            one.close()


def install(app: Celery) -> None:
    app.steps["worker"].add(ModelStep)
