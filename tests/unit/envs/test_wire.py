"""The byte form of session messages."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vla_platform.envs import wire
from vla_platform.envs.base import EnvironmentInfo, Observation
from vla_platform.envs.sessions import EnvironmentRequest, Outcome
from vla_platform.errors import DataError, SimulatorError


@given(
    arrays.arrays(
        dtype=arrays.integer_dtypes() | arrays.floating_dtypes() | arrays.boolean_dtypes(),
        shape=arrays.array_shapes(min_dims=0, min_side=0, max_dims=4),
    )
)
def test_arrays_come_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    back = wire.decode(wire.encode({"array": array}))["array"]
    assert (array.shape, array.dtype.newbyteorder("<")) == (back.shape, back.dtype)
    assert array.astype(back.dtype).tobytes() == back.tobytes()


def test_every_type_of_a_session_comes_back() -> None:
    seen = Observation(
        {"top": np.full((4, 6, 3), 7, np.uint8)}, np.arange(3, dtype=np.float32), "reach ü"
    )
    outcome = Outcome(
        observation=seen,
        rewards=np.ones(2, np.float32),
        actions=np.zeros((2, 1), np.float32),
        terminated=True,
        truncated=False,
        success=True,
        num_clipped=1,
        info={"success": True},
        frames=(seen, seen),
    )
    info = EnvironmentInfo(
        cameras={"z": (4, 6), "a": (2, 2)},
        state_names=("x", "y", "z"),
        action_names=("a",),
        action_low=np.zeros(1, np.float32),
        action_high=np.ones(1, np.float32),
        fps=10.0,
        max_steps=3,
        robot_type="r",
    )
    request = EnvironmentRequest(env_id="tabletop/push", options={"render": False})
    error = SimulatorError("broken", failure="raised", step=3)
    back = wire.decode(
        wire.encode({"o": outcome, "i": info, "r": request, "e": error, "b": b"\0\xff"})
    )
    assert request == back["r"]
    assert back["b"] == b"\0\xff"
    assert list(back["i"].cameras) == ["z", "a"]
    np.testing.assert_array_equal(info.action_high, back["i"].action_high)
    assert (type(error), error.message, error.details) == (
        type(back["e"]), back["e"].message, back["e"].details,
    )  # fmt: skip
    assert len(back["o"].frames) == 2
    np.testing.assert_array_equal(seen.images["top"], back["o"].frames[1].images["top"])
    assert (outcome.num_steps, outcome.success) == (back["o"].num_steps, back["o"].success)


def array_message(dtype: str, shape: object, data: bytes) -> bytes:
    header = msgpack.packb([dtype, shape])
    message: bytes = msgpack.packb({"a": msgpack.ExtType(1, bytes([len(header)]) + header + data)})
    return message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        pickle.dumps({"a": 1}),
        msgpack.packb([1, 2]),
        msgpack.packb({"a": msgpack.ExtType(2, b"x")}),
        msgpack.packb({"a": msgpack.ExtType(1, b"")}),
        array_message("|O8", [1], b"12345678"),
        array_message("(,)f4", [1], b"1234"),
        array_message("f4,f4", [1], b"12345678"),
        array_message("<f4", [9], b"1234"),
        array_message("<f4", [-1], b"1234"),
        array_message("<f4", "x", b"1234"),
        msgpack.packb({"a": {"t": "observation", "images": {}}}),
        msgpack.packb({"a": {"t": "os.system"}}),
        msgpack.packb({1: 2}),
        b"\x81\xa1a" * 5000,
    ],
)  # fmt: skip
def test_b26_b27_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(DataError):
        wire.decode(raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(wire.decode(raw), dict)
    except DataError as error:
        assert error.code == "data"
