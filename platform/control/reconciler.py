"""The reconciler: what the ledger says is due and no live message carries is sent again."""

from __future__ import annotations

import logging

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
from vla_platform.control.outcomes import finish_if_through, record_outcomes
from vla_platform.control.payload_access import restore_payload_access
from vla_platform.control.recovery import recover_if_lost
from vla_platform.control.services import Services
from vla_platform.control.tenant_records import TENANTS_KEY
from vla_platform.control.tenants import restore_acls
from vla_platform.control.training_job import Due
from vla_platform.control.workloads import load_spec
from vla_storage.errors import StorageError

COLLECT_S = 60.0
SCHEDULES_S = 60.0
_log = logging.getLogger(__name__)


def reconcile(services: Services) -> Due:
    """One round. Safe to run twice and at once: every receiver asks the ledger first."""
    recover_if_lost(services)
    due = services.ledger.due()
    for run in due.prepare:
        if services.ledger.is_prepared_by_somebody(run) or not services.ledger.is_due(
            f"prepare:{run}", every_s=5.0
        ):
            continue
        dispatch.prepare(services.ledger.workload(run)["tenant"], run)
    for run in due.admit:
        production.admit(services, services.ledger.workload(run)["tenant"], run)
    for run in due.stranded:
        settle_stranded(services, run)
    for run in due.produce:
        dispatch.produce(services.ledger.workload(run))
    for stage, base_model in due.stages:
        dispatch.stage(stage, base_model)
    for base_model in due.train:
        job = services.ledger.first_ready(base_model)
        if job is not None:
            dispatch.train(job)
    record_outcomes(services)
    clear_partitions(services)
    keep_payloads(services)
    schedule_firings.look_at_due(services)
    if services.ledger.is_due("schedules", every_s=SCHEDULES_S):
        for tenant in services.ledger.client.smembers(TENANTS_KEY):
            schedules.restore(services, tenant)
            settlement.resend_lost(services, tenant)
            schedule_firings.look_at_claimed(services, tenant)
    if services.ledger.is_due("usage", every_s=usage.WRITE_S):
        usage.write_statements(services)
    return due


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


def clear_partitions(services: Services) -> int:
    """Remove the samples of ended jobs; returns how many partitions that were."""
    cleared = services.ledger.take_cleared()
    for partition_id, tenant in cleared:
        services.payloads.clear(partition_id, tenant)
    return len(cleared)


def keep_payloads(services: Services) -> int:
    """Bring a restarted payload Redis up to date; now and then remove the samples of jobs that
    the ledger knows no longer. Returns how many partitions and bodies those were.

    An outage of the payload store is waited for: jobs that need it go back by themselves.
    """
    try:
        restore_payload_access(
            services.payload_clients,
            services.objects,
            expected=services.ledger.client.smembers(TENANTS_KEY),
        )
        if not services.ledger.is_due("payloads:collect", every_s=COLLECT_S):
            return 0
        return services.payloads.collect(services.ledger.live_partitions(), grace_s=COLLECT_S)
    except (StorageError, redis.RedisError) as error:
        _log.warning("action=payloads_not_kept reason=%s", error)
        return 0


def restore_tenants(services: Services) -> list[str]:
    """Bring back the broker users that the control Redis has lost."""
    return restore_acls(services.ledger.client, services.objects)
