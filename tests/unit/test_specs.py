"""Specs refuse at the edge, with field, value and hint; signatures are deterministic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.errors import SpecError
from vla_platform.schema import Schema
from vla_platform.specs import (
    MAX_SPEC_BYTES,
    SFTSpec,
    canonical_json,
    check_name,
    json_schema,
    parse_spec,
    parse_spec_json,
    parse_spec_yaml,
)

GOOD = {"kind": "sft", "policy": "pick", "dataset": {"path": "demos"}, "steps": 100}


def with_field(path: str, value: object) -> dict[str, object]:
    spec = json.loads(json.dumps(GOOD))
    *parents, last = path.split(".")
    at = spec
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    return spec


def test_the_smallest_spec_gets_documented_defaults():
    spec = parse_spec(GOOD)
    assert isinstance(spec, SFTSpec)
    assert (spec.base_model, spec.action_module.kind, spec.batch_size) == ("tiny", "oft", 8)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[("batch_size", bad) for bad in (0, -1, 1.5, True, "8", 10**9, float("nan"))],
        *[
            ("optimizer.lr", bad)
            for bad in (-1.0, 0, float("nan"), float("inf"), 1e10, "1e-4", True)
        ],
        *[("steps", bad) for bad in (0, -1, 10**9)],
        *[("checkpoint", {"every_steps": bad}) for bad in (0, 101)],
        *[("priority", bad) for bad in (-1, 10)],
        ("epochs", 2),
        ("queue", "training"),
        ("kind", "pickle"),
        ("version", 2),
        ("gradient_accumulation", 3),
        ("dataset.episodes", [1, 1]),
        ("optimizer.schedule", {"min_lr": 0.5}),
        ("action_module", {"kind": "flow_matching", "hidden_dim": 100, "num_heads": 3}),
        ("description", "x" * 5000),
        ("policy", "x" * 10_000),
    ],
)
def test_refuses_what_is_out_of_range_b12_b13_b15_b23(path: str, value: object):
    with pytest.raises(SpecError) as caught:
        parse_spec(with_field(path, value))
    assert caught.value.code == "spec_invalid"


@pytest.mark.parametrize(
    "name",
    ["../other", "a/b", "a\\b", "%2e%2e", ".", "", " a", "a\0", "a\n", "a\r", "a\t", "a\u202e",
     "a\u200b", "\u0430bc", "cafe\u0301", "caf\u00e9", "A", "-a", "a" * 64],
)  # fmt: skip
def test_names_are_plain_ascii_b01_b02_b03(name: str):
    with pytest.raises(ValueError, match="a-z"):
        check_name(name)
    with pytest.raises(SpecError):
        parse_spec(with_field("policy", name))


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True))
def test_every_documented_name_is_taken(name: str):
    assert name == check_name(name)


def test_unknown_fields_get_the_nearest_name_b09():
    with pytest.raises(SpecError) as caught:
        parse_spec(with_field("batch_sise", 4))
    assert "did you mean 'batch_size'?" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        parse_spec(with_field("lerning_rate", 4))
    assert "did you mean 'optimizer.lr'?" in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(SpecError) as caught:
        parse_spec(with_field("batch_size", 0) | {"seed": -1})
    assert {"batch_size", "seed"} == {p["field"] for p in caught.value.details["problems"]}


def test_duplicate_keys_are_refused_b10():
    with pytest.raises(SpecError, match="steps twice"):
        parse_spec_json('{"kind": "sft", "steps": 1, "steps": 2}')
    with pytest.raises(SpecError, match="steps twice"):
        parse_spec_yaml("kind: sft\nsteps: 1\nsteps: 2\n")


def test_size_and_depth_are_bounded_before_parsing_b11():
    with pytest.raises(SpecError, match="bytes"):
        parse_spec_json(" " * (MAX_SPEC_BYTES + 1))
    with pytest.raises(SpecError, match="deeper"):
        parse_spec_json("[" * 10_000)
    with pytest.raises(SpecError, match="bytes"):
        parse_spec_yaml(" " * (MAX_SPEC_BYTES + 1))


@pytest.mark.parametrize("text", ["{", "kind: [", "- a", "kind: !!python/object:os.system {}"])
def test_text_that_is_no_spec_is_refused(text: str):
    with pytest.raises(SpecError):
        parse_spec_yaml(text)


def test_yaml_reads_scientific_notation_as_a_number():
    spec = parse_spec_yaml(
        "kind: sft\npolicy: p\nsteps: 5\ndataset: {path: d}\noptimizer: {lr: 1e-4}\n"
    )
    assert spec.optimizer.lr == 1e-4


def test_round_trip_keeps_the_spec():
    spec = parse_spec(GOOD)
    assert spec == parse_spec(spec)
    assert spec == parse_spec_json(canonical_json(spec.model_dump(mode="json")))
    assert set(json_schema()["discriminator"]["mapping"]) == {"sft", "rl"}


def test_environment_options_may_be_lists_of_text():
    options = {"cameras": ["top"], "gripper": False, "reach_radius": 0.06, "max_steps": 16}
    spec = parse_spec(
        {
            "kind": "rl", "policy": "p", "init_from": "p/r/1", "updates": 1,
            "environment": {"id": "tabletop/reach", "options": options},
        }
    )  # fmt: skip
    assert (
        options
        == json.loads(canonical_json(spec.model_dump(mode="json")))["environment"]["options"]
    )
    with pytest.raises(SpecError):
        parse_spec(spec.model_dump() | {"environment": {"id": "a/b", "options": {"x": [{"y": 1}]}}})


SCHEMA = {
    "base_model": "tiny", "base_digest": "0" * 64, "cameras": ["a", "b"], "image_size": 128,
    "state_dim": 3, "action_dim": 2, "chunk": 8, "action_module": "oft", "state_input": "encoder",
}  # fmt: skip


def test_the_signature_ignores_key_order_and_process():
    forward = Schema.from_dict(dict(SCHEMA))
    backward = Schema.from_dict(dict(reversed(list(SCHEMA.items()))))
    code = f"from vla_platform.schema import Schema; print(Schema.from_dict({SCHEMA}).signature)"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert forward.signature == backward.signature == elsewhere


@pytest.mark.parametrize(
    ("field", "value"), [("cameras", ["b", "a"]), ("chunk", 9), ("base_digest", "1" * 64)]
)
def test_the_signature_tells_interfaces_apart(field: str, value: object):
    other = Schema.from_dict(SCHEMA | {field: value})
    assert Schema.from_dict(dict(SCHEMA)).signature != other.signature


def test_a_run_may_evaluate_itself() -> None:
    spec = parse_spec(
        {
            "kind": "sft", "policy": "p", "steps": 10, "dataset": {"path": "x"},
            "evaluation": {"every_updates": 5, "suite": "tabletop/reach"},
        }
    )  # fmt: skip
    assert spec.evaluation is not None
    assert (spec.evaluation.every_updates, spec.evaluation.episodes) == (5, 20)
    for wrong in ({"every_updates": 0}, {"suite": "../x"}, {"policy": "p"}):
        raw = {"every_updates": 5, "suite": "tabletop/reach", **wrong}
        with pytest.raises(SpecError):
            parse_spec(
                {"kind": "sft", "policy": "p", "steps": 10, "dataset": {"path": "x"},
                 "evaluation": raw}
            )  # fmt: skip
