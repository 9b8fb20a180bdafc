"""Hints: lost where the broker is away, errors where they are wrong."""

from __future__ import annotations

import pytest
from celery import Celery

from vla_platform.control import dispatch


@pytest.fixture
def away() -> Celery:
    """Celery with a broker that refuses connections."""
    app = Celery("away", broker="redis://127.0.0.1:1/0")
    app.conf.task_publish_retry_policy = {"max_retries": 0}
    app.set_current()
    return app


def test_a_hint_that_cannot_be_sent_is_lost_and_said_to_be(
    away: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    dispatch.prepare("acme", "sft-1")
    sent = dispatch.evaluate(suite_name="tabletop/reach", evaluation_id="e")
    lost = [line for line in caplog.messages if line.startswith("action=hint_lost")]
    assert (sent, len(lost)) == (False, 2)


def test_what_cannot_be_encoded_is_an_error(away: Celery) -> None:
    with pytest.raises(Exception, match=r"not JSON serializable|EncodeError"):
        dispatch.evaluate(suite_name="tabletop/reach", evaluation_id=object())
