"""What every spec is made of: strict numbers, checked names, closed models."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

SPEC_VERSION = 1

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def check_name(value: str) -> str:
    """A tenant, policy or workload name: `[a-z0-9][a-z0-9-]{0,62}`, ASCII, never decoded."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            "use 1 to 63 of a-z, 0-9 and '-', beginning with a letter or digit (ASCII only)"
        )
    return value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("booleans are not numbers")
    return value


Name = Annotated[str, AfterValidator(check_name)]
Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Text = Annotated[str, Field(max_length=4096)]
Key = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-/]*$")]
"""A feature name inside a dataset, such as `observation.images.top`."""


class Spec(BaseModel):
    """Frozen, strict, closed. Floats accept integers; nothing else is coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def canonical_json(value: Any) -> bytes:
    """The one byte form that digests are taken of: sorted keys, no spaces, finite numbers only."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    ).encode()
