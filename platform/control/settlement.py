"""What a finished evaluation leaves: a point in its policy's trend, its checkpoint's score, what it
used on its tenant's account. What was sent and not heard of is sent again until then."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from vla_platform.control import trends, usage
from vla_platform.control.evaluations import (
    MOST_SENDS,
    RESEND_S,
    Outstanding,
    changed,
    charge,
    evaluations_key,
    keep_score,
    now,
    send,
)
from vla_platform.control.schedule_firings import finished
from vla_platform.control.services import Services
from vla_platform.envs.evaluation_records import EvaluationArchive, EvaluationRecord
from vla_storage.errors import CodedError

_log = logging.getLogger(__name__)


def settle(services: Services, record: EvaluationRecord) -> None:
    """Safe to repeat: whoever has played it calls it, also for a message that came again, and the
    reconciler where that one died before. What it used is charged once, in the step that takes it
    off the evaluations under way.

    Raises what the stores raise: it is under way still, and settled by whoever comes next.
    """
    client, tenant = services.ledger.client, record.tenant
    is_known = client.hexists(evaluations_key(tenant), record.evaluation_id)
    if not is_known and trends.knows(services.objects, record):
        return
    trends.record(services, record)
    if is_known:
        keep_score(services, record)
        finished(services, tenant, record.evaluation_id, record=record)
    else:  # it was given up before its end, or nobody noted it
        charge(client, record, usage.today(client))


def _put_back(client: Any, tenant: str, known: Outstanding) -> None:
    """The broker is away: it was not sent, and is at the next look."""
    changed(client, tenant, known.evaluation_id, lambda _: known)


def resend_lost(services: Services, tenant: str) -> int:
    """Send again what nothing was heard of, and give up what was sent too often; returns how many
    were sent."""
    client = services.ledger.client
    at = now(client)
    sent = 0

    def counted(known: Outstanding) -> Outstanding | None:
        if at - known.sent < RESEND_S:
            return None  # somebody was heard of meanwhile, or sent it
        return replace(known, sent=at, num_sends=known.num_sends + 1)

    for evaluation_id, raw in client.hgetall(evaluations_key(tenant)).items():
        known = Outstanding.from_json(raw)
        if at - known.sent < RESEND_S:
            continue
        record = EvaluationArchive(services.objects, tenant, evaluation_id).record()
        if record is not None:
            try:
                settle(services, record)
            except CodedError as error:
                _log.error(
                    "action=evaluation_not_settled evaluation=%s reason=%s", evaluation_id, error
                )
        elif known.num_sends >= MOST_SENDS:
            finished(services, tenant, evaluation_id, error=f"no end after {MOST_SENDS} tries")
        elif (again := changed(client, tenant, evaluation_id, counted)) is not None:
            try:
                if send(tenant, again):
                    sent += 1
                else:
                    _put_back(client, tenant, known)
            except (CodedError, ValueError) as error:
                finished(services, tenant, evaluation_id, error=str(error))
    return sent
