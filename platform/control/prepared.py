"""What was found out about a workload before its first step; kept in S3 beside its spec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from vla_platform.control.services import Services
from vla_platform.datasets import Statistics
from vla_platform.schema import Schema
from vla_platform.specs import ActionModuleSpec, canonical_json

_MODULE: TypeAdapter[ActionModuleSpec] = TypeAdapter(ActionModuleSpec)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The interface of a workload's policy, and what its data are."""

    schema: Schema
    dataset_digest: str
    train_episodes: tuple[int, ...]
    heldout_episodes: tuple[int, ...]
    num_samples: int
    num_heldout: int
    statistics: dict[str, Statistics]
    action_module: ActionModuleSpec
    normalization: Literal["min_max", "mean_std", "q99"]
    num_skipped: int = 0
    version: int = 1

    def to_json(self) -> bytes:
        return canonical_json(
            {
                **self.__dict__,
                "schema": self.schema.to_dict(),
                "action_module": self.action_module.model_dump(mode="json"),
                "statistics": {key: value.to_dict() for key, value in self.statistics.items()},
            }
        )

    @classmethod
    def from_json(cls, text: bytes) -> Prepared:
        raw: dict[str, Any] = json.loads(text)
        raw["schema"] = Schema.from_dict(raw["schema"])
        raw["action_module"] = _MODULE.validate_json(json.dumps(raw["action_module"]))
        raw["statistics"] = {
            key: Statistics.from_dict(value, key=key, width=len(value["min"]))
            for key, value in raw["statistics"].items()
        }
        for name in ("train_episodes", "heldout_episodes"):
            raw[name] = tuple(raw[name])
        return cls(**raw)


def load_prepared(services: Services, tenant: str, run: str) -> Prepared:
    return Prepared.from_json(services.objects.get(prepared_key(tenant, run)))


def prepared_key(tenant: str, run: str) -> str:
    return f"{tenant}/workloads/{run}/prepared.json"
