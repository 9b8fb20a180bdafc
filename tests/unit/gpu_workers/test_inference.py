"""Tenants share one forward and get what they would get alone, for every kind of module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vla_platform.errors import (  # noqa: E402
    DataError,
    HistoryLostError,
    NotFoundError,
    PlatformError,
    UnsupportedError,
)
from vla_platform.gpu_workers.action_modules.build import build_action_module  # noqa: E402
from vla_platform.gpu_workers.backbone import Backbone  # noqa: E402
from vla_platform.gpu_workers.decoding import Decoder  # noqa: E402
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features  # noqa: E402
from vla_platform.gpu_workers.inference import (  # noqa: E402
    InferenceModelService,
    PreparedRequest,
    RunPart,
)
from vla_platform.gpu_workers.module_source import MemoryModuleSource  # noqa: E402
from vla_platform.gpu_workers.module_versions import ModuleVersions  # noqa: E402
from vla_platform.gpu_workers.samples import rows_of  # noqa: E402
from vla_platform.gpu_workers.slot_state import SlotConfig  # noqa: E402
from vla_platform.gpu_workers.weights import ModuleMeta, Weights, digest_of_tensors  # noqa: E402
from vla_platform.inference.protocol import (  # noqa: E402
    Prediction,
    PredictRequest,
    RowShape,
    SessionStep,
)
from vla_platform.specs import FlowMatchingModule, OFTModule  # noqa: E402

FLOAT32_BOUND = 1e-5
BFLOAT16_BOUND = 2e-2
"""Of actions in [-2, 2]: bf16 keeps 8 bits, and the head computes in float32."""
PROMPTS = (
    "push",
    "pick up the red block and put it beside the blue bowl, then move the arm back to where it "
    "was before and wait there until the light turns green again",
)


def weights_of(config: SlotConfig, backbone: Backbone, *, version: int = 1) -> Weights:
    module = build_action_module(
        config.action_module,
        config.schema,
        feature_dim=backbone.hidden_dim,
        seed=config.seed + 1000 * version,
        normalization=config.normalization,
        state_statistics=config.statistics["state"],
        action_statistics=config.statistics["action"],
    )
    arrays = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    return Weights(version, arrays, ModuleMeta.of(config), digest_of_tensors(arrays))


def service_of(
    backbone: Backbone, configs: Sequence[SlotConfig], **options: Any
) -> InferenceModelService:
    source = MemoryModuleSource()
    for config in configs:
        source.put(config.policy_key, weights_of(config, backbone))
    versions = ModuleVersions(
        source,
        base_digest=backbone.digest,
        feature_dim=backbone.hidden_dim,
        device=backbone.device,
    )
    return InferenceModelService(backbone, versions, **options)


@pytest.fixture
def make_service(
    backbone: Backbone,
) -> Iterator[Callable[..., InferenceModelService]]:
    made: list[InferenceModelService] = []

    def make(configs: Sequence[SlotConfig], **options: Any) -> InferenceModelService:
        made.append(service_of(options.pop("backbone", backbone), configs, **options))
        return made[-1]

    yield make
    for service in made:
        service.versions.close()


def ask(
    service: InferenceModelService,
    config: SlotConfig,
    number: int,
    /,
    *,
    num_rows: int = 1,
    prompt: str = PROMPTS[0],
    picture: tuple[int, int] = (96, 128),
    **options: Any,
) -> PreparedRequest:
    """A request with pictures and states that follow from `number`, prepared."""
    rng = np.random.default_rng(number)
    schema = config.schema
    shape = RowShape(
        cameras=tuple((name, *picture) for name in schema.cameras), state_dim=schema.state_dim
    )
    raw = []
    for _ in range(num_rows):
        raw.append(rng.integers(0, 256, shape.size_bytes - 4 * schema.state_dim, dtype=np.uint8))
        raw.append(rng.uniform(-1, 1, schema.state_dim).astype(np.float32).view(np.uint8))
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "policy": config.policy_key.partition("/")[2],
        "version": None,
        "tasks": (prompt,) * num_rows,
        "row": shape,
        "timeout_s": 5.0,
        "place": (0, -1),
    }
    request = PredictRequest(**(fields | options))
    tenant = config.policy_key.partition("/")[0]
    for _ in range(3):
        found = service.prepare(tenant, "c" * 32, request, np.concatenate(raw))
        if not isinstance(found, Future):
            return found
        found.result(30)
    raise AssertionError("it never got ready")


def run(service: InferenceModelService, prepared: Sequence[PreparedRequest]) -> list[Prediction]:
    outcomes, _ = service.run([RunPart(one, 0, one.request.num_rows) for one in prepared])
    assert all(isinstance(one, Prediction) for one in outcomes)
    return outcomes  # type: ignore[return-value]


def difference(a: Prediction, b: Prediction) -> float:
    return float(np.abs(a.actions - b.actions).max())


def mixed_tenants(make_config: Callable[..., SlotConfig]) -> list[SlotConfig]:
    """OFT and flow matching, 1 and 3 cameras, action sizes 10, 2, 10 and 1, 8, 3, 8."""
    three = ("left", "right", "wrist")
    flow = FlowMatchingModule(chunk=6, hidden_dim=32, num_layers=2)
    wide = FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2)
    return [
        make_config("a", action_dim=10, seed=1),
        make_config("b", action_dim=2, cameras=three, seed=2),
        make_config("c", action_dim=10, seed=3),
        make_config("d", module=flow, action_dim=1, seed=4),
        make_config("e", module=flow, action_dim=8, cameras=three, state_dim=5, seed=5),
        make_config("f", module=OFTModule(chunk=3, state="prompt"), action_dim=3, seed=6),
        make_config("g", module=wide, action_dim=8, seed=7),
    ]


@pytest.mark.parametrize("share_length", [False, True])
def test_mixed_tenants_get_what_they_get_alone(make_config, make_service, share_length: bool):
    """PF-11, PF-15: modules, cameras, prompts and sizes meet in one batch."""
    configs = mixed_tenants(make_config)
    service = make_service(configs, share_length=share_length)
    asked = [
        ask(service, config, 10 * at + number, prompt=PROMPTS[number], num_rows=1 + at % 3)
        for at, config in enumerate(configs)
        for number in range(2)
    ]
    together = run(service, asked)
    for one, found in zip(asked, together, strict=True):
        alone = run(service, [one])[0]
        schema = one.mounted.module.schema
        shape = (one.request.num_rows, schema.chunk, schema.action_dim)
        assert (shape, np.float32) == (found.actions.shape, found.actions.dtype)
        assert difference(alone, found) <= FLOAT32_BOUND
        assert one.mounted.digest == found.module_digest
        assert schema.signature == found.signature
    if share_length:
        assert {"any"} == {one.lane for one in asked}


def test_two_tenants_of_one_signature_keep_their_own_modules(make_config, make_service):
    """PF-11: same schema, other weights, same pixels, one batch."""
    configs = [make_config(name, seed=at) for at, name in enumerate("ab")]
    service = make_service(configs)
    asked = [ask(service, config, 5) for config in configs]
    a, b = run(service, asked)
    assert configs[0].schema.signature == configs[1].schema.signature
    assert difference(a, b) > 1e-3
    assert difference(a, run(service, asked[:1])[0]) <= FLOAT32_BOUND


def test_actions_are_those_of_the_training_path(backbone, make_config, make_service):
    """The same rows by `rows_of`, the training's encoder and the module's own `predict`."""
    config = make_config("a")
    service = make_service([config])
    prepared = ask(service, config, 3, num_rows=3, picture=(backbone.image_size,) * 2)
    columns = {
        "images": np.stack([row.images for row in prepared.rows]),
        "state": np.stack([state for state in prepared.states if state is not None]),
        "prompt": np.stack([np.frombuffer(PROMPTS[0].encode(), np.uint8)] * 3),
    }
    module = prepared.mounted.module
    encoded = FeatureEncoder(backbone).encode(rows_of(columns, module), [module.feature_kind] * 3)
    feature = stack_features(encoded.features, module.feature_kind)
    expected = module.act(feature, torch.from_numpy(columns["state"]), None)
    assert np.array_equal(expected.detach().numpy(), run(service, [prepared])[0].actions)


@pytest.mark.parametrize("module", [OFTModule(), FlowMatchingModule(hidden_dim=32, num_layers=2)])
def test_stacked_and_serial_decoding_give_the_same_numbers(make_config, make_service, module):
    configs = [make_config(name, module=module, seed=at) for at, name in enumerate("abcde")]
    service = make_service(configs)
    asked = [ask(service, config, at, num_rows=1 + at % 2) for at, config in enumerate(configs)]
    service.decoder = Decoder(min_stacked=2)
    stacked = run(service, asked)
    assert service.decoder.num_stacked_calls == 1
    service.decoder = Decoder(min_stacked=99)
    for one, found in zip(run(service, asked), stacked, strict=True):
        assert difference(one, found) <= FLOAT32_BOUND


def test_actions_are_un_normalised_exactly_once(make_config, make_service):
    """PF-37: statistics of a spread of 0.05 around 3 give actions there, not in [-1, 1]."""
    from vla_platform.datasets.statistics import Statistics

    low, high = np.full(3, 2.95), np.full(3, 3.05)
    narrow = Statistics.compute(np.stack([low, high]), key="action")
    wide = Statistics.compute(np.stack([np.full(2, -2.0), np.full(2, 2.0)]), key="state")
    config = make_config("a", statistics={"state": wide, "action": narrow})
    service = make_service([config])
    found = run(service, [ask(service, config, 1)])[0].actions
    module = service.versions.mounted["a/task", 1].module
    normalised = (found - 3.0) / 0.05
    assert np.abs(found - 3.0).max() < 0.5
    assert np.abs(normalised).max() > 1e-3
    assert np.allclose(module.action_normalizer.scale.numpy(), 0.05)


def test_noise_follows_from_the_seed_and_the_row_alone(make_config, make_service):
    flow = FlowMatchingModule(chunk=4, hidden_dim=32, num_layers=2)
    config = make_config("a", module=flow)
    service = make_service([config])
    seven, again, eight = (
        ask(service, config, 1, num_rows=2, sample=True, seed=seed) for seed in (7, 7, 8)
    )
    a, b, c = run(service, [seven, again, eight])
    assert difference(a, b) <= FLOAT32_BOUND
    assert difference(a, c) > 1e-3
    fixed = [ask(service, config, 1, request_id=name) for name in ("x", "y")]
    assert difference(*run(service, fixed)) <= FLOAT32_BOUND
    drawn = [ask(service, config, 1, sample=True, request_id=name) for name in ("x", "y")]
    assert difference(*run(service, drawn)) > 1e-3


def test_half_precision_keeps_its_stated_bound(make_config, make_service):
    backbone = Backbone.load("tiny-random", dtype=torch.bfloat16)
    changes = {"base_digest": backbone.digest}
    configs = []
    for at, config in enumerate(mixed_tenants(make_config)):
        import dataclasses

        schema = dataclasses.replace(config.schema, **changes)
        configs.append(dataclasses.replace(config, schema=schema, seed=at))
    service = make_service(configs, backbone=backbone, share_length=True)
    asked = [ask(service, config, at, prompt=PROMPTS[at % 2]) for at, config in enumerate(configs)]
    for one, found in zip(asked, run(service, asked), strict=True):
        assert difference(run(service, [one])[0], found) <= BFLOAT16_BOUND


def test_what_does_not_fit_is_refused_with_its_reason(make_config, make_service):
    config = make_config("a", cameras=("top", "wrist"))
    service = make_service([config])
    good = ask(service, config, 1)
    one_camera = RowShape(cameras=(("top", 8, 8),), state_dim=2)
    no_state = RowShape(cameras=(("top", 8, 8), ("wrist", 8, 8)), state_dim=0)
    for changes, error, match in (
        ({"row": one_camera}, DataError, "lacks wrist"),
        ({"row": no_state}, DataError, "state of 2"),
        ({"signature": "0" * 64}, DataError, "schema"),
        ({"version": 9}, NotFoundError, "version 9"),
        ({"version": "task/run/5"}, NotFoundError, "version"),
        ({"policy": "other"}, NotFoundError, "policy"),
        ({"return_values": True}, UnsupportedError, "value"),
        ({"return_log_probs": True}, UnsupportedError, "log-prob"),
        ({"return_features": True}, UnsupportedError, "features"),
        ({"tasks": ("word " * 4000,)}, DataError, "tokens"),
    ):
        with pytest.raises(error, match=match):
            ask(service, config, 1, **changes)
    assert good.mounted.num_users == 1


def test_weights_that_are_not_finite_are_an_error_of_their_own_tenant(make_config, make_service):
    configs = [make_config("a"), make_config("b")]
    service = make_service(configs)
    asked = [ask(service, config, 1) for config in configs]
    with torch.no_grad():
        next(asked[0].mounted.module.parameters()).fill_(float("nan"))
    outcomes, _ = service.run([RunPart(one, 0, 1) for one in asked])
    assert isinstance(outcomes[0], PlatformError)
    assert isinstance(outcomes[1], Prediction)


def test_features_are_kept_by_key_and_are_those_of_training(backbone, make_config, make_service):
    saved: dict[str, dict[str, np.ndarray]] = {}
    config = make_config("a")
    service = make_service(
        [config], save_features=lambda tenant, key, columns: saved.update({key: columns})
    )
    prepared = ask(service, config, 1, num_rows=2, return_features=True)
    found = run(service, [prepared])[0]
    module = prepared.mounted.module
    encoded = FeatureEncoder(backbone).encode(prepared.rows, [module.feature_kind] * 2)
    expected = stack_features(encoded.features, module.feature_kind).values.numpy()
    assert found.features_key is not None
    assert np.array_equal(expected, saved[found.features_key]["feature"])


def test_a_session_ships_new_frames_only(make_config, make_service):
    """The window of a session equals the same frames sent whole; a lost one is asked for."""
    config = make_config("a", state_dim=0)
    service, other = make_service([config]), make_service([config])

    def at(where: InferenceModelService, step: int, frames: list[int], whole: bool = False) -> Any:
        shape = RowShape(cameras=(("top", 16, 16),), state_dim=0)
        session = SessionStep(
            session="e", step=step, history=3, num_frames=len(frames), is_whole=whole
        )
        raw = np.concatenate([np.full(shape.size_bytes, number, np.uint8) for number in frames])
        request = PredictRequest(
            request_id=f"s{step}",
            policy="task",
            version=None,
            tasks=("x",),
            row=shape,
            timeout_s=5.0,
            place=(0, -1),
            session=session,
        )
        found = where.prepare("a", "c" * 32, request, raw)
        if isinstance(found, Future):
            found.result(30)
            found = where.prepare("a", "c" * 32, request, raw)
        return run(where, [found])[0]

    for step in range(4):
        shipped = at(service, step, [40 * step])
    with pytest.raises(HistoryLostError):
        at(other, 3, [120])
    assert difference(shipped, at(other, 3, [40, 80, 120], whole=True)) <= FLOAT32_BOUND


def test_versions_live_side_by_side_and_swap_without_a_pause(backbone, make_config, make_service):
    config = make_config("a")
    service = make_service([config])
    source = service.versions._source
    assert isinstance(source, MemoryModuleSource)
    first = ask(service, config, 1)
    source.put("a/task", weights_of(config, backbone, version=2))
    service.versions.notice("a/task", 2)
    end = time.monotonic() + 20
    while (newest := ask(service, config, 1)).mounted.version != 2:
        assert time.monotonic() < end
    pinned = ask(service, config, 1, version=1)
    old, new, again = run(service, [first, newest, pinned])
    assert (old.policy_version, new.policy_version, again.policy_version) == (1, 2, 1)
    assert difference(old, new) > 1e-4
    assert difference(old, again) <= FLOAT32_BOUND


def test_idle_versions_leave_the_device_then_memory_and_used_ones_never(backbone, make_config):
    configs = [make_config(name, seed=at) for at, name in enumerate("abcd")]
    source = MemoryModuleSource()
    for config in configs:
        source.put(config.policy_key, weights_of(config, backbone))
    size = sum(array.nbytes for array in source.load("a/task", 1).tensors.values())
    versions = ModuleVersions(
        source,
        base_digest=backbone.digest,
        feature_dim=backbone.hidden_dim,
        device=backbone.device,
        device_bytes=int(1.5 * size),
        host_bytes=int(2.5 * size),
    )

    def use(name: str) -> Any:
        while isinstance(found := versions.acquire(f"{name}/task", 1), Future):
            found.result(30)
        return found

    held = use("a")
    for name in "bcd":
        versions.release(use(name))
    assert held.on_device
    assert ("a/task", 1) in versions.mounted
    assert versions.counts.moved_to_host >= 2
    assert versions.counts.dropped == 2
    versions.release(held)
    before = versions.counts.loads
    versions.release(use("b"))
    assert before + 1 == versions.counts.loads
    versions.close()
