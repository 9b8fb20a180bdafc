"""The reconciler: what the ledger says is due and no live message carries is sent again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import redis

from vla_platform.control import (
    dispatch,
    evaluations,
    production,
    schedule_firings,
    schedules,
    settlement,
    usage,
)
from vla_platform.control.outcomes import finish_if_through, record_ended
from vla_platform.control.payload_access import restore_payload_access
from vla_platform.control.recovery import recover_if_lost
from vla_platform.control.services import Services
from vla_platform.control.tenant_records import TENANTS_KEY
from vla_platform.control.tenants import restore_acls
from vla_platform.control.training_job import Due
from vla_platform.control.workloads import load_spec
from vla_storage.errors import CodedError, StorageError

COLLECT_S = 60.0
SCHEDULES_S = 60.0
_log = logging.getLogger(__name__)


def reconcile(services: Services) -> Due:
    """One round. Safe to run twice and at once: every receiver asks the ledger first."""
    recover_if_lost(services)
    due = services.ledger.due()
    _each("prepare", due.prepare, lambda run: _prepare(services, run))
    _each("admit", due.admit, lambda run: production.admit(services, _tenant(services, run), run))
    _each("settle", due.stranded, lambda run: settle_stranded(services, run))
    _each("produce", due.produce, lambda run: dispatch.produce(services.ledger.workload(run)))
    for stage, base_model in due.stages:
        dispatch.stage(stage, base_model)
    for base_model in due.train:
        job = services.ledger.first_ready(base_model)
        if job is not None:
            dispatch.train(job)
    _each("record", services.ledger.ended(), lambda run: record_ended(services, run))
    keep_payloads(services)
    schedule_firings.look_at_due(services)
    if services.ledger.is_due("schedules", every_s=SCHEDULES_S):
        tenants = services.ledger.client.smembers(TENANTS_KEY)
        _each("schedules", tenants, lambda tenant: _keep_schedules(services, tenant))
    if services.ledger.is_due("usage", every_s=usage.WRITE_S):
        usage.write_statements(services)
    return due


def _each(what: str, items: Iterable[str], act: Callable[[str], object]) -> None:
    """One tenant's run that cannot be served, for whatever reason, holds up nobody else's; a
    service that is down ends the round."""
    for item in items:
        try:
            act(item)
        except Exception as error:
            if isinstance(error, CodedError) and error.retryable:
                raise
            _log.exception("action=reconcile_failed step=%s item=%s", what, item)


def _tenant(services: Services, run: str) -> str:
    return services.ledger.workload(run)["tenant"]


def _prepare(services: Services, run: str) -> None:
    ledger = services.ledger
    if not ledger.is_prepared_by_somebody(run) and ledger.is_due(f"prepare:{run}", every_s=5.0):
        dispatch.prepare(_tenant(services, run), run)


def _keep_schedules(services: Services, tenant: str) -> None:
    schedules.restore(services, tenant)
    settlement.resend_lost(services, tenant)
    schedule_firings.look_at_claimed(services, tenant)


def settle_stranded(services: Services, run: str) -> None:
    """What is published counts, also where its worker died before it could say so; the rest is
    redone."""
    w = services.ledger.workload(run)
    store = services.checkpoints(w["tenant"])
    newest = store.latest(w["policy"], run)
    if newest is not None and newest.step > int(w["durable_step"]):
        services.ledger.checkpointed(
            run, position=newest.position, checkpoint=newest.checkpoint_id, step=newest.step
        )
        services.ledger.publish_version(
            w["policy_key"], newest.policy_version, base_model=w["base_model"]
        )
        spec = load_spec(services, w["tenant"], run)
        evaluations.begin_if_due(services, w["tenant"], run, spec, newest)
    services.ledger.fall_back(run)
    finish_if_through(services.ledger, run)


def keep_payloads(services: Services) -> int:
    """Bring a restarted payload Redis up to date, and remove the samples of ended jobs; now and
    then those of jobs that the ledger knows no longer. Returns how many partitions those were.

    An outage of the payload store is waited for: jobs that need it go back by themselves, and what
    was not removed is one of those that nobody knows.
    """
    try:
        restore_payload_access(
            services.payload_clients,
            services.objects,
            expected=services.ledger.client.smembers(TENANTS_KEY),
        )
        cleared = services.ledger.take_cleared()
        for partition_id, tenant in cleared:
            services.payloads.clear(partition_id, tenant)
        if not services.ledger.is_due("payloads:collect", every_s=COLLECT_S):
            return len(cleared)
        live = services.ledger.live_partitions()
        return len(cleared) + services.payloads.collect(live, grace_s=COLLECT_S)
    except (StorageError, redis.RedisError) as error:
        _log.warning("action=payloads_not_kept reason=%s", error)
        return 0


def restore_tenants(services: Services) -> list[str]:
    """Bring back the broker users that the control Redis has lost."""
    return restore_acls(services.ledger.client, services.objects)
