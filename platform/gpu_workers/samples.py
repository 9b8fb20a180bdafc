"""The columns of a training job, checked against the policy's schema before they train anything.

What is wrong with one tenant's data is found here, before the rows of several tenants meet in one
forward, and is reported with episode and frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vla_platform.errors import DataError
from vla_platform.gpu_workers.action_modules.base import ActionModule
from vla_platform.gpu_workers.algorithms.sft import Samples
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.features import VLAFeature
from vla_platform.schema import Schema

Columns = Mapping[str, npt.NDArray[Any]]
ROW = "row"
"""Which row of the partition each one is, where only some were fetched."""


def check_columns(columns: Columns, schema: Schema) -> None:
    """Raise `DataError` where a column is missing, misshapen or not finite."""
    actions = _column(columns, "actions")
    num = len(actions)
    if num == 0:
        raise DataError("the batch has no rows", column="actions")
    size = schema.image_size
    expected: dict[str, tuple[int, ...]] = {
        "images": (num, len(schema.cameras), size, size, 3),
        "actions": (num, schema.chunk, schema.action_dim),
        "actions_is_pad": (num, schema.chunk),
    }
    if reads_state(schema):
        expected["state"] = (num, schema.state_dim)
    for name, shape in expected.items():
        found = _column(columns, name)
        if found.shape != shape:
            raise DataError(
                f"column {name!r} has shape {found.shape}, the schema wants {shape}", column=name
            )
    if columns["images"].dtype != np.uint8:
        raise DataError(f"images are {columns['images'].dtype}, not uint8", column="images")
    prompts = _column(columns, "prompt")
    if prompts.dtype != np.uint8 or prompts.ndim != 2 or len(prompts) != num:
        raise DataError(f"prompts are not bytes of {num} rows", column="prompt")
    for name in ("state", "actions"):
        if name in expected:
            _check_finite(columns, name)


def reads_state(schema: Schema) -> bool:
    return schema.state_dim > 0 and schema.state_input != "none"


def _column(columns: Columns, name: str) -> npt.NDArray[Any]:
    found = columns.get(name)
    if found is None:
        raise DataError(f"column {name!r} is missing", column=name)
    return found


def _check_finite(columns: Columns, name: str) -> None:
    finite = np.isfinite(columns[name])
    if finite.all():
        return
    at = int(np.argwhere(~finite)[0, 0])
    row = int(columns[ROW][at]) if ROW in columns else at
    place: dict[str, int] = {
        key: int(columns[key][at]) for key in ("episode", "frame") if key in columns
    }
    where = ", ".join(f"{key} {value}" for key, value in place.items()) or f"row {row}"
    raise DataError(f"column {name!r} is not finite at {where}", column=name, row=row, **place)


def rows_of(columns: Columns, module: ActionModule) -> list[Row]:
    """The rows that the backbone reads. Columns must have passed `check_columns`."""
    images = columns["images"]
    state = columns["state"] if reads_state(module.schema) else None
    prompts = module.prompts(decode_prompts(columns["prompt"]), state)
    return [
        Row(images=images[at], prompt=prompt, num_queries=module.num_queries)
        for at, prompt in enumerate(prompts)
    ]


def decode_prompts(column: npt.NDArray[np.uint8]) -> list[str]:
    """UTF-8 bytes padded with zeros, (B, L), to text."""
    try:
        return [row.tobytes().rstrip(b"\0").decode() for row in column]
    except UnicodeDecodeError as error:
        raise DataError(f"a prompt is not UTF-8: {error}", column="prompt") from error


def samples_of(columns: Columns, feature: VLAFeature, schema: Schema) -> Samples:
    """Features and numbers of a job, on the device of the features."""
    device = feature.values.device
    state = (
        torch.tensor(columns["state"], dtype=torch.float32, device=device)
        if reads_state(schema)
        else None
    )
    padded = np.asarray(columns["actions_is_pad"], np.bool_)
    return Samples(
        feature=feature,
        state=state,
        actions=torch.tensor(columns["actions"], dtype=torch.float32, device=device),
        valid=torch.tensor(~padded, device=device),
    )
