"""Initial states of LIBERO are read without running what a file says (PF-39)."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_platform.envs.libero_states import load_init_states
from vla_platform.errors import DatasetError


def archive(path: Path, content: Any, *, name: str = "archive/data.pkl") -> Path:
    """As `torch.save` writes it."""
    with zipfile.ZipFile(path, "w") as file:
        raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
        file.writestr(name, raw)
        file.writestr("archive/version", "3\n")
    return path


def test_pf39_arrays_of_torch_archives(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(50, 92))
    found = load_init_states(archive(tmp_path / "a.pruned_init", states))
    np.testing.assert_array_equal(states, found)


def test_plain_files_beside_are_preferred(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.pruned_init.npz", states=np.ones((2, 3)))
    np.testing.assert_array_equal(np.ones((2, 3)), load_init_states(tmp_path / "a.pruned_init"))


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("pwned",))


@pytest.mark.parametrize(
    "content",
    [
        Evil(),
        [np.zeros(3), Evil()],
        b"",
        b"\x80\x02",
        {"a": 1},
        np.zeros(3),
        np.zeros((2, 3), np.float32),
        np.full((2, 3), np.nan),
        np.array([[object()]]),
    ],
)
def test_pf39_anything_else_is_refused_and_not_run(
    tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError):
        load_init_states(archive(tmp_path / "a.pruned_init", content))
    assert not (tmp_path / "pwned").exists()


def test_pickled_objects_in_plain_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.pruned_init.npz", states=np.array([{"a": 1}]))
    with pytest.raises(DatasetError):
        load_init_states(tmp_path / "a.pruned_init")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    (tmp_path / "b.pruned_init").write_bytes(b"no zip")
    for name in ("a.pruned_init", "b.pruned_init"):
        with pytest.raises(DatasetError, match="no initial states"):
            load_init_states(tmp_path / name)
    with pytest.raises(DatasetError):
        load_init_states(archive(tmp_path / "c.pruned_init", np.zeros((2, 2)), name="x/other.pkl"))
