"""An environment host as a Celery worker: its bootstep, and what its tasks share.

VLA_HARNESS=maniskill VLA_ROLE=env-maniskill-1 celery -A vla_platform.app:app worker
    -Q rollout.maniskill,evaluation.maniskill --pool threads
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery, bootsteps
from celery.worker.consumer.tasks import Tasks

from vla_platform.client.inference import InferenceProxy
from vla_platform.control.environment_hosts import HostState, HostTable
from vla_platform.control.services import services
from vla_platform.envs.host import EnvironmentHost, HostLimits
from vla_platform.envs.inference_policy import InferencePolicy
from vla_platform.envs.policies import ExpertPolicy, Policy
from vla_platform.envs.remote import RemoteSessions
from vla_platform.envs.runner_pool import Isolation
from vla_platform.errors import ConfigurationError
from vla_platform.settings import Settings, load_settings

ANNOUNCE_S = 2.0
_log = logging.getLogger(__name__)

PolicyFactory = Callable[[str], Policy]
"""`factory(tenant)`: the tenant's way to actions, such as the inference proxy."""


@functools.cache
def proxy() -> InferenceProxy:
    """This process's way to the inference workers, shared by all its sessions and tenants."""
    return InferenceProxy.connect(load_settings().payload_urls[0], services().ledger.base_model_of)


POLICIES: dict[str, PolicyFactory] = {
    "expert": lambda tenant: ExpertPolicy(),
    "inference": lambda tenant: InferencePolicy(proxy(), sample=False),
}
"""By the name that a rollout or evaluation asks for."""


def policy_for(name: str, tenant: str) -> Policy:
    """Raises `ConfigurationError` for a name that this process does not know."""
    try:
        return POLICIES[name](tenant)
    except KeyError:
        raise ConfigurationError(
            f"no policies of kind {name!r} here; there are {', '.join(POLICIES)}"
        ) from None


@functools.cache
def host() -> EnvironmentHost:
    """The one of this process."""
    return EnvironmentHost(limits_of(load_settings()))


def limits_of(settings: Settings) -> HostLimits:
    return HostLimits(
        max_sessions=settings.max_sessions,
        max_per_tenant=settings.max_sessions_per_tenant,
        lease_s=settings.session_lease_s,
        memory_bytes=settings.env_memory_bytes,
        processes=settings.env_processes,
        isolation=Isolation(settings.env_isolation),
    )


def host_id_of(nodename: str) -> str:
    """Of a Celery worker, such as `env-tabletop-1@machine`: two workers never share a node name,
    while all replicas of a deployment have the same role."""
    return nodename.replace("@", ".")


class HostStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Announces the host, serves remote sessions, and asks to be replaced when worn out."""

    requires = (Tasks,)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._remote: RemoteSessions | None = None
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        settings = load_settings()
        self._stop = threading.Event()
        client = redis.Redis.from_url(
            settings.payload_urls[0], socket_timeout=30.0, socket_connect_timeout=5.0
        )
        self._remote = RemoteSessions(client, host(), host_id_of(parent.hostname))
        self._thread = threading.Thread(
            target=self._announce, args=(parent, settings, self._stop), name="announce", daemon=True
        )
        self._thread.start()

    def stop(self, parent: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(ANNOUNCE_S)
        if self._remote is not None:
            self._remote.close()

    def shutdown(self, parent: Any) -> None:
        host().shut_down()

    def _announce(self, parent: Any, settings: Settings, stop: threading.Event) -> None:
        table = HostTable(services().ledger.client, ttl_s=3 * ANNOUNCE_S)
        while not stop.is_set():
            worn_out = host().worn_out
            state = HostState(
                host_id=host_id_of(parent.hostname),
                harness=settings.harness,
                capacity=settings.max_sessions,
                in_flight=host().num_sessions,
                accepting=worn_out is None,
                tenants=host().remote_sessions(),
            )
            try:
                table.announce(state)
            except redis.RedisError as error:
                _log.warning("action=announce_failed reason=%s", error)
            if worn_out is not None and host().num_sessions == 0:
                _log.warning("action=host_worn_out reason=%s", worn_out)
                parent.app.control.shutdown(destination=[parent.hostname])
                return
            stop.wait(ANNOUNCE_S)
        table.withdraw(state)


def install(app: Celery) -> None:
    app.steps["consumer"].add(HostStep)
