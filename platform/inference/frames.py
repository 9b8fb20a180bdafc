"""Requests and answers as bytes: many of them in a frame.

A frame is the length of a JSON head (4 bytes, little-endian), the head, and raw bytes that the head
points into. Pixels are raw bytes behind the head, or lie in the client's arena
(`vla_platform.inference.arena`); never text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from vla_platform.errors import RequestError
from vla_platform.inference.protocol import ARRAYS, CLIENT_ID, Answer, Prediction

PROTOCOL_VERSION = 2
MAX_FRAME_HEAD_BYTES = 4 << 20
MAX_FRAME_REQUESTS = 1024
_LENGTH = 4

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class RequestFrame:
    """One entry of a stream: requests of one client for one tenant and base model."""

    client: str  # 32 hex digits
    arena: str | None  # name of the client's arena; None: the bytes follow the head
    requests: tuple[dict[str, Any], ...]
    body: Bytes = field(default=b"", repr=False)


def pack(head: dict[str, Any], parts: Sequence[Bytes] = ()) -> bytes:
    text = json.dumps(head, separators=(",", ":"), default=str).encode()
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *parts])


def unpack(frame: Bytes) -> tuple[dict[str, Any], memoryview]:
    """Head and body. Raises `RequestError`."""
    view = memoryview(frame)
    length = int.from_bytes(view[:_LENGTH], "little")
    if length > min(MAX_FRAME_HEAD_BYTES, len(view) - _LENGTH):
        raise RequestError("a frame's head is longer than the frame")
    try:
        head = json.loads(bytes(view[_LENGTH : _LENGTH + length]))
    except (ValueError, RecursionError) as error:
        raise RequestError("a frame's head is not JSON") from error
    if not isinstance(head, dict) or head.get("v") != PROTOCOL_VERSION:
        raise RequestError(f"a frame of version {PROTOCOL_VERSION} is read; update one of the two")
    return head, view[_LENGTH + length :]


def pack_requests(
    client: str, arena: str | None, requests: Sequence[dict[str, Any]], parts: Sequence[Bytes] = ()
) -> bytes:
    """A frame of requests in their wire form (`PredictRequest.to_dict`)."""
    return pack(
        {
            "v": PROTOCOL_VERSION,
            "client": client,
            "arena": arena,
            "requests": requests,
        },
        parts,
    )


def unpack_requests(frame: Bytes) -> RequestFrame:
    """The frame with its requests still unchecked. Raises `RequestError`."""
    head, body = unpack(frame)
    client, arena, requests = head.get("client"), head.get("arena"), head.get("requests")
    if not isinstance(client, str) or not CLIENT_ID.fullmatch(client):
        raise RequestError("a frame without a client")
    if not isinstance(arena, str | None) or not isinstance(requests, list):
        raise RequestError("a frame without requests")
    if len(requests) > MAX_FRAME_REQUESTS:
        raise RequestError(f"a frame has at most {MAX_FRAME_REQUESTS} requests")
    return RequestFrame(client=client, arena=arena, requests=tuple(requests), body=body)


def pack_answers(answers: Sequence[Answer]) -> bytes:
    """Predictions of one version and of equal shapes lie together, one array after the other;
    errors come last."""
    alike: dict[tuple[Any, ...], list[Answer]] = {}
    errors = []
    for answer in answers:
        one = answer.prediction
        if one is None:
            errors.append([answer.request_id, answer.error])
            continue
        shapes = tuple(
            (name, array.shape) for name in ARRAYS if (array := getattr(one, name)) is not None
        )
        of = (one.policy_version, one.module_digest, one.signature)
        alike.setdefault((of, shapes), []).append(answer)
    blocks: list[dict[str, Any]] = []
    parts: list[Bytes] = []
    for (of, shapes), members in alike.items():
        found = [answer.prediction for answer in members if answer.prediction is not None]
        blocks.append(
            {
                "ids": [answer.request_id for answer in members],
                "of": of,
                "features": [one.features_key for one in found],
                "arrays": shapes,
            }
        )
        for name, _ in shapes:
            together = np.array([getattr(one, name) for one in found], np.float32)
            parts.append(together.data.cast("B"))
    return pack({"v": PROTOCOL_VERSION, "blocks": blocks, "errors": errors}, parts)


def unpack_answers(frame: Bytes) -> list[Answer]:
    head, body = unpack(frame)
    floats = np.frombuffer(body, "<f4")
    answers, at = [], 0
    for block in head["blocks"]:
        ids = block["ids"]
        arrays = {}
        for name, shape in block["arrays"]:
            count = len(ids) * prod(shape)
            arrays[name] = floats[at : at + count].reshape(len(ids), *shape)
            at += count
        version, digest, signature = block["of"]
        answers += [
            Answer(
                request_id=request_id,
                prediction=Prediction(
                    policy_version=version,
                    module_digest=digest,
                    signature=signature,
                    features_key=features_key,
                    # Copies: callers may write into theirs, and must not keep the frame alive.
                    **{name: array[row].copy() for name, array in arrays.items()},
                ),
            )
            for row, (request_id, features_key) in enumerate(
                zip(ids, block["features"], strict=True)
            )
        ]
    answers += [Answer(request_id=name, error=error) for name, error in head["errors"]]
    return answers
