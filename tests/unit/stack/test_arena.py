"""The stack's shared memory: its name, its size, when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_platform.errors import ConfigurationError
from vla_platform.stack import arena
from vla_platform.stack.sweep import sweep
from vla_storage.payloads import ArenaTier


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(arena, "SHARED_MEMORY", folder)
    return folder


def test_its_name_follows_from_the_folder_and_sweep_removes_it(
    tmp_path: Path, shared_memory: Path
) -> None:
    var = tmp_path / "var"
    path = arena.prepare_arena(var, {"VLA_ARENA_BYTES": str(20 << 20)})
    assert path == arena.arena_path(var)
    assert path != arena.arena_path(tmp_path / "other")
    assert path.stat().st_size > 20 << 20
    ArenaTier(path).close()
    assert sweep(var) == 0
    assert list(shared_memory.iterdir()) == []


def test_it_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arena.prepare_arena(tmp_path, {"VLA_ARENA_BYTES": "0"}) is None
    monkeypatch.setattr(arena, "SHARED_MEMORY", tmp_path / "nowhere")
    assert arena.prepare_arena(tmp_path, {}) is None


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    for wrong in ("-1", "1G", ""):
        with pytest.raises(ConfigurationError, match="VLA_ARENA_BYTES"):
            arena.prepare_arena(tmp_path, {"VLA_ARENA_BYTES": wrong})


def test_it_takes_half_of_the_room_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 64 << 20})
    monkeypatch.setattr(arena.shutil, "disk_usage", lambda _: usage)
    path = arena.prepare_arena(tmp_path, {})
    assert path is not None
    assert 32 << 20 < path.stat().st_size < 40 << 20
    usage.free = 8 << 20  # such as a container's 64 MB that others have filled
    assert arena.prepare_arena(tmp_path, {}) is None
