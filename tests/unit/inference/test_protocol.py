"""What crosses between client and worker survives the way, and nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_platform.errors import NotFoundError, RequestError
from vla_platform.inference import protocol
from vla_platform.inference.frames import (
    MAX_FRAME_REQUESTS,
    pack_answers,
    pack_requests,
    unpack_answers,
    unpack_requests,
)
from vla_platform.inference.protocol import (
    Answer,
    Prediction,
    PredictRequest,
    RowShape,
    SessionStep,
)

CLIENT = "0" * 32


def request(**changes: object) -> PredictRequest:
    fields: dict[str, object] = {
        "request_id": "r-1",
        "policy": "reach",
        "version": None,
        "tasks": ("reach the block",),
        "row": RowShape(cameras=(("top", 4, 6),), state_dim=3),
        "timeout_s": 2.0,
        "place": (3, 8),
    }
    return PredictRequest(**(fields | changes))  # type: ignore[arg-type]


@given(
    version=st.one_of(st.none(), st.integers(0, 2**40), st.just("reach/run/10")),
    tasks=st.lists(st.text(max_size=40), min_size=1, max_size=4).map(tuple),
    seed=st.one_of(st.none(), st.integers(0, 2**31)),
    sample=st.booleans(),
    session=st.one_of(st.none(), st.just(SessionStep(session="e", step=4, history=3))),
)
def test_a_request_survives_the_way(version, tasks, seed, sample, session):
    sent = request(
        version=version,
        tasks=tasks[:1] if session else tasks,
        seed=seed,
        sample=sample,
        session=session,
    )
    frame = unpack_requests(pack_requests(CLIENT, "arena", [sent.to_dict()], [b"pixels"]))
    assert (frame.client, frame.arena, bytes(frame.body)) == (CLIENT, "arena", b"pixels")
    assert [sent] == [PredictRequest.from_dict(raw) for raw in frame.requests]


def test_answers_survive_the_way():
    rng = np.random.default_rng(0)
    predictions = [
        Prediction(
            actions=rng.normal(size=(2, 3, 4)).astype(np.float32),
            policy_version=7,
            module_digest="d",
            signature="s",
            values=rng.normal(size=2).astype(np.float32),
            features_key="k",
        ),
        Prediction(
            actions=rng.normal(size=(1, 8, 2)).astype(np.float32),
            policy_version=8,
            module_digest="e",
            signature="t",
        ),
    ]
    error = NotFoundError("no policy a/b", policy_key="a/b").to_dict()
    sent = [Answer(request_id=str(at), prediction=one) for at, one in enumerate(predictions)]
    found = unpack_answers(pack_answers([*sent, Answer(request_id="9", error=error)]))
    assert error == found[2].error
    for expected, answer in zip(predictions, found, strict=False):
        assert answer.prediction is not None
        assert np.array_equal(expected.actions, answer.prediction.actions)
        assert answer.prediction.actions.flags.writeable
        assert expected.policy_version == answer.prediction.policy_version
        assert (expected.values is None) == (answer.prediction.values is None)
    assert found[0].prediction.features_key == "k"  # type: ignore[union-attr]


def test_answers_alike_travel_together_and_part_again():
    """Of one version and shape they lie in one array; each gets its own numbers and key."""
    rng = np.random.default_rng(0)
    sent = [
        Answer(
            request_id=f"r{number}",
            prediction=Prediction(
                actions=rng.normal(size=(1, 8, 7)).astype(np.float32),
                policy_version=1 + number % 2,
                module_digest="d",
                signature="s",
                log_probs=rng.normal(size=(1, 8)).astype(np.float32) if number < 4 else None,
                features_key=f"k{number}" if number % 3 else None,
            ),
        )
        for number in range(8)
    ]
    failed = Answer(request_id="no", error={"code": "not_found"})
    found = {
        one.request_id: one for one in unpack_answers(pack_answers([*sent[:3], failed, *sent[3:]]))
    }
    assert found.pop("no") == failed
    assert {one.request_id for one in sent} == found.keys()
    for expected in sent:
        answer = found[expected.request_id].prediction
        assert answer is not None and expected.prediction is not None
        assert np.array_equal(expected.prediction.actions, answer.actions)
        if expected.prediction.log_probs is None:
            assert answer.log_probs is None
        else:
            assert np.array_equal(expected.prediction.log_probs, answer.log_probs)
        assert expected.prediction.policy_version == answer.policy_version
        assert expected.prediction.features_key == answer.features_key
        answer.actions[:] = 0  # its own: its neighbours keep theirs


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": ()},
        {"tasks": (1,)},
        {"row": [[], 3]},
        {"row": [[["top", -1, 4]], 3]},
        {"row": [[["top", 1 << 30, 4]], 3]},
        {"timeout_s": 0},
        {"timeout_s": "soon"},
        {"request_id": "../x"},
        {"request_id": 5},
        {"version": True},
        {"version": 1.5},
        {"place": (1,)},
        {"unknown": 1},
        {"place": (float("inf"), -1)},
        {"place": (0, 10**30)},
        {"timeout_s": 10**400},
        {"timeout_s": float("nan")},
        {"seed": [1]},
        {"signature": 5},
        {"row": [[["top", 0, 0]], 0]},
        {"session": {"session": "e", "step": 0, "history": 4, "num_frames": "1"}},
        {"session": {"session": "e", "step": 0, "history": None}},
        {"session": {"session": "e", "step": 0, "history": 99}},
        {"tasks": ("a",) * (protocol.MAX_ROWS + 1)},
    ],
)
def test_what_no_client_of_ours_sends_is_refused(changes):
    with pytest.raises(RequestError):
        PredictRequest.from_dict(request().to_dict() | changes)


def test_a_frame_of_very_many_requests_is_refused():
    with pytest.raises(RequestError, match="at most"):
        unpack_requests(pack_requests("0" * 32, None, [{}] * (MAX_FRAME_REQUESTS + 1)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_typed_error(data: bytes):
    with pytest.raises(RequestError):
        unpack_requests(data)
