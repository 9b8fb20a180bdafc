"""The manifest: the signed, digest-bearing JSON that alone makes a checkpoint visible.

Wire form: `{"manifest": {...}, "signature": "<hex>"}`. The signature is HMAC-SHA256 over the
manifest's canonical JSON (sorted keys, no spaces) with a key derived from the platform's key and
the tenant id, so that no manifest signed for one tenant verifies for another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from vla_storage.canary import Canary
from vla_storage.errors import InvalidKeyError, ManifestInvalidError
from vla_storage.names import check_id, check_name

__all__ = ["Lineage", "Manifest", "ManifestReason", "ObjectEntry", "parse", "serialize"]

MANIFEST_VERSION = 2
_READABLE = (1, MANIFEST_VERSION)
"""Version 1 had no canary."""
MAX_MANIFEST_BYTES = 1 << 20
MAX_STEP = 10**10 - 1  # ten digits in the key
_OBJECT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}(\.[a-z0-9]{1,16})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestReason(StrEnum):
    """Why a manifest was refused: `ManifestInvalidError.details["reason"]`."""

    MALFORMED = "malformed"
    """Not JSON, a missing, unknown or wrongly typed field, or too large."""
    VERSION = "version"
    """A manifest version that this release does not read."""
    SIGNATURE_MISSING = "signature_missing"
    SIGNATURE_WRONG = "signature_wrong"
    """Edited, or signed with another key or for another tenant."""
    FOREIGN_TENANT = "foreign_tenant"
    """It belongs to another tenant than the place it was found in: a security event."""
    FOREIGN_OBJECT = "foreign_object"
    """It names an object outside its own checkpoint: a security event."""
    OBJECT_NAME = "object_name"
    """An object name outside the allowed alphabet."""
    DUPLICATE_OBJECT = "duplicate_object"
    STEP = "step"
    """Negative, or not an integer of at most ten digits."""
    WRONG_PLACE = "wrong_place"
    """Policy, workload or step differ from the key: an older manifest passed off as a newer."""


_SECURITY = {ManifestReason.FOREIGN_TENANT, ManifestReason.FOREIGN_OBJECT}


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One object of a checkpoint. Its key carries the digest: two writers never overwrite."""

    name: str  # what it is: module.safetensors
    size: int  # bytes
    sha256: str  # hex
    etag: str  # as the store returned it; lets a listing notice a replaced object

    @property
    def relative_key(self) -> str:
        path = PurePosixPath(self.name)
        return f"{path.stem}-{self.sha256[:16]}{path.suffix}"


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What a checkpoint was made from; enough to make it again."""

    spec_digest: str
    dataset_digest: str
    base_digest: str
    schema_signature: str
    parent: str | None = None  # id of the checkpoint this run resumed from
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch and the platform


@dataclass(frozen=True, kw_only=True)
class Manifest:
    tenant_id: str
    policy: str
    workload_id: str
    step: int  # optimizer steps done
    policy_version: int
    position: int  # samples consumed: where the data order goes on
    objects: tuple[ObjectEntry, ...]
    lineage: Lineage
    created: str  # ISO 8601, UTC; information only, nothing is ordered by it
    canary: Canary | None = None  # what the policy answers to one fixed observation
    version: int = MANIFEST_VERSION

    @property
    def checkpoint_id(self) -> str:
        return f"{self.policy}/{self.workload_id}/{self.step}"

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.objects)

    def object(self, name: str) -> ObjectEntry:
        """Raises `ManifestInvalidError` where the manifest names no such object."""
        for entry in self.objects:
            if entry.name == name:
                return entry
        raise _refused(ManifestReason.MALFORMED, f"no object {name}", object=name)

    def content(self) -> dict[str, Any]:
        """What two saves of the same state share: all but the time, the store's etags and what
        the processor has a hand in."""
        raw = asdict(self)
        del raw["created"], raw["canary"]
        for entry in raw["objects"]:
            del entry["etag"]
        return raw


def serialize(manifest: Manifest, signing_key: bytes) -> bytes:
    """Wire form, signed. Raises `ManifestInvalidError` rather than write what nobody may read."""
    raw = json.loads(_canonical(asdict(manifest)))
    _check(_build(raw))
    signature = _sign(raw, signing_key, manifest.tenant_id)
    return _canonical({"manifest": raw, "signature": signature})


def parse(data: bytes, *, tenant_id: str, signing_key: bytes | None) -> Manifest:
    """The manifest of `tenant_id`, or `ManifestInvalidError` with a `ManifestReason`.

    `signing_key=None` skips the signature (a tenant's own client does not hold the platform's
    key); everything else is checked.
    """
    raw, signature = _envelope(data)
    if type(raw.get("version")) is not int or raw["version"] not in _READABLE:
        raise _refused(
            ManifestReason.VERSION,
            f"version {str(raw.get('version'))[:20]} is not readable by this release",
        )
    manifest = _build(raw)
    if manifest.tenant_id != tenant_id:
        raise _refused(ManifestReason.FOREIGN_TENANT, "it belongs to another tenant")
    if signature is None:
        raise _refused(ManifestReason.SIGNATURE_MISSING, "it carries no signature")
    if signing_key is not None and not hmac.compare_digest(
        signature.encode(), _sign(raw, signing_key, tenant_id).encode()
    ):
        raise _refused(ManifestReason.SIGNATURE_WRONG, "the signature does not match")
    _check(manifest)
    return manifest


def _envelope(data: bytes) -> tuple[dict[str, Any], str | None]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    if len(data) > MAX_MANIFEST_BYTES:
        raise refuse_size()
    try:
        outer = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _refused(ManifestReason.MALFORMED, "not valid JSON") from error
    if not isinstance(outer, dict) or not isinstance(outer.get("manifest"), dict):
        raise _refused(ManifestReason.MALFORMED, "not an object with a manifest")
    signature = outer.get("signature")
    return outer["manifest"], signature if isinstance(signature, str) and signature else None


def _build(raw: dict[str, Any]) -> Manifest:
    try:
        if raw["version"] == 1:
            raw = {"canary": None, **raw} if "canary" not in raw else {}
        values = _fields(Manifest, raw)
        values["objects"] = tuple(ObjectEntry(**_fields(ObjectEntry, o)) for o in raw["objects"])
        values["lineage"] = Lineage(**_fields(Lineage, raw["lineage"]))
        values["canary"] = _canary(raw["canary"])
        return Manifest(**values)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise _refused(ManifestReason.MALFORMED, str(error)[:200]) from error


def _canary(raw: dict[str, Any] | None) -> Canary | None:
    if raw is None:
        return None
    values = _fields(Canary, raw)
    if not _SHA256.fullmatch(values["digest"]):
        raise ValueError("Canary.digest is no SHA-256")
    if not all(type(number) in (int, float) for number in values["numbers"]):
        raise ValueError("Canary.numbers has the wrong type")
    if not all(type(size) is int for size in values["shape"]):
        raise ValueError("Canary.shape has the wrong type")
    values["numbers"] = tuple(map(float, values["numbers"]))
    values["shape"] = tuple(values["shape"])
    return Canary(**values)


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("policy_version", "position", "size", "version"), (int,)),
    "step": (object,),  # checked by `_check`, with its own reason
    "parent": (str, type(None)),
    "versions": (dict,),
    "lineage": (dict,),
    "objects": (list,),
    "canary": (dict, type(None)),
    "environment": (dict,),
    "numbers": (list,),
    "shape": (list,),
}


def _fields(kind: type[Any], raw: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    if set(raw) != names:
        raise ValueError(f"{kind.__name__} has other fields: {sorted(names ^ set(raw))}")
    for name, value in raw.items():
        allowed = _TYPES.get(name, (str,))
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(f"{kind.__name__}.{name} has the wrong type")
        if isinstance(value, int) and allowed == (int,) and value < 0:
            raise ValueError(f"{kind.__name__}.{name} is negative")
    return dict(raw)


def _check(manifest: Manifest) -> None:
    if type(manifest.step) is not int or not 0 <= manifest.step <= MAX_STEP:
        raise _refused(ManifestReason.STEP, f"step {str(manifest.step)[:30]}")
    try:
        check_name("tenant", manifest.tenant_id)
        check_name("policy", manifest.policy)
        check_id("workload", manifest.workload_id)
    except InvalidKeyError as error:
        raise _refused(ManifestReason.MALFORMED, error.message) from error
    names = [entry.name for entry in manifest.objects]
    for entry in manifest.objects:
        if "/" in entry.name or "\\" in entry.name:
            raise _refused(ManifestReason.FOREIGN_OBJECT, f"object {entry.name[:80]!r}")
        if not _OBJECT_NAME.fullmatch(entry.name):
            raise _refused(ManifestReason.OBJECT_NAME, f"object {entry.name[:80]!r}")
        if not _SHA256.fullmatch(entry.sha256):
            raise _refused(ManifestReason.MALFORMED, f"object {entry.name}: not a SHA-256")
    if len(names) != len(set(names)):
        raise _refused(ManifestReason.DUPLICATE_OBJECT, "an object is named twice")


def _sign(raw: dict[str, Any], signing_key: bytes, tenant_id: str) -> str:
    tenant_key = hmac.digest(signing_key, f"vla-manifest:{tenant_id}".encode(), "sha256")
    return hmac.new(tenant_key, _canonical(raw), hashlib.sha256).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def refuse_place(problem: str) -> ManifestInvalidError:
    return _refused(ManifestReason.WRONG_PLACE, problem)


def refuse_size() -> ManifestInvalidError:
    return _refused(ManifestReason.MALFORMED, f"larger than {MAX_MANIFEST_BYTES} bytes")


def _refused(reason: ManifestReason, problem: str, **details: Any) -> ManifestInvalidError:
    return ManifestInvalidError(
        f"manifest refused: {problem}",
        reason=str(reason),
        security=reason in _SECURITY,
        **details,
    )
