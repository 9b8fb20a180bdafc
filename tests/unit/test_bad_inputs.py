"""What is refused before it can do anything: rows of bad-inputs that have no home of their own."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from vla_platform.broker import MAX_ARGUMENT_BYTES, MAX_MESSAGE_BYTES, fresh_message, ingress_queue
from vla_platform.client.connection import Connection
from vla_platform.control.evaluations import Outstanding
from vla_platform.control.schedule_states import schedule_key
from vla_platform.control.training_job import TrainingJob
from vla_platform.control.trends import trend_key
from vla_platform.envs.evaluation_records import EvaluationArchive
from vla_platform.envs.suites import suite
from vla_platform.errors import SpecError
from vla_platform.specs import canonical_json, parse_spec, parse_spec_json
from vla_platform.specs.cron import firings
from vla_storage.audit_archive import AuditArchive
from vla_storage.checkpoints import CheckpointRef, CheckpointStore
from vla_storage.errors import CodedError
from vla_storage.marks import Marks, marks_key
from vla_storage.objects import MemoryObjectStore

SFT = {"kind": "sft", "policy": "p", "steps": 10, "dataset": {"path": "x"}}
RL = {
    "kind": "rl", "policy": "p", "init_from": "p/sft-1/10", "updates": 5,
    "environment": {"id": "tabletop/reach"},
}  # fmt: skip
NAN, INF = math.nan, math.inf


def change(raw: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(raw))
    *path, last = place.split(".")
    at = changed
    for name in path:
        at = at.setdefault(name, {})
    at[last] = value
    return changed


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("algorithm.gamma", 1.0001), ("algorithm.gamma", -0.1), ("algorithm.gamma", NAN),
        ("algorithm.lam", -0.1), ("algorithm.lam", 1.5), ("algorithm.clip_low", NAN),
        ("algorithm.clip_high", INF), ("algorithm.clip_low", 0.0), ("algorithm.target_kl", INF),
        ("algorithm.entropy_weight", INF), ("algorithm.value_weight", -1.0),
        ("algorithm.dual_clip", 0.5), ("optimizer.lr", NAN), ("updates", 0),
        ("max_policy_staleness", -1), ("rollout.horizon", 0), ("updates", True),
    ],
)  # fmt: skip
def test_b14_numbers_of_reinforcement_learning(place: str, value: Any) -> None:
    raw = change(change(RL, "algorithm.kind", "ppo"), place, value)
    with pytest.raises(SpecError) as caught:
        parse_spec(raw)
    if not isinstance(value, float) or math.isfinite(value):
        assert place in caught.value.details["problems"][0]["field"]


@pytest.mark.parametrize("raw", [SFT, RL])
@pytest.mark.parametrize("version", [0, 2, "1"])
def test_b24_a_client_of_another_release_is_told_to_upgrade(
    raw: dict[str, Any], version: Any
) -> None:
    with pytest.raises(SpecError, match="upgrade the older one"):
        parse_spec({**raw, "version": version})


def test_b24_f77_what_a_newer_release_wrote_beside_is_left_out() -> None:
    """A training job's descriptor with fields of the next release is still understood."""
    fields = {
        "job_id": "j", "workload": "w", "tenant_id": "a", "policy_key": "a/p", "task_type": "sft",
        "lifecycle": "sft", "base_model": "tiny", "schema_signature": "s", "partition_id": "p",
        "position": "0", "priority": "0", "state": "leased", "fence": "1", "attempt": "1",
        "of_the_next_release": "x",
    }  # fmt: skip
    assert TrainingJob.from_hash(fields).job_id == "j"
    assert (
        Outstanding.from_json(
            '{"evaluation_id":"e","policy":"p","policy_version":1,"suite":"s","due":0,"sent":0,'
            '"num_sends":1,"checkpoint":"","schedule":"nightly"}'
        ).schedule
        == "nightly"
    )  # as the release before wrote it


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_b31_numbers_that_are_none_are_refused_on_both_sides(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON compliant|not allowed|Out of range"):
        canonical_json({"value": float(text)})
    with pytest.raises(SpecError):
        parse_spec_json(f'{{"kind":"sft","policy":"p","steps":1,"seed":{text}}}')


def message(arguments: dict[str, Any], task: str = "ingress.cancel") -> dict[str, Any]:
    body = json.dumps([[], arguments, {}]).encode()
    return {
        "body": base64.b64encode(body).decode(),
        "headers": {"task": task},
        "properties": {"body_encoding": "base64"},
    }


def test_b32_a_message_that_carries_data_is_refused_on_both_sides() -> None:
    """Samples belong into the payload store."""
    with pytest.raises(ValueError, match="too long"):
        fresh_message(message({"request_id": "r", "run": "x" * 30_000_000}), ingress_queue("a"))
    with pytest.raises(TypeError, match="text"):
        fresh_message(message({"request_id": "r", "run": NAN}), ingress_queue("a"))
    # What the client lets through arrives: base64 and what stands around it fit.
    most = {"request_id": "r" * 32, "run": "x" * MAX_ARGUMENT_BYTES}
    assert len(message(most)["body"]) < MAX_MESSAGE_BYTES
    assert fresh_message(message(most), ingress_queue("a"))["headers"]["task"] == "ingress.cancel"
    connection = object.__new__(Connection)  # nothing of it is used before the refusal
    with pytest.raises(SpecError, match="at most"):
        connection.call("ingress.cancel", timeout_s=1, shown="", run="x" * 30_000_000)


EVIL = (
    "../other", "a/../../b", "a/b", "a\\b", "%2e%2e", "%2e%2e%2fb", ".", "..", "", " a", "a ",
    "/etc/passwd", "file:///etc/passwd", "http:///#/../etc", "a?x=../..", "a#../b", "a\0b", "a\nb",
    "\u202ea", "\u0430", "A" * 300,
)  # fmt: skip


def objects() -> MemoryObjectStore:
    return MemoryObjectStore()


KEYS: dict[str, Callable[[str], object]] = {
    "tenant of checkpoints": lambda x: CheckpointStore(objects=objects(), tenant_id=x),
    "policy of checkpoints": lambda x: CheckpointStore(objects=objects(), tenant_id="a").list(x),
    "policy of an id": lambda x: CheckpointRef.parse(f"{x}/sft-1/10"),
    "run of an id": lambda x: CheckpointRef.parse(f"p/{x}/10"),
    "step of an id": lambda x: CheckpointRef.parse(f"p/sft-1/{x}"),
    "marks": lambda x: marks_key("a", x),
    "marks' tenant": lambda x: marks_key(x, "p"),
    "alias": lambda x: Marks().with_alias(x, None),
    "schedule": lambda x: schedule_key("a", x),
    "trend": lambda x: trend_key("a", x),
    "audit": lambda x: AuditArchive(objects(), x),
    "evaluation": lambda x: EvaluationArchive(objects(), "a", x),
    "evaluation's tenant": lambda x: EvaluationArchive(objects(), x, "e"),
    "suite": lambda x: suite(x, episodes=1),
    "policy of a spec": lambda x: parse_spec({**SFT, "policy": x}),
}


@pytest.mark.parametrize("value", EVIL)
@pytest.mark.parametrize("place", KEYS)
def test_pf50_no_path_escapes_by_any_field_that_becomes_a_key(place: str, value: str) -> None:
    """B06: nothing is decoded, cleaned or cut before it is used; it is refused."""
    ids = {"run of an id", "evaluation"}  # longer, and with capitals
    if place in ids and value == "A" * 300:
        value *= 2
    with pytest.raises((CodedError, ValueError)):
        KEYS[place](value)


def test_nothing_here_is_about_time() -> None:
    """B71: no field of a spec takes a time; schedules take cron alone, and firings carry their
    zone."""
    (first,) = [
        one for one, _ in zip(
            firings("0 0 * * *", "UTC", after=datetime(2026, 1, 1, tzinfo=UTC)), [0], strict=False
        )
    ]  # fmt: skip
    assert first.utcoffset() is not None
    for name in ("at", "start", "eta", "countdown", "not_before"):
        with pytest.raises(SpecError, match="unknown field"):
            parse_spec({**SFT, name: "9999-01-01"})
