"""The reconciler: what the ledger says is due and no live message carries is sent again."""

from __future__ import annotations

from vla_platform.control import dispatch, production
from vla_platform.control.ledger import Due
from vla_platform.control.services import Services
from vla_platform.control.tenants import restore_acls


def reconcile(services: Services) -> Due:
    """One round. Safe to run twice and at once: every receiver asks the ledger first."""
    due = services.ledger.reap()
    for run in due.prepare:
        dispatch.prepare(services.ledger.workload(run)["tenant"], run)
    for run in due.admit:
        production.admit(services, services.ledger.workload(run)["tenant"], run)
    for run in due.produce:
        dispatch.produce(services.ledger.workload(run)["tenant"], run)
    for base_model in due.train:
        job = services.ledger.first_ready(base_model)
        if job is not None:
            dispatch.train(
                job_id=job.job_id,
                tenant=job.tenant_id,
                partition_id=job.partition_id,
                base_model=base_model,
            )
    clear_partitions(services)
    return due


def clear_partitions(services: Services) -> int:
    """Remove the samples of ended jobs; returns how many partitions that were."""
    cleared = services.ledger.take_cleared()
    for partition_id, tenant in cleared:
        services.payloads.clear(partition_id, tenant)
    return len(cleared)


def restore_tenants(services: Services) -> list[str]:
    """Bring back the broker users that the control Redis has lost."""
    return restore_acls(services.ledger.client, services.objects, payload=services.payload_client)
