"""From Python, YAML or JSON to a checked spec, and from pydantic's report to one `SpecError`.

Its `problems` name field, value, problem and hint.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from vla_platform.errors import SpecError
from vla_platform.specs.base import Spec
from vla_platform.specs.rl import RLSpec
from vla_platform.specs.sft import SFTSpec

MAX_SPEC_BYTES = 64 * 1024
MAX_SPEC_DEPTH = 16

T = TypeVar("T")
WorkloadSpec = SFTSpec | RLSpec
"""The union of all workload kinds."""

_ADAPTER: TypeAdapter[WorkloadSpec] = TypeAdapter(
    Annotated[WorkloadSpec, Field(discriminator="kind")]
)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a workload spec, for editors and other languages."""
    return _ADAPTER.json_schema()


def parse_spec(raw: WorkloadSpec | Mapping[str, Any]) -> WorkloadSpec:
    """Validate a spec from Python. Raises `SpecError` with every problem at once."""
    if isinstance(raw, Spec):
        raw = raw.model_dump(mode="json")
    try:
        text = json.dumps(raw, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"a spec holds plain data only: {error}", problems=[]) from error
    return parse_spec_json(text)


def parse_spec_json(text: str | bytes) -> WorkloadSpec:
    """Validate a spec from JSON text: size, depth and duplicate keys are checked before fields."""
    return parse_as(_ADAPTER, text)


def parse_as(kind: TypeAdapter[T], text: str | bytes) -> T:
    """The same for any kind of spec. Raises `SpecError` naming every problem."""
    document = load_json(text)
    try:
        # The JSON mode of pydantic's strict validation takes lists for tuples, and nothing more.
        return kind.validate_json(json.dumps(document))
    except ValidationError as error:
        raise spec_error(error.errors(include_url=False)) from error


def parse_spec_yaml(text: str) -> WorkloadSpec:
    """Validate a spec from YAML (safe subset; duplicate keys refused)."""
    return parse_spec(load_yaml(text))


def load_yaml(text: str) -> dict[str, Any]:
    """A mapping from YAML, not validated further. Raises `SpecError`."""
    if len(text) > MAX_SPEC_BYTES:
        raise SpecError(f"the spec has {len(text)} bytes; at most {MAX_SPEC_BYTES} are taken")
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise SpecError(f"not valid YAML: {error}", problems=[]) from error
    if not isinstance(document, dict):
        raise SpecError("a spec is a mapping of fields, such as `kind: sft`", problems=[])
    return document


def load_json(text: str | bytes, *, max_bytes: int = MAX_SPEC_BYTES) -> Any:
    """Parse JSON from outside: bounded size and depth, no duplicate keys, no NaN."""
    if len(text) > max_bytes:
        raise SpecError(f"the spec has {len(text)} bytes; at most {max_bytes} are taken")
    source = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    if _depth(source) > MAX_SPEC_DEPTH:
        raise SpecError(f"the spec is nested deeper than {MAX_SPEC_DEPTH} levels")
    try:
        return json.loads(source, object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise SpecError(f"not valid JSON: {error}", problems=[]) from error


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SpecError(f"the spec gives {', '.join(twice)} twice", problems=[])
    return result


def _no_constant(name: str) -> float:
    raise SpecError(f"{name} is not a number that a spec may hold", problems=[])


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice is an error and `1e-4` is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise SpecError(f"the spec gives {', '.join(twice)} twice", problems=[])
        return super().construct_mapping(node, deep=deep)


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def spec_error(errors: Iterable[ErrorDetails]) -> SpecError:
    """pydantic's report as one error."""
    problems = [_problem(error) for error in errors]
    lines = [
        f"{p['field'] or 'spec'}: {p['problem']}" + (f" ({p['hint']})" if p["hint"] else "")
        for p in problems
    ]
    return SpecError("; ".join(lines), problems=problems)


def _problem(error: ErrorDetails) -> dict[str, str]:
    location = [str(part) for part in error["loc"] if part not in _UNION_TAGS]
    value = error.get("input")
    hint = ""
    problem = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        problem = "unknown field"
        near = difflib.get_close_matches(location[-1], [*known_fields(), *_OTHER_NAMES], n=1)
        name = _OTHER_NAMES.get(near[0], near[0]) if near else ""
        hint = f"did you mean {name!r}?" if near else "see `vla check --schema`"
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        expected = error.get("ctx", {}).get("expected_tags")
        problem = "needs a `kind`" + (f": one of {expected}" if expected else "")
        given = value.get("kind") if isinstance(value, dict) else None
        hint = "" if expected else "see `vla check --schema`"
        if given == "evaluation":
            hint = "`vla evaluations run` and `vla schedules add` take evaluations"
        location.append("kind")
        value = given if given is not None else {}
    if error["type"] == "literal_error" and location[-1:] == ["version"]:
        hint = "client and platform are of different releases: upgrade the older one"
    shown = "" if isinstance(value, (dict, list)) else repr(value)[:80]
    if shown and error["type"] != "extra_forbidden":
        problem = f"{problem}, got {shown}"
    return {"field": ".".join(location), "value": shown, "problem": problem, "hint": hint}


_UNION_TAGS = {
    *("oft", "flow_matching", "sft", "rl", "ppo", "grpo", "reinforce", "awr"),
    *("grader", "distillation"),
}
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_train_steps": "steps",
    "num_warmup_steps": "optimizer.schedule.warmup_steps",
    "gradient_clipping": "optimizer.grad_clip",
    "action_horizon": "action_module.chunk",
    "save_every": "checkpoint.every_steps",
}
"""Names that users of StarVLA and LeRobot type, and ours."""


def known_fields() -> set[str]:
    """Every field name of every spec class, for nearest-name hints."""
    names: set[str] = set()
    pending: list[type[Spec]] = [Spec]
    while pending:
        kind = pending.pop()
        names |= set(kind.model_fields)
        pending.extend(kind.__subclasses__())
    return names
