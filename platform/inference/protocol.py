"""What a client and an inference worker say to each other: requests and answers.

Addresses (payload Redis): requests on the stream `infer:<base model>:<tenant>`, which the broker
lets only that tenant write, so the stream is the identity; answers on the list
`<tenant>:infer:reply:<client>`; what killed its worker on the list `infer.dead:<base model>`. How
they look there: `vla_platform.inference.frames`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DataError, RequestError

MAX_ROWS = 4096
MAX_REQUEST_BYTES = 256 << 20
MAX_SESSION_FRAMES = 16
MAX_TIMEOUT_S = 86_400.0
CLIENT_ID = re.compile(r"[0-9a-f]{32}")
_REQUEST_ID = re.compile(r"[0-9a-zA-Z_.-]{1,64}")


def stream_of(base_model: str, tenant: str) -> str:
    return f"infer:{base_model}:{tenant}"


def replies_of(tenant: str, client: str) -> str:
    return f"{tenant}:infer:reply:{client}"


def dead_letters_of(base_model: str) -> str:
    return f"infer.dead:{base_model}"


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """The bytes of one observation: the pictures in order, then the state as float32."""

    cameras: tuple[tuple[str, int, int], ...]  # name, height, width; 3 bytes a pixel
    state_dim: int

    @functools.cached_property
    def size_bytes(self) -> int:
        return sum(3 * prod(camera[1:]) for camera in self.cameras) + 4 * self.state_dim


@dataclass(frozen=True, kw_only=True)
class SessionStep:
    """Which step of which session a row is, for policies that look back `history` frames.

    A request ships the newest frames only; the worker keeps the session's window.
    """

    session: str
    step: int  # of the newest frame, from 0
    history: int  # frames in the window
    num_frames: int = 1  # that this request ships, the newest last
    is_whole: bool = False  # whether these are all that the sender has


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """One call of `predict`: B rows of one policy, all with the same cameras and state.

    `place` is where the rows' bytes lie: `(slot, generation)` of the client's arena, or
    `(offset, -1)` behind the frame's head. With a `session`, B is 1 and `num_frames` observations
    follow each other.
    """

    request_id: str
    policy: str
    version: int | str | None  # policy version, checkpoint id, or the current one
    tasks: tuple[str, ...]  # one per row
    row: RowShape
    timeout_s: float
    place: tuple[int, int]
    signature: str | None = None  # schema that the caller counts on
    sample: bool = False
    seed: int | None = None
    return_values: bool = False
    return_log_probs: bool = False
    return_features: bool = False
    session: SessionStep | None = None
    sent_ms: float = 0.0  # the sender's own clock, for its own statistics

    @property
    def num_rows(self) -> int:
        return len(self.tasks)

    @property
    def size_bytes(self) -> int:
        frames = self.session.num_frames if self.session else 1
        return self.num_rows * frames * self.row.size_bytes

    def to_dict(self) -> dict[str, Any]:
        """The wire form; what has its default is left out."""
        raw = {k: v for k, v in self.__dict__.items() if _REQUEST_DEFAULTS.get(k, _UNSET) != v}
        raw["row"] = [self.row.cameras, self.row.state_dim]
        if self.session is not None:
            raw["session"] = asdict(self.session)
        return raw

    @classmethod
    def from_dict(cls, raw: Any) -> PredictRequest:
        """Raises `RequestError` for anything that no client of ours sends."""
        try:
            fields = dict(raw)
            cameras, state_dim = fields["row"]
            fields["row"] = _row_shape(tuple(map(tuple, cameras)), state_dim)
            fields["tasks"] = tuple(_text(task) for task in fields["tasks"])
            fields["place"] = tuple(_place(number) for number in fields["place"])
            session = fields.get("session")
            fields["session"] = None if session is None else SessionStep(**session)
            request = cls(**fields)
            request._check()
        except RequestError:
            raise
        except Exception as error:  # anybody may have written it, and with anything in it
            raise RequestError(f"not a request: {error!r:.200}") from error
        return request

    def _check(self) -> None:
        known = isinstance(self.request_id, str) and _REQUEST_ID.fullmatch(self.request_id)
        if not known or not isinstance(self.policy, str) or len(self.place) != 2:
            raise RequestError("a request without an id, a policy or a place")
        if not 1 <= self.num_rows <= MAX_ROWS or not self.row.cameras:
            raise RequestError(f"a request has 1 to {MAX_ROWS} rows with a picture each")
        if self.size_bytes > MAX_REQUEST_BYTES:
            raise RequestError(f"a request has at most {MAX_REQUEST_BYTES} bytes")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise RequestError(f"a timeout is above 0 and at most {MAX_TIMEOUT_S:g} s")
        if isinstance(self.version, bool) or not isinstance(self.version, int | str | None):
            raise RequestError("a version is a number or a checkpoint id")
        if not (self.seed is None or type(self.seed) is int) or not (
            isinstance(self.signature, str | None)
        ):
            raise RequestError("a seed is a whole number, a signature is text")
        step = self.session
        if step is not None and not (
            self.num_rows == 1
            and isinstance(step.session, str)
            and all(type(one) is int for one in (step.step, step.num_frames, step.history))
            and 1 <= step.num_frames <= step.history <= MAX_SESSION_FRAMES
        ):
            raise RequestError(
                f"a session's request has one row and 1 to {MAX_SESSION_FRAMES} frames"
            )


def request_id_of(raw: Any) -> str:
    """What a refused request calls itself, as far as that can be told."""
    name = raw.get("request_id") if isinstance(raw, dict) else None
    return str(name)[:64]


_UNSET = object()
_REQUEST_DEFAULTS = {
    name: entry.default
    for name, entry in PredictRequest.__dataclass_fields__.items()
    if name in ("signature", "sample", "seed", "session", "sent_ms") or name.startswith("return_")
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Action chunks of one request, un-normalised.

    actions  float32, Shape: (B, H, A), in the data's own units.
    values, log_probs  Shape: (B,) and (B, H), where asked for and the module has them.
    latents  Shape: (B, K, H, A); of sampled chunks, what training needs to find them likely.
    features_key  partitions of the payload store, by comma, that hold the rows' features.
    """

    actions: npt.NDArray[np.float32]
    policy_version: int
    module_digest: str  # SHA-256 of the action module's tensors
    signature: str  # of the schema
    values: npt.NDArray[np.float32] | None = None
    log_probs: npt.NDArray[np.float32] | None = None
    latents: npt.NDArray[np.float32] | None = None
    features_key: str | None = None


ARRAYS = ("actions", "values", "log_probs", "latents")
"""The arrays of a prediction, by name."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To one request: a prediction, or an error in its wire form."""

    request_id: str
    prediction: Prediction | None = None
    error: dict[str, Any] | None = None


@functools.lru_cache(maxsize=1024)
def _row_shape(cameras: tuple[tuple[Any, ...], ...], state_dim: Any) -> RowShape:
    """Requests come by the thousand in a few shapes."""
    return RowShape(
        cameras=tuple((_text(n), _side(h), _side(w)) for n, h, w in cameras),
        state_dim=_count(state_dim),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _side(value: Any) -> int:
    if _count(value) < 1:
        raise ValueError("a picture without pixels")
    return int(value)


def _place(value: Any) -> int:
    if type(value) is not int or not -1 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is not a place")
    return value


def split_row(
    row: RowShape, raw: npt.NDArray[np.uint8]
) -> tuple[dict[str, npt.NDArray[np.uint8]], npt.NDArray[np.float32]]:
    """Pictures by camera and the state of one row, as views of its bytes."""
    images, at = {}, 0
    for name, height, width in row.cameras:
        size = 3 * height * width
        images[name] = raw[at : at + size].reshape(height, width, 3)
        at += size
    tail = raw[at : at + 4 * row.state_dim]
    if len(tail) != 4 * row.state_dim:
        raise DataError("an observation is shorter than it says", column="state")
    return images, np.frombuffer(tail.tobytes(), np.float32).copy()
