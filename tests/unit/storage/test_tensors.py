"""Strict safetensors: what is read, and what is refused (B60, B61, B63, PF-23)."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from vla_storage.errors import TensorFormatError
from vla_storage.tensors import MAX_HEADER_BYTES, MAX_TENSORS, check_header, decode, encode, write

DTYPES = st.sampled_from(["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"])
NAMES = st.text(alphabet="abcdef.01_", min_size=1, max_size=12)
TENSORS = st.dictionaries(
    NAMES,
    DTYPES.flatmap(
        lambda dtype: st_numpy.arrays(
            np.dtype(dtype), st_numpy.array_shapes(min_dims=0, min_side=0, max_side=4)
        )
    ),
    max_size=6,
)


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[object], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def reason(data: bytes, **options: object) -> str:
    with pytest.raises(TensorFormatError) as caught:
        decode(data, **options)  # type: ignore[arg-type]
    return str(caught.value.details["reason"])


@given(TENSORS)
def test_round_trip_keeps_every_bit_and_is_read_by_the_library(
    tensors: dict[str, np.ndarray],
) -> None:
    data = encode(tensors)
    library = safetensors.numpy.load(data)
    decoded = decode(data)

    assert set(tensors) == set(decoded) == set(library)
    for name, array in tensors.items():
        assert (array.dtype, array.shape) == (decoded[name].dtype, decoded[name].shape)
        assert array.tobytes() == decoded[name].tobytes() == library[name].tobytes()
        assert decoded[name].flags.writeable


@given(TENSORS)
def test_streamed_bytes_equal_encoded_bytes_in_any_insertion_order(
    tensors: dict[str, np.ndarray],
) -> None:
    file = io.BytesIO()
    size = write(dict(reversed(tensors.items())), file)

    assert encode(tensors) == file.getvalue()
    assert size == len(file.getvalue())


def test_reads_what_the_library_writes() -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([True, False])}
    decoded = decode(safetensors.numpy.save(tensors, metadata={"format": "pt"}))

    for name, array in tensors.items():
        np.testing.assert_array_equal(array, decoded[name])


def test_arrays_that_are_not_contiguous_are_packed() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T

    np.testing.assert_array_equal(array, decode(encode({"t": array}))["t"])


@given(TENSORS, st.data())
def test_b60_every_truncation_is_refused(
    tensors: dict[str, np.ndarray], draw: st.DataObject
) -> None:
    data = encode(tensors)
    kept = draw.draw(st.integers(0, len(data) - 1))

    assert reason(data[:kept]) in {"truncated", "header_invalid"}


GOOD = encode({"t": np.ones(3, np.float32)})


@pytest.mark.parametrize(
    ("expected", "data"),
    [
        ("trailing_bytes", GOOD + b"\0"),
        ("truncated", b""),
        ("header_too_large", (2**40).to_bytes(8, "little") + b"{}"),
        ("header_too_large", (2**63).to_bytes(8, "little")),
        (
            "duplicate_key",
            file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4, [1])).encode(),) * 2)),
        ),
        ("offsets", file_of({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12))),
        ("offsets", file_of({"a": entry(4, 8, [1])}, bytes(8))),
        ("offsets", file_of({"a": entry(0, 8, [1])}, bytes(8))),
        ("offsets", file_of({"a": entry(8, 0, [1])}, bytes(8))),
        ("offsets", file_of({"a": entry(0, 4, [2**31, 2**31])}, bytes(4))),
        ("shape", file_of({"a": entry(0, 4, [-1])}, bytes(4))),
        ("shape", file_of({"a": entry(0, 4, [True])}, bytes(4))),
        ("shape", file_of({"a": entry(0, 4, [1.0])}, bytes(4))),
        ("shape", file_of({"a": entry(0, 4, [1] * 40)}, bytes(4))),
        ("dtype", file_of({"a": entry(0, 4, [1], "OBJECT")}, bytes(4))),
        ("header_invalid", file_of(b"[" * 100_000)),
        ("header_invalid", file_of([1])),
        ("header_invalid", file_of({"a": 1})),
        ("header_invalid", file_of(b"\xff\xfe")),
        ("too_many_tensors", file_of({str(i): entry(0, 0, [0]) for i in range(MAX_TENSORS + 1)})),
    ],
)
def test_b60_malformed_files_are_refused_by_name(expected: str, data: bytes) -> None:
    assert expected == reason(data)


def test_b61_not_finite_weights_are_refused_where_asked() -> None:
    data = encode({"t": np.array([1.0, np.nan], np.float32)})

    assert reason(data, require_finite=True) == "not_finite"
    assert np.isnan(decode(data)["t"][1])


def test_b63_a_size_limit_acts_before_anything_is_read() -> None:
    assert reason(GOOD, max_bytes=len(GOOD) - 1) == "too_large"
    declared = file_of({"a": entry(0, 2**33, [2**31])})
    with pytest.raises(TensorFormatError) as caught:
        check_header(declared, len(declared))
    assert caught.value.details["reason"] == "truncated"


def test_pf23_the_writer_refuses_what_no_reader_accepts() -> None:
    scalar = np.zeros((), np.float32)
    with pytest.raises(TensorFormatError) as caught:
        encode(dict.fromkeys((str(i) for i in range(MAX_TENSORS + 1)), scalar))

    assert caught.value.details["reason"] == "too_many_tensors"
    assert MAX_HEADER_BYTES < 100_000_000  # the library's own limit


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([None]), np.array([1j])])
def test_the_writer_refuses_dtypes_it_cannot_store(array: np.ndarray) -> None:
    with pytest.raises(TensorFormatError) as caught:
        encode({"t": array})
    assert caught.value.details["reason"] == "dtype"
