"""What a manifest must say, and what gets it refused (B64)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from vla_storage.canary import Canary
from vla_storage.errors import ManifestInvalidError
from vla_storage.manifests import Lineage, Manifest, ObjectEntry, parse, serialize

KEY = b"k" * 32
MANIFEST = Manifest(
    tenant_id="a",
    policy="reach",
    workload_id="w1",
    step=10,
    policy_version=3,
    position=80,
    objects=(
        ObjectEntry(name="module.safetensors", size=4, sha256="0" * 64, etag='"e"'),
        ObjectEntry(name="state.json", size=2, sha256="f" * 64, etag='"f"'),
    ),
    lineage=Lineage(
        spec_digest="s",
        dataset_digest="d",
        base_digest="b",
        schema_signature="g",
        parent=None,
        versions={"torch": "2", "platform": "0.1"},
    ),
    created="2026-01-01T00:00:00+00:00",
)


def reason(data: bytes, *, tenant_id: str = "a", signing_key: bytes | None = KEY) -> str:
    with pytest.raises(ManifestInvalidError) as caught:
        parse(data, tenant_id=tenant_id, signing_key=signing_key)
    assert caught.value.details["security"] == (
        caught.value.details["reason"] in {"foreign_tenant", "foreign_object"}
    )
    return str(caught.value.details["reason"])


def edited(edit: Callable[[dict[str, Any]], object], *, resign: bool = True) -> bytes:
    """The manifest after an edit, signed with the right key again unless told otherwise."""
    from vla_storage import manifests

    outer = json.loads(serialize(MANIFEST, KEY))
    edit(outer["manifest"])
    if resign:
        outer["signature"] = manifests._sign(outer["manifest"], KEY, "a")
    return json.dumps(outer).encode()


def test_round_trip() -> None:
    assert parse(serialize(MANIFEST, KEY), tenant_id="a", signing_key=KEY) == MANIFEST


def test_equal_manifests_give_equal_bytes() -> None:
    shuffled = replace(
        MANIFEST,
        lineage=replace(MANIFEST.lineage, versions={"platform": "0.1", "torch": "2"}),
    )
    assert serialize(MANIFEST, KEY) == serialize(shuffled, KEY)


def test_object_keys_carry_their_digest() -> None:
    assert [entry.relative_key for entry in MANIFEST.objects] == [
        "module-0000000000000000.safetensors",
        "state-ffffffffffffffff.json",
    ]


def test_a_reader_without_the_key_still_checks_the_rest() -> None:
    data = serialize(MANIFEST, b"another key")

    assert parse(data, tenant_id="a", signing_key=None) == MANIFEST
    assert reason(data, signing_key=None, tenant_id="b") == "foreign_tenant"


def objects(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["objects"][0].update(changes)


def field(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw.update(changes)


@pytest.mark.parametrize(
    ("expected", "edit"),
    [
        ("foreign_object", objects(name="b/policies/reach/module.safetensors")),
        ("foreign_object", objects(name="../module.safetensors")),
        ("object_name", objects(name="..")),
        ("object_name", objects(name="module.safetensors\n")),
        ("duplicate_object", objects(name="state.json")),
        ("malformed", objects(sha256="0" * 63)),
        ("malformed", objects(size=-1)),
        ("malformed", objects(size=True)),
        ("malformed", objects(extra=1)),
        ("step", field(step=-1)),
        ("step", field(step=1.5)),
        ("step", field(step=10**10)),
        ("step", field(step="10")),
        ("version", field(version=3)),
        ("version", field(version=None)),
        ("version", field(version=True)),
        ("foreign_tenant", field(tenant_id="b")),
        ("malformed", field(policy="../x")),
        ("malformed", field(workload_id="a/b")),
        ("malformed", field(policy_version=-1)),
        ("malformed", field(lineage={})),
        ("malformed", field(objects={})),
        ("malformed", field(objects=[1])),
        ("malformed", field(unknown=1)),
    ],
)
def test_b64_refused_although_signed(
    expected: str, edit: Callable[[dict[str, Any]], object]
) -> None:
    assert expected == reason(edited(edit))


def test_b64_signatures() -> None:
    data = serialize(MANIFEST, KEY)
    unsigned = json.loads(data)
    del unsigned["signature"]
    of_other_tenant = json.loads(serialize(replace(MANIFEST, tenant_id="b"), KEY))
    transplanted = {**json.loads(data), "signature": of_other_tenant["signature"]}

    assert reason(json.dumps(unsigned).encode()) == "signature_missing"
    assert reason(json.dumps(transplanted).encode()) == "signature_wrong"
    assert reason(data, signing_key=b"other") == "signature_wrong"
    assert reason(data, tenant_id="b") == "foreign_tenant"


def test_b61_edited_metadata_breaks_the_signature() -> None:
    assert reason(edited(field(policy_version=4), resign=False)) == "signature_wrong"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"manifest":{},"manifest":{}}',
        b" " * (2 << 20),
    ],
)
def test_b64_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(ManifestInvalidError) as caught:
        parse(data, tenant_id="a", signing_key=KEY)
    assert caught.value.details["reason"] in {"malformed", "version"}


def test_the_writer_refuses_what_the_reader_refuses() -> None:
    with pytest.raises(ManifestInvalidError):
        serialize(replace(MANIFEST, step=-1), KEY)
    with pytest.raises(ManifestInvalidError):
        serialize(replace(MANIFEST, policy="A"), KEY)


CANARY = Canary(
    digest="a" * 64, numbers=(0.25, -1.0), shape=(1, 2), environment={"torch": "2", "device": "x"}
)


def test_the_canary_is_part_of_what_is_signed_and_not_of_what_twins_share() -> None:
    known = replace(MANIFEST, canary=CANARY)
    data = serialize(known, KEY)
    assert known == parse(data, tenant_id="a", signing_key=KEY)
    assert known.content() == MANIFEST.content()
    outer = json.loads(data)
    outer["manifest"]["canary"]["numbers"][0] = 0.5
    assert reason(json.dumps(outer).encode()) == "signature_wrong"


@pytest.mark.parametrize(
    "canary",
    [
        {},
        {"digest": "0" * 64},
        {**asdict(CANARY), "numbers": ["1"]},
        {**asdict(CANARY), "numbers": [True]},
        {**asdict(CANARY), "shape": [1.5]},
        {**asdict(CANARY), "digest": "x"},
        {**asdict(CANARY), "extra": 1},
    ],
)
def test_b64_a_canary_that_is_none(canary: dict[str, Any]) -> None:
    assert reason(edited(field(canary=canary))) == "malformed"


def test_manifests_of_the_release_before_are_read() -> None:
    """F77: version 1 had no canary."""

    def older(raw: dict[str, Any]) -> None:
        del raw["canary"]
        raw["version"] = 1

    found = parse(edited(older), tenant_id="a", signing_key=KEY)
    assert found == replace(MANIFEST, version=1)
    assert reason(edited(field(version=1))) == "malformed"
