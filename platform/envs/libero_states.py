"""LIBERO's recorded initial states, read without running what a file says (PF-39).

The files of the original package are torch archives that hold one pickled numpy array; torch's safe
loader refuses them, and switching its safety off would run any code they carry. Here the array is
read with an unpickler that knows numpy's constructor and nothing else. Some packages carry the same
arrays as `.npz`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.errors import DatasetError

MAX_BYTES = 64 << 20
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def load_init_states(path: Path) -> npt.NDArray[np.float64]:
    """The states of one task, one a row. Shape: (num_states, D).

    `path` names the `.pruned_init` file; an `.npz` beside it is preferred. Raises `DatasetError`.
    """
    plain = path.with_name(f"{path.name}.npz")
    try:
        states = _from_npz(plain) if plain.exists() else _from_archive(path)
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        zipfile.BadZipFile,
        pickle.PickleError,
    ) as error:
        raise DatasetError(f"{path}: no initial states: {error}", path=str(path)) from error
    if states.ndim != 2 or states.dtype != np.float64 or not np.isfinite(states).all():
        raise DatasetError(
            f"{path}: holds {states.dtype} {states.shape}, not float64 rows", path=str(path)
        )
    return states


def _from_npz(path: Path) -> npt.NDArray[Any]:
    with np.load(path, allow_pickle=False) as archive:
        (name,) = archive.files
        found: npt.NDArray[Any] = archive[name]
        return found


def _from_archive(path: Path) -> npt.NDArray[Any]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("/data.pkl")]
        if archive.getinfo(name).file_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        found = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
    if not isinstance(found, np.ndarray):
        raise ValueError(f"holds a {type(found).__name__}")
    return found
