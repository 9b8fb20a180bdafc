"""Seals: HMACs of a folder's listing, which nobody without the platform's key can make.

A folder that lists as it was sealed holds what it held then, so an audit need not read it. Audits
keep the seals of what they found whole. Whoever publishes a checkpoint leaves one beside it, as the
name of an empty object: what an audit would read in the manifest about the run's lineage is part of
that name, so the first audit costs little more than the listing.

    sealed-<hmac>-<line>-<position>-<policy version>-<parent>
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vla_storage.checkpoint_types import CheckpointRef
from vla_storage.errors import InvalidKeyError
from vla_storage.manifests import Manifest

_NAME = re.compile(
    r"sealed-([0-9a-f]{32})-([0-9a-f]{16})-([0-9]{1,18})-([0-9]{1,18})-([0-9]{1,10}|none|outer)"
)


class Listed(Protocol):
    """One object as a listing shows it."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def etag(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What of a manifest its run's next checkpoint has to go on from."""

    line: str  # digest of what all checkpoints of a run have in common
    position: int
    policy_version: int
    parent: str  # its step, where it belongs to the same run; else none or outer

    @classmethod
    def of(cls, manifest: Manifest) -> Facts:
        lineage = manifest.lineage
        common = (
            lineage.spec_digest,
            lineage.dataset_digest,
            lineage.base_digest,
            lineage.schema_signature,
        )
        return cls(
            line=hashlib.sha256("\n".join(common).encode()).hexdigest()[:16],
            position=manifest.position,
            policy_version=manifest.policy_version,
            parent=_parent(manifest),
        )

    def goes_on_from(self, before: Facts, *, step: int) -> bool:
        """Whether the checkpoint of `step` may follow; see `audit_checks.check_lineage`."""
        return (
            self.line == before.line
            and (self.position, self.policy_version) >= (before.position, before.policy_version)
            and (self.parent == "none" or (self.parent.isdigit() and int(self.parent) < step))
        )


def listing_seal(items: Iterable[Listed], signing_key: bytes, *, num_objects: int) -> str:
    """Of a folder's objects in key order, less the seals among them. `num_objects` is how many
    there are, of which a long folder's `items` are the first."""
    text = "\n".join(f"{item.key}\t{item.size}\t{item.etag}" for item in items)
    return _hmac(signing_key, f"{num_objects}\n{text}")


def seal_name(seal: str, facts: Facts, signing_key: bytes) -> str:
    """The publisher's: of an empty object inside the folder whose listing has `seal`."""
    told = f"{facts.line}-{facts.position}-{facts.policy_version}-{facts.parent}"
    return f"sealed-{_hmac(signing_key, f'{seal} {told}')}-{told}"


def is_seal(name: str) -> bool:
    return name.startswith("sealed-") and _NAME.fullmatch(name) is not None


def facts_in(name: str, seal: str, signing_key: bytes) -> Facts | None:
    """What a publisher's seal says; None where it is not one of this very listing."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    _, line, position, version, parent = found.groups()
    facts = Facts(line=line, position=int(position), policy_version=int(version), parent=parent)
    right = seal_name(seal, facts, signing_key)
    return facts if hmac.compare_digest(name.encode(), right.encode()) else None


def _parent(manifest: Manifest) -> str:
    if manifest.lineage.parent is None:
        return "none"
    try:
        ref = CheckpointRef.parse(manifest.lineage.parent)
    except InvalidKeyError:
        return "outer"
    same = (ref.policy, ref.workload_id) == (manifest.policy, manifest.workload_id)
    return str(ref.step) if same else "outer"


def _hmac(signing_key: bytes, text: str) -> str:
    return hmac.digest(signing_key, b"vla-audit-seal:" + text.encode(), "sha256").hex()[:32]
