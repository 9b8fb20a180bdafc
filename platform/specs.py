"""What a tenant may ask for: the workload specs, validated at the edge.

Every model refuses unknown fields (with the nearest known name), booleans where numbers are meant,
NaN and infinity. `parse_spec` is the one entrance for Python, YAML and JSON input; it turns
pydantic's report into one `SpecError` whose `problems` name field, value, problem and hint.
The field names follow StarVLA and LeRobot where they have one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from vla_platform.errors import SpecError

SPEC_VERSION = 1
MAX_SPEC_BYTES = 64 * 1024
MAX_SPEC_DEPTH = 16

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


class OFTModule(Spec):
    """Regression head on action-query hidden states (OpenVLA-OFT, StarVLA `QwenOFT`)."""

    kind: Literal["oft"] = "oft"
    chunk: Int = Field(8, ge=1, le=64, description="actions predicted at once (H)")
    hidden_dim: Int | None = Field(None, ge=8, le=8192, description="default: 2 x backbone width")
    num_blocks: Int = Field(2, ge=1, le=8, description="residual MLP blocks")
    state: Literal["encoder", "prompt", "none"] = Field(
        "encoder",
        description="proprioception: a learned encoder added to the queries, 256-bin text in the "
        "prompt as in StarVLA, or not used",
    )


class FlowMatchingModule(Spec):
    """GR00T-style flow matching: a DiT that cross-attends to the backbone's hidden states."""

    kind: Literal["flow_matching"] = "flow_matching"
    chunk: Int = Field(8, ge=1, le=64, description="actions predicted at once (H)")
    hidden_dim: Int = Field(128, ge=16, le=4096, description="DiT width; 768 is StarVLA's DiT-B")
    num_layers: Int = Field(
        4, ge=1, le=48, description="even: cross-attention, odd: self-attention"
    )
    num_heads: Int = Field(4, ge=1, le=64)
    num_future_tokens: Int = Field(8, ge=0, le=64)
    dropout: Float = Field(0.0, ge=0.0, lt=1.0)
    num_inference_steps: Int = Field(4, ge=1, le=50, description="Euler steps from noise to action")
    repeated_diffusion_steps: Int = Field(
        4, ge=1, le=16, description="noise draws per sample; multiplies head work only"
    )
    state: Literal["encoder", "none"] = "encoder"

    @model_validator(mode="after")
    def _heads_divide_width(self) -> FlowMatchingModule:
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}"
            )
        return self


ActionModuleSpec = Annotated[OFTModule | FlowMatchingModule, Field(discriminator="kind")]


class DatasetSpec(Spec):
    """A LeRobot v2.1 or v3.0 dataset in an allowed folder or in the tenant's own storage."""

    path: str = Field(
        min_length=1,
        max_length=1024,
        description="a folder below one of the platform's dataset roots, or `s3://datasets/NAME` "
        "for one uploaded to the tenant's own storage",
    )
    cameras: tuple[Key, ...] | None = Field(
        None, max_length=8, description="camera features in order; default: all, sorted"
    )
    state: Key | None = Field("observation.state", description="null: the policy gets no state")
    action: Key = "action"
    episodes: tuple[Annotated[Int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="episodes to train on; default: all but `heldout_episodes`"
    )
    heldout_episodes: tuple[Annotated[Int, Field(ge=0)], ...] = Field(
        (), description="episodes kept for the held-out loss; default: the last one"
    )
    heldout_samples: Int = Field(64, ge=0, le=1024, description="evenly spaced held-out frames")
    normalization: Literal["min_max", "mean_std", "q99"] = "min_max"
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail", description="a frame whose numbers are not finite: fail the run, or leave it out"
    )

    @model_validator(mode="after")
    def _splits_are_apart(self) -> DatasetSpec:
        for name in ("episodes", "heldout_episodes", "cameras"):
            values = getattr(self, name) or ()
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names something twice")
        both = set(self.episodes or ()) & set(self.heldout_episodes)
        if both:
            raise ValueError(f"episodes {sorted(both)} are in both episodes and heldout_episodes")
        return self


class ScheduleSpec(Spec):
    """Learning rate: linear warm-up, then constant, cosine or linear decay to `min_lr`."""

    kind: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Int = Field(0, ge=0, le=1_000_000)
    min_lr: Float = Field(0.0, ge=0.0, le=1.0)


class AdamWSpec(Spec):
    kind: Literal["adamw"] = "adamw"
    lr: Float = Field(1e-3, gt=0.0, le=1.0)
    betas: tuple[
        Annotated[Float, Field(ge=0.0, lt=1.0)], Annotated[Float, Field(ge=0.0, lt=1.0)]
    ] = (0.9, 0.95)
    eps: Float = Field(1e-8, gt=0.0, le=1e-2)
    weight_decay: Float = Field(0.0, ge=0.0, le=1.0)
    grad_clip: Float | None = Field(
        1.0, gt=0.0, le=1e6, description="global norm; null: no clipping"
    )
    schedule: ScheduleSpec = ScheduleSpec()

    @model_validator(mode="after")
    def _min_lr_below_lr(self) -> AdamWSpec:
        if self.schedule.min_lr > self.lr:
            raise ValueError(f"schedule.min_lr {self.schedule.min_lr} is above lr {self.lr}")
        return self


DEFAULT_EVERY_STEPS = 50


class CheckpointSpec(Spec):
    every_steps: Int | None = Field(
        None, ge=1, le=1_000_000, description=f"default: {DEFAULT_EVERY_STEPS}, and at the end"
    )
    keep_last: Int = Field(3, ge=1, le=1000)
    milestone_every: Int | None = Field(
        None, ge=1, description="steps divisible by this are kept for good"
    )


class LimitsSpec(Spec):
    max_in_flight: Int = Field(8, ge=1, le=64, description="training jobs of this policy at once")
    max_seconds: Float | None = Field(None, gt=0.0, description="fail the run after this long")


class SFTSpec(Spec):
    """Supervised fine-tuning of one policy on demonstrations."""

    kind: Literal["sft"] = "sft"
    version: Literal[1] = 1
    policy: Name = Field(description="the tenant's name for what is trained; `tenant/policy`")
    base_model: str = Field(
        "tiny", min_length=1, max_length=256, description="a base model that the platform serves"
    )
    action_module: ActionModuleSpec = OFTModule()
    dataset: DatasetSpec
    trainable: tuple[Literal["head", "state_encoder"], ...] = Field(
        ("head", "state_encoder"), min_length=1, description="parts of the action module to train"
    )
    optimizer: AdamWSpec = AdamWSpec()
    steps: Int | None = Field(None, ge=1, le=10_000_000)
    epochs: Int | None = Field(None, ge=1, le=100_000)
    batch_size: Int = Field(8, ge=1, le=1024)
    gradient_accumulation: Int = Field(
        1, ge=1, le=64, description="split each batch into so many backward passes"
    )
    evaluate_every: Int | None = Field(
        None, ge=1, description="steps between held-out losses; default: only first and last"
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    init_from: str | None = Field(
        None, max_length=256, description="id of a checkpoint of the tenant to start from"
    )
    seed: Int = Field(0, ge=0, lt=2**32)
    priority: Int = Field(0, ge=0, le=9, description="higher is sooner")
    limits: LimitsSpec = LimitsSpec()
    display_name: str | None = Field(None, max_length=256)
    description: Text | None = None
    user_metadata: dict[
        Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
    ] = Field(default_factory=dict, max_length=32)
    idempotency_key: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9_.:\-]+$",
        description="the same key with the same spec returns the same run",
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> SFTSpec:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of "
                f"gradient_accumulation {self.gradient_accumulation}"
            )
        every = self.checkpoint.every_steps
        if every is not None and self.steps is not None and every > self.steps:
            raise ValueError(f"checkpoint.every_steps {every} is above steps {self.steps}")
        if self.action_module.state != "encoder" and self.trainable == ("state_encoder",):
            raise ValueError("trainable names only state_encoder, but the module has none")
        return self


WorkloadSpec = SFTSpec
"""The union of all workload kinds; RL and evaluation join it with their own classes."""

_ADAPTER: TypeAdapter[WorkloadSpec] = TypeAdapter(WorkloadSpec)


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
    document = load_json(text)
    try:
        # The JSON mode of pydantic's strict validation takes lists for tuples, and nothing more.
        return _ADAPTER.validate_json(json.dumps(document))
    except ValidationError as error:
        raise _spec_error(error.errors(include_url=False)) from error


def parse_spec_yaml(text: str) -> WorkloadSpec:
    """Validate a spec from YAML (safe subset; duplicate keys refused)."""
    if len(text) > MAX_SPEC_BYTES:
        raise SpecError(f"the spec has {len(text)} bytes; at most {MAX_SPEC_BYTES} are taken")
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise SpecError(f"not valid YAML: {error}", problems=[]) from error
    if not isinstance(document, dict):
        raise SpecError("a spec is a mapping of fields, such as `kind: sft`", problems=[])
    return parse_spec(document)


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


def _spec_error(errors: Iterable[ErrorDetails]) -> SpecError:
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
    shown = "" if isinstance(value, (dict, list)) else repr(value)[:80]
    if shown and error["type"] != "extra_forbidden":
        problem = f"{problem}, got {shown}"
    return {"field": ".".join(location), "value": shown, "problem": problem, "hint": hint}


_UNION_TAGS = {"oft", "flow_matching"}
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_train_steps": "steps",
    "num_warmup_steps": "optimizer.schedule.warmup_steps",
    "gradient_clipping": "optimizer.grad_clip",
    "action_horizon": "action_module.chunk",
    "save_every": "checkpoint.every_steps",
}
"""Names that users of StarVLA and LeRobot type, and ours."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def known_fields() -> set[str]:
    """Every field name of every spec class, for nearest-name hints."""
    names: set[str] = set()
    pending: list[type[Spec]] = [Spec]
    while pending:
        kind = pending.pop()
        names |= set(kind.model_fields)
        pending.extend(kind.__subclasses__())
    return names


def canonical_json(value: Any) -> bytes:
    """The one byte form that digests are taken of: sorted keys, no spaces, finite numbers only."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    ).encode()
