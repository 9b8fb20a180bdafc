"""What an audit says: findings with a severity, and the report they make up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

REPORT_VERSION = 1


class Severity(StrEnum):
    """How much a finding matters; the order is that of the members."""

    INFO = "info"
    """Nothing is lost and nothing has to be done soon."""
    WARNING = "warning"
    """Room is wasted, or a promise is about to be broken."""
    ERROR = "error"
    """A checkpoint cannot be used."""
    CRITICAL = "critical"
    """Somebody reached into another tenant's place, or forged what the platform signs."""

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class FindingKind(StrEnum):
    MISSING = "missing"
    """A manifest names an object that is not there."""
    EXTRA = "extra"
    """An object of unknown name lies inside a checkpoint."""
    CORRUPT = "corrupt"
    """Size, etag or SHA-256 differ from what the manifest says."""
    TRUNCATED = "truncated"
    """An object is shorter than its manifest says."""
    EDITED_MANIFEST = "edited_manifest"
    """The signature does not match: edited, or signed with another key."""
    BAD_SIGNATURE = "bad_signature"
    """The manifest carries no signature."""
    BAD_MANIFEST = "bad_manifest"
    """The manifest breaks its own rules; `details["reason"]` says which."""
    FOREIGN_TENANT = "foreign_tenant"
    """A manifest of, or a reference into, another tenant's place: a security event."""
    ORPHAN = "orphan"
    """Nothing refers to the object: what a save that lost a race, or died, left behind."""
    HALF_WRITTEN = "half_written"
    """Objects without a manifest, older than any save takes."""
    BROKEN_LINEAGE = "broken_lineage"
    """What a checkpoint was made from is not there, or does not fit."""
    EXPIRED_RETENTION = "expired_retention"
    """Its time to live is over and it is still there."""
    QUOTA = "quota"
    """The tenant stores more than it may, or nearly so."""
    UNREADABLE = "unreadable"
    """The store did not give an object that it lists."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: FindingKind
    severity: Severity
    tenant: str
    key: str  # the object, or the folder with its slash
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, str]:
        """The same in two audits of the same fault."""
        return self.kind, self.key

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Finding:
        return cls(
            **{**raw, "kind": FindingKind(raw["kind"]), "severity": Severity(raw["severity"])}
        )


@dataclass(kw_only=True)
class Counts:
    """What an audit went through."""

    objects: int = 0
    size_bytes: int = 0
    checkpoints: int = 0  # with a manifest
    checked: int = 0  # whose manifest was read in this audit
    unchanged: int = 0  # as an earlier audit found them, by their listing
    saves_in_progress: int = 0
    bytes_read: int = 0  # by a deep audit
    bytes_by_area: dict[str, int] = field(default_factory=dict)  # policies, workloads, ...
    findings: dict[str, int] = field(default_factory=dict)  # by kind, also those left out


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """One audit of one tenant."""

    audit_id: str
    tenant: str
    deep: bool
    started: float  # seconds since the epoch
    finished: float
    counts: Counts
    findings: tuple[Finding, ...]
    generation: int = 0  # where its index of seals lies
    index_parts: int = 0
    resumed: int = 0  # how often it went on after a stop
    version: int = REPORT_VERSION

    @property
    def worst(self) -> Severity | None:
        return max((one.severity for one in self.findings), key=lambda s: s.rank, default=None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"worst": self.worst}

    def to_json(self) -> bytes:
        return json.dumps(self.to_dict(), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> AuditReport:
        raw = json.loads(text)
        del raw["worst"]
        raw["counts"] = Counts(**raw["counts"])
        raw["findings"] = tuple(Finding.from_dict(one) for one in raw["findings"])
        return cls(**raw)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What changed between two audits of a tenant."""

    appeared: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    objects: int
    size_bytes: int
    checkpoints: int


def difference(before: AuditReport | None, now: AuditReport) -> Difference:
    """`before` None: everything has appeared."""
    old: Sequence[Finding] = before.findings if before else ()
    known, there = {one.identity for one in old}, {one.identity for one in now.findings}
    was = before.counts if before else Counts()
    return Difference(
        appeared=tuple(one for one in now.findings if one.identity not in known),
        gone=tuple(one for one in old if one.identity not in there),
        objects=now.counts.objects - was.objects,
        size_bytes=now.counts.size_bytes - was.size_bytes,
        checkpoints=now.counts.checkpoints - was.checkpoints,
    )
