"""The GPU worker's own step: it loads the base models before the first task is taken."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from celery import Celery, bootsteps
from kombu.exceptions import OperationalError

from vla_platform.control.services import services
from vla_platform.errors import ConfigurationError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.device import DeviceTurns
from vla_platform.gpu_workers.ranks.base import Alone
from vla_platform.gpu_workers.ranks.leader import Team
from vla_platform.gpu_workers.runner import TrainingRunner
from vla_platform.gpu_workers.serving import InferenceServer
from vla_platform.gpu_workers.training import training_service, use_one_thread
from vla_platform.gpu_workers.utilisation import UtilisationReport
from vla_platform.vital import end_process

_log = logging.getLogger(__name__)
_runners: dict[str, TrainingRunner] = {}
_servers: dict[str, InferenceServer] = {}


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
    """Loads at worker start; at shutdown, answers what waits and publishes what is staged."""

    _team: Team | None = None

    def start(self, parent: Any) -> None:
        settings = services().settings
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            use_one_thread()
        services().ledger.load()
        turns = DeviceTurns()  # one device, whatever is on it
        num_ranks = settings.training_ranks if settings.does("training") else 1
        devices = device if num_ranks == 1 else f"{device} x {num_ranks}"
        self._report = UtilisationReport(
            services(), turns, functools.partial(_state_of, str(parent.hostname), devices)
        )
        if num_ranks > 1:
            # They load while we do.
            self._team = Team(
                settings, device=device, on_lost=functools.partial(end_process, "rank_lost")
            )
        backbones = {
            name: Backbone.load(source, device=device)
            for name, source in settings.served_models().items()
        }
        if self._team is not None:
            self._team.meet({name: backbone.digest for name, backbone in backbones.items()})
        for name, backbone in backbones.items():
            if settings.does("training"):
                ranks = Alone() if self._team is None else self._team.ranks(name)
                service = training_service(backbone, settings, ranks, between=turns.pause)
                _runners[name] = TrainingRunner(services(), service, base_model=name, turns=turns)
            services().ledger.register_base_model(name, backbone.facts())
            if settings.does("inference"):
                _servers[name] = InferenceServer(
                    services(),
                    backbone,
                    base_model=name,
                    turns=turns,
                    dispatch=functools.partial(_dispatch, parent),
                )
                _servers[name].start()
            _log.info("action=base_model_loaded name=%s digest=%s", name, backbone.digest)
        self._report.start()

    def stop(self, parent: Any) -> None:
        self._report.stop()
        for server in _servers.values():
            server.stop()
        for one in _runners.values():
            one.close()
        if self._team is not None:
            self._team.close()


def _state_of(worker: str, device: str) -> dict[str, str | int]:
    return {
        "worker": worker,
        "base_models": ",".join({*_runners, *_servers}),
        "device": device,
        "slots": sum(one.num_slots for one in _runners.values()),
    }


def _dispatch(parent: Any, kind: str, **fields: Any) -> None:
    """A Celery event of this worker; left out while the broker is away."""
    dispatcher = getattr(getattr(parent, "consumer", None), "event_dispatcher", None)
    if dispatcher is not None and dispatcher.enabled:
        try:
            dispatcher.send(kind, **fields)
        except (OperationalError, OSError) as error:
            _log.warning("action=event_lost kind=%s reason=%s", kind, error)


def install(app: Celery) -> None:
    app.steps["worker"].add(ModelStep)
