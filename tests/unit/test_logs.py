"""Log lines say whose they are, stay one line, and keep secrets out (B75)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

import pytest

from vla_platform.logs import JsonFormatter, TextFormatter, bound, context, formatter


def line(kind: str, message: str, *args: object, **extra: object) -> str:
    record = logging.LogRecord("vla.x", logging.INFO, __file__, 1, message, args, None)
    vars(record).update(extra)
    return formatter(kind, process="gpu").format(record)


def test_json_lines_carry_what_the_context_says() -> None:
    with bound(tenant="a", workload="sft-1"), bound(job="sft-1-0-0"):
        found = json.loads(line("json", "action=slot_mounted policy=%s", "a/p"))
    assert {"a", "sft-1", "sft-1-0-0"} == {found[name] for name in ("tenant", "workload", "job")}
    assert (found["level"], found["process"], found["action"]) == ("INFO", "gpu", "slot_mounted")
    assert list(found)[:2] == ["time", "level"]
    assert datetime.fromisoformat(found["time"]).utcoffset() is not None
    assert context() == {}
    assert "tenant" not in json.loads(line("json", "later"))


def test_extra_fields_are_kept_but_for_celerys_own() -> None:
    found = json.loads(line("json", "action=retry", tenant="b", step=3, data={"big": 1}))
    assert (found["action"], found["tenant"], found["step"]) == ("retry", "b", 3)
    assert "data" not in found


def test_text_lines_end_with_what_is_not_said_yet() -> None:
    with bound(tenant="a", workload="sft-1"):
        told = line("text", "action=trained workload=sft-1 step=1")
    assert told.endswith("INFO/MainThread] action=trained workload=sft-1 step=1 tenant=a")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_b75_no_line_is_forged(kind: str) -> None:
    """Control characters, a fake prefix, and text that runs from right to left."""
    evil = "boom\n[2026-01-01 00:00:00,000: ERROR/x] all is lost\r\x1b[2J\u202egnp.exe"
    told = line(kind, "action=x reason=%s", evil, note=evil)
    assert len(told.splitlines()) == 1
    assert not {"\n", "\r", "\x1b", "\u202e"} & set(told)


@pytest.mark.parametrize("kind", ["text", "json"])
def test_b75_secrets_of_urls_are_left_out(kind: str) -> None:
    url = "redis://role.gpu:s3cr%2Ft@127.0.0.1:6379/0"
    try:
        raise ConnectionError(f"no answer from {url}")
    except ConnectionError:
        record = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "cannot reach %s", (url,), sys.exc_info()
        )
    record.endpoint = url
    told = formatter(kind).format(record)
    assert "s3cr" not in told
    assert "redis://role.gpu:***@127.0.0.1" in told
    assert "ConnectionError" in told


def test_the_two_formats() -> None:
    assert isinstance(formatter("json"), JsonFormatter)
    assert isinstance(formatter("text"), TextFormatter)


def test_b75_an_errors_text_does_not_look_like_a_line_of_its_own() -> None:
    evil = "boom\n[2026-01-01 00:00:00,000: CRITICAL/x] action=all_is_lost\x1b[2J"
    try:
        raise ValueError(evil)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    first, *rest = formatter("text").format(record).splitlines()
    assert first.endswith("] failed")
    assert len(rest) > 2
    assert [part for part in rest if not part.startswith("    ") or "\x1b" in part] == []
