"""The Inference Model Service: requests of any tenants in, actions out, on one resident backbone.

It knows no queue, thread or clock. `admit` and `prepare` may be called while `run` computes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vla_platform.datasets.frames import resize
from vla_platform.envs.base import matching_cameras
from vla_platform.errors import DataError, DeviceLostError, PlatformError, UnsupportedError
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.decoding import DecodedRow, Decoder, DecodeRow
from vla_platform.gpu_workers.device import is_alive
from vla_platform.gpu_workers.features import FeatureEncoder
from vla_platform.gpu_workers.module_versions import ModuleVersions, MountedModule
from vla_platform.gpu_workers.samples import reads_state
from vla_platform.gpu_workers.sessions import SessionWindows
from vla_platform.inference.protocol import Prediction, PredictRequest, split_row
from vla_storage.errors import CodedError

Pixels = npt.NDArray[np.uint8]
SaveFeatures = Callable[[str, str, dict[str, npt.NDArray[Any]]], None]
"""`save(tenant, key, columns)`: puts rows' features into the payload store."""


@dataclass(frozen=True)
class PreparedRequest:
    """A request that may join a batch: its rows laid out, its module in memory and in use."""

    tenant: str
    request: PredictRequest
    mounted: MountedModule
    rows: tuple[Row, ...]
    states: tuple[npt.NDArray[np.float32] | None, ...]
    lengths: tuple[int, ...]  # tokens of each row, padded
    lane: str


@dataclass(frozen=True)
class RunPart:
    """Rows `start` up to `stop` of a request."""

    prepared: PreparedRequest
    start: int
    stop: int


@dataclass
class RunCost:
    """What a batch cost. `tokens` by tenant: by them the shared forward is split."""

    forward_s: float = 0.0
    decode_s: float = 0.0
    num_forwards: int = 0
    tokens: dict[str, int] = field(default_factory=dict)


Outcome = Prediction | CodedError


class Engine(Protocol):
    """What the consumer needs of a model; the stand-in of the benchmark is another one."""

    def prepare(
        self, tenant: str, client: str, request: PredictRequest, pixels: Pixels
    ) -> Any | Future[Any]:
        """The request ready to run (with a `lane`), or a future after which to ask again.
        `pixels` are the sender's and read-only; they may change once this has returned, but for a
        session's: what is needed of them is copied here."""

    def run(self, parts: Sequence[Any]) -> tuple[list[Outcome], RunCost]:
        """An outcome per part, in order. One thread at a time."""

    def release(self, prepared: Any) -> None:
        """The request has its answer, or has been given up."""


class InferenceModelService:
    """`share_length`: rows of different padded length share a forward (for GPUs, where a forward
    costs more than padding); otherwise each length is a lane of its own and results are equal to
    training's bit by bit."""

    def __init__(
        self,
        backbone: Backbone,
        versions: ModuleVersions,
        *,
        share_length: bool = False,
        save_features: SaveFeatures | None = None,
        sessions: SessionWindows | None = None,
    ) -> None:
        self.backbone = backbone
        self.versions = versions
        self.encoder = FeatureEncoder(backbone, share_length=share_length)
        self.decoder = Decoder(device=backbone.device.type)
        self.sessions = sessions or SessionWindows()
        self._save_features = save_features

    def prepare(
        self, tenant: str, client: str, request: PredictRequest, pixels: Pixels
    ) -> PreparedRequest | Future[MountedModule]:
        """Raises `NotFoundError`, `DataError`, `UnsupportedError`, `HistoryLostError`."""
        found = self.versions.acquire(f"{tenant}/{request.policy}", request.version)
        if isinstance(found, Future):
            return found
        try:
            return self._prepare(tenant, client, request, pixels, found)
        except BaseException:
            self.versions.release(found)
            raise

    def run(self, parts: Sequence[RunPart]) -> tuple[list[Outcome], RunCost]:
        """Raises `DeviceLostError` where a failure is nobody's fault."""
        try:
            return self._run(parts)
        except RuntimeError as error:
            if not is_alive(self.backbone.device):
                raise DeviceLostError(f"the device is lost: {error}") from error
            raise

    def _run(self, parts: Sequence[RunPart]) -> tuple[list[Outcome], RunCost]:
        cost = RunCost()
        started = time.perf_counter()
        rows = [row for part in parts for row in part.prepared.rows[part.start : part.stop]]
        kinds = [
            part.prepared.mounted.module.feature_kind
            for part in parts
            for _ in range(part.start, part.stop)
        ]
        encoded = self.encoder.encode(rows, kinds)
        encoded_at = time.perf_counter()
        decode = [
            DecodeRow(
                part.prepared.mounted,
                encoded.features[at],
                part.prepared.states[number],
                row_seed(part.prepared.request, number),
                sample=_is_judged(part.prepared),
            )
            for at, (part, number) in enumerate(
                (part, number) for part in parts for number in range(part.start, part.stop)
            )
        ]
        decoded = self.decoder.decode(decode)
        cost.forward_s = encoded_at - started
        cost.decode_s = time.perf_counter() - encoded_at
        cost.num_forwards = encoded.num_forwards
        outcomes: list[Outcome] = []
        first = 0
        for part in parts:
            stop = first + part.stop - part.start
            tokens = sum(part.prepared.lengths[part.start : part.stop])
            tenant = part.prepared.tenant
            cost.tokens[tenant] = cost.tokens.get(tenant, 0) + tokens
            features = encoded.features[first:stop]
            outcomes.append(self._outcome(part, decoded[first:stop], features))
            first = stop
        return outcomes, cost

    def release(self, prepared: PreparedRequest) -> None:
        self.versions.release(prepared.mounted)

    def _prepare(
        self,
        tenant: str,
        client: str,
        request: PredictRequest,
        pixels: Pixels,
        mounted: MountedModule,
    ) -> PreparedRequest:
        module, schema = mounted.module, mounted.module.schema
        given = [name for name, _, _ in request.row.cameras]
        cameras = matching_cameras(schema.cameras, given)
        _check(request, mounted, saves=self._save_features is not None)
        rows: list[Row] = []
        states: list[npt.NDArray[np.float32] | None] = []
        lengths: list[int] = []
        for task, frames in zip(
            request.tasks, self._frames(tenant, client, request, pixels), strict=True
        ):
            images, state = [], None
            for frame in frames:
                found, state = split_row(request.row, frame)
                images += [resize(found[name], schema.image_size) for name in cameras]
            used = None
            if reads_state(schema):
                assert state is not None
                if not np.isfinite(state).all():
                    raise DataError("the state is not finite", column="state")
                used = state
            prompt = module.prompts([task], None if used is None else used[None])[0]
            row = Row(np.stack(images), prompt, module.num_queries)
            layout = self.backbone.canonicalizer.layout(
                prompt, num_images=len(images), num_queries=module.num_queries
            )
            rows.append(row)
            states.append(used)
            lengths.append(layout.padded_length)
        lane = "any" if self.encoder.share_length else "-".join(map(str, sorted(set(lengths))))
        return PreparedRequest(
            tenant, request, mounted, tuple(rows), tuple(states), tuple(lengths), lane
        )

    def _frames(
        self, tenant: str, client: str, request: PredictRequest, pixels: Pixels
    ) -> list[list[Pixels]]:
        """The bytes of each row's frames, oldest first; one frame without a history."""
        size = request.row.size_bytes
        if len(pixels) != request.size_bytes:
            raise DataError("a request's bytes do not fit what it says", column="images")
        frames = [pixels[at : at + size] for at in range(0, len(pixels), size)]
        if request.session is None:
            return [[frame] for frame in frames]
        kept = [frame.copy() for frame in frames]  # a window shall not keep a whole message
        window = self.sessions.advance(tenant, client, request.session, kept)
        return [list(window)]

    def _outcome(
        self, part: RunPart, decoded: list[DecodedRow], features: list[torch.Tensor]
    ) -> Outcome:
        mounted, request = part.prepared.mounted, part.prepared.request
        actions = np.stack([row.actions for row in decoded])
        if not np.isfinite(actions).all():
            return PlatformError(
                f"version {mounted.version} of {mounted.policy_key} gave actions that are not "
                "finite",
                policy_key=mounted.policy_key,
            )
        key = None
        if request.return_features:
            assert self._save_features is not None
            key = f"features-{request.request_id}-{part.start}"
            try:
                self._save_features(part.prepared.tenant, key, _columns(features))
            except CodedError as error:
                return error
        return Prediction(
            actions=actions,
            policy_version=mounted.version,
            module_digest=mounted.digest,
            signature=mounted.signature,
            features_key=key,
            **_judgement(request, decoded),
        )


def row_seed(request: PredictRequest, row: int) -> int:
    """The seed of a row's noise: from the request's own seed; where it samples without one, from
    its id, so that sending it again draws the same; else always the same."""
    source = request.seed if request.seed is not None or not request.sample else request.request_id
    text = f"{source or 0} {row}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _check(request: PredictRequest, mounted: MountedModule, *, saves: bool) -> None:
    schema = mounted.module.schema
    where = {"policy_key": mounted.policy_key, "version": mounted.version}
    if request.signature is not None and request.signature != schema.signature:
        raise DataError(
            f"{mounted.policy_key} has schema {schema.signature[:12]}, "
            f"not {request.signature[:12]} as asked for",
            **where,
        )
    if reads_state(schema) and request.row.state_dim != schema.state_dim:
        raise DataError(
            f"{mounted.policy_key} takes a state of {schema.state_dim} numbers, "
            f"not {request.row.state_dim}",
            column="state",
            **where,
        )
    for wanted, what in (
        (request.return_values and not request.sample, "value estimates without `sample`"),
        (request.return_log_probs and not request.sample, "log-probabilities without `sample`"),
        (request.return_features and not saves, "features"),
    ):
        if wanted:
            raise UnsupportedError(
                f"the action module of {mounted.policy_key} ({schema.action_module}) "
                f"gives no {what}",
                **where,
            )


def _is_judged(prepared: PreparedRequest) -> bool:
    """Whether chunks are drawn from the policy's distribution, as RL needs them, instead of
    computed, from noise where the module starts from noise."""
    request = prepared.request
    judged = request.return_values or request.return_log_probs
    return request.sample and (judged or not prepared.mounted.module.draws_noise)


def _judgement(
    request: PredictRequest, decoded: list[DecodedRow]
) -> dict[str, npt.NDArray[np.float32]]:
    """What is asked for of sampled chunks beside the actions."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    if request.return_values:
        found["values"] = np.array([row.value for row in decoded], np.float32)
    if request.return_log_probs:
        found["log_probs"] = np.stack([row.log_prob for row in decoded if row.log_prob is not None])
        found["latents"] = np.stack([row.latent for row in decoded if row.latent is not None])
    return found


def _columns(features: list[torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Rows' features as columns: `feature` padded in front along the tokens, and `length`."""
    lengths = [feature.shape[-2] for feature in features]
    longest = max(lengths)
    padded = [
        torch.nn.functional.pad(feature, (0, 0, longest - length, 0)).float().cpu().numpy()
        for feature, length in zip(features, lengths, strict=True)
    ]
    return {"feature": np.stack(padded), "length": np.asarray(lengths, np.int64)}
