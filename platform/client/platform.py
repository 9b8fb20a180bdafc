"""The tenant's way in."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from vla_platform.client.checkpoints import CheckpointShelf
from vla_platform.client.connection import WAIT_S, Connection, answers
from vla_platform.client.environments import RemoteEnvironment
from vla_platform.client.inference import DEFAULT_TIMEOUT_S, InferenceProxy
from vla_platform.client.payload_queue import PayloadQueue
from vla_platform.client.runs import Run
from vla_platform.client.schedules import ScheduleBook
from vla_platform.control.usage import Statement, statements
from vla_platform.envs.base import Observation
from vla_platform.envs.harnesses import check_request
from vla_platform.envs.remote_protocol import request_text
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import AccessError, NotFoundError, SpecError
from vla_platform.inference.protocol import Prediction
from vla_platform.specs import WorkloadSpec, canonical_json, parse_spec
from vla_storage.checkpoints import CheckpointStore
from vla_storage.closing import Closing


class Platform(PayloadQueue, CheckpointShelf, ScheduleBook, Closing):
    """One tenant's session. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, url: str) -> None:
        self._connection = Connection(url)
        self.tenant = self._connection.tenant
        self._checkpoints = CheckpointStore(objects=self._connection.objects, tenant_id=self.tenant)
        self._proxy: InferenceProxy | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.close()
        self._connection.close()

    def predict(
        self,
        observations: Observation | Sequence[Observation],
        *,
        policy: str,
        version: int | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> Prediction:
        """Action chunks of a trained policy, un-normalised. Shape of `actions`: (B, H, A).

        `version`: a policy version, a checkpoint id, or None for the current one. Options and
        errors: see `InferenceProxy.predict`.
        """
        return self._inference().predict(
            observations,
            tenant=self.tenant,
            policy=policy,
            version=version,
            timeout_s=timeout_s,
            **options,
        )

    async def predict_async(
        self,
        observations: Observation | Sequence[Observation],
        *,
        policy: str,
        version: int | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> Prediction:
        """The same for asyncio."""
        return await self._inference().predict_async(
            observations,
            tenant=self.tenant,
            policy=policy,
            version=version,
            timeout_s=timeout_s,
            **options,
        )

    def _inference(self) -> InferenceProxy:
        with self._lock:
            if self._proxy is None:
                url = self._connection.payload_url
                if url is None:
                    raise SpecError(
                        "this platform URL names no payload server, which predictions need; "
                        "ask the operator for a new one (`vla tenants add`)",
                        problems=[],
                    )
                self._proxy = InferenceProxy.connect(url, self._base_model_of)
            return self._proxy

    def _base_model_of(self, tenant: str, policy: str) -> str:
        with answers():
            found = self._connection.redis.hget(self._connection.key("policies"), policy)
        if found is None:
            raise NotFoundError(
                f"no policy {tenant}/{policy[:80]}", policy_key=f"{tenant}/{policy[:80]}"
            )
        return str(found)

    def submit(self, spec: WorkloadSpec | Mapping[str, Any], *, timeout_s: float = 60.0) -> Run:
        """Enqueue a workload; returns when the platform has accepted it for good.

        Raises `SpecError` before anything is sent, `DatasetError`, `ConflictError` (the
        idempotency key was used for another spec), `QuotaError`, or `UnavailableError`: with an
        `idempotency_key` in the spec, submitting again then is safe.
        """
        checked = parse_spec(spec)
        key = checked.idempotency_key or uuid.uuid4().hex
        run_id = self._connection.call(
            "ingress.submit",
            timeout_s=timeout_s,
            shown=f"{self.tenant}/{checked.policy}, {checked.kind}",
            spec=canonical_json(checked.model_dump(mode="json")).decode(),
            key=key,
        )
        return Run(self._connection, run_id)

    def environment(
        self,
        env_id: str,
        *,
        options: Mapping[str, Any] | None = None,
        expert: bool = False,
        timeout_s: float = 60.0,
    ) -> RemoteEnvironment:
        """A session on one of the platform's environment hosts, such as `tabletop/push`.

        With `expert` the observations carry the scripted expert's action. Close it when done.
        Raises `SpecError`, `QuotaError`, `UnavailableError` (no host has room) or `SimulatorError`
        (the environment cannot be made).
        """
        if self._connection.payload_url is None:
            raise AccessError("this URL has no payload store; ask the operator for a new one")
        request = EnvironmentRequest(env_id=env_id, options=options or {}, expert=expert)
        check_request(request)
        place = self._connection.call(
            "ingress.open_environment",
            timeout_s=timeout_s,
            shown=env_id,
            environment=request_text(request),
        )
        client = redis.Redis.from_url(
            self._connection.payload_url, socket_timeout=2 * WAIT_S, socket_connect_timeout=10
        )
        try:
            return RemoteEnvironment(
                client,
                tenant=self.tenant,
                host_id=place["host"],
                session=place["session"],
                own_client=True,
            )
        except BaseException:
            client.close()
            raise

    def usage(self, month: str) -> list[Statement]:
        """What was used on each day of a month such as `2026-11` (UTC)."""
        return statements(self._connection.objects, f"{self.tenant}/usage/", month=month)

    def run(self, run_id: str) -> Run:
        """A run submitted earlier. Raises `NotFoundError`."""
        found = Run(self._connection, run_id)
        found.status()
        return found

    def runs(self) -> list[Run]:
        """All runs of the tenant, newest first."""
        with answers():
            ids = self._connection.redis.zrevrange(self._connection.key("workloads"), 0, -1)
        return [Run(self._connection, run_id) for run_id in ids]
