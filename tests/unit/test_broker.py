"""Nothing that a tenant writes into a message reaches Celery but a task's name and its text."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from vla_platform.broker import MAX_MESSAGE_BYTES, fresh_message

GIVEN = {"request_id": "r", "run": "sft-1"}
HOSTILE = {"callbacks": [{"task": "ingress.cancel", "options": {"queue": "ingress.b"}}]}


def message(**changes: Any) -> dict[str, Any]:
    body = changes.pop("body", [[], GIVEN, HOSTILE])
    encoded = base64.b64encode(json.dumps(body).encode()).decode()
    return {
        "body": encoded,
        "content-type": "application/json",
        "headers": {"task": "ingress.cancel", "eta": "2999-01-01", "reply_to": "x", "id": "mine"},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": "theirs",
            "delivery_info": {"exchange": "", "routing_key": "ingress.b", "priority": 9},
            "reply_to": "ingress.b",
        },
        **changes,
    }


def test_routing_callbacks_times_and_ids_are_the_platforms_own() -> None:
    fresh = fresh_message(message(), "ingress.a")
    arguments, given, embed = json.loads(base64.b64decode(fresh["body"]))
    assert (arguments, given) == ([], GIVEN)
    assert set(embed.values()) == {None}
    assert fresh["properties"]["delivery_info"]["routing_key"] == "ingress.a"
    assert fresh["properties"]["reply_to"] == ""
    assert fresh["properties"]["delivery_tag"] != "theirs"
    assert fresh["headers"]["eta"] is None
    assert fresh["headers"]["id"] != "mine"


def test_a_message_that_was_given_back_passes_again() -> None:
    fresh = fresh_message(message(), "ingress.a")
    again = fresh_message(fresh, "ingress.a")
    assert again["body"] == fresh["body"]


NESTED = json.loads("[" * 500 + "]" * 500)


@pytest.mark.parametrize(
    "bad",
    [
        1, None, [1], "text", {},
        message(headers=[]), message(headers={}), message(properties={}), message(properties=1),
        message(headers={"task": "sft.produce"}), message(headers={"task": {"a": 1}}),
        message(headers={"task": "ingress.submit"}), message(headers={"task": "celery.starmap"}),
        message(body=[]), message(body={}), message(body=[[1], GIVEN, {}]),
        message(body=[[], {**GIVEN, "more": "x"}, {}]), message(body=[[], {"run": "x"}, {}]),
        message(body=[[], {**GIVEN, "run": 1}, {}]), message(body=[[], list(GIVEN), {}]),
        message(body=[[], {**GIVEN, "run": NESTED}, 0]),
        {**message(), "body": 5}, {**message(), "body": "%%%"}, {**message(), "body": None},
        {**message(), "body": "A" * (MAX_MESSAGE_BYTES + 1)},
        message(properties={"body_encoding": "zip"}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_b26_b27_b28_b30(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        fresh_message(bad, "ingress.a")


@pytest.mark.parametrize("field", ["content-type", "content-encoding", "extra"])
def test_fields_that_celery_would_trip_over_are_replaced(field: str) -> None:
    fresh = fresh_message({**message(), field: {"a": 1}}, "ingress.a")
    assert fresh["content-type"] == "application/json"
    assert "extra" not in fresh
