"""Parquet files as numpy columns, with errors that name the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vla_platform.errors import DatasetError


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, or only `columns` of it.

    Raises `DatasetError` for a file that is missing, cut off (no footer) or lacks a column.
    """
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            present = set(file.schema_arrow.names)
            missing = [name for name in columns or () if name not in present]
            if missing:
                raise DatasetError(
                    f"{path}: no column {', '.join(missing)}; it has {', '.join(sorted(present))}",
                    path=str(path),
                )
            return file.read(columns=columns, use_threads=False)
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: no such file", path=str(path)) from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: not a readable parquet file ({error})", path=str(path)
        ) from error


def column_array(
    table: pa.Table, name: str, shape: tuple[int, ...], dtype: str, path: Path
) -> npt.NDArray[Any]:
    """One column as an array. Shape: (T, *shape), or (T,) where `shape` is (1,).

    Raises `DatasetError` where rows are missing, of another width or not numbers.
    """
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # older pyarrow keeps an empty column chunked
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    num_rows = len(column)
    nested = False
    while (
        pa.types.is_list(column.type)
        or pa.types.is_fixed_size_list(column.type)
        or (pa.types.is_large_list(column.type))
    ):
        nested = True
        if column.null_count:
            raise DatasetError(f"{path}: {name} has empty rows", path=str(path), feature=name)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            raise DatasetError(
                f"{path}: {name} has rows of {int(lengths.min())} to {int(lengths.max())} values",
                path=str(path),
                feature=name,
            )
        column = column.flatten()
    size = int(np.prod(shape))
    if column.null_count:
        raise DatasetError(f"{path}: {name} has empty values", path=str(path), feature=name)
    if len(column) != num_rows * size:
        width = len(column) // max(num_rows, 1)
        raise DatasetError(
            f"{path}: {name} has {width} values a row, info.json says {size}",
            path=str(path),
            feature=name,
        )
    try:
        array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False).astype(
            np.dtype(dtype), casting="same_kind"
        )
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise DatasetError(
            f"{path}: {name} is {column.type}, info.json says {dtype}",
            path=str(path),
            feature=name,
        ) from error
    scalar = shape == (1,) and not nested
    return array if scalar else array.reshape(num_rows, *shape)
