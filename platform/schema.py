"""A tenant's data interface and its deterministic signature.

The signature is the SHA-256 of the schema's canonical JSON: equal across processes, machines and
key order. A module trained under one signature never joins data of another.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from vla_platform.specs import canonical_json

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What one policy sees and does."""

    base_model: str
    base_digest: str  # SHA-256 over the base model's parameters and buffers
    cameras: tuple[str, ...]  # in the order in which the images enter the prompt
    image_size: int  # pixels; images are square after preprocessing
    state_dim: int  # S; 0: the policy gets no state
    action_dim: int  # A
    chunk: int  # H, actions predicted at once
    action_module: str  # kind of the module
    state_input: str  # encoder | prompt | none
    version: int = SCHEMA_VERSION

    @property
    def signature(self) -> str:
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()

    def differs_beside_base(self, other: Schema) -> str:
        """What another policy sees or does otherwise, in words; base model and picture size, which
        follows from it, may differ. Empty: nothing."""
        mine, theirs = asdict(self), asdict(other)
        compared = mine.keys() - {"base_model", "base_digest", "image_size"}
        return ", ".join(
            f"{name} is {theirs[name]!r}, not {mine[name]!r}"
            for name in sorted(compared)
            if theirs[name] != mine[name]
        )

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, object]) -> Schema:
        fields = dict(raw)
        fields["cameras"] = tuple(fields["cameras"])  # type: ignore[arg-type]
        return cls(**fields)  # type: ignore[arg-type]
