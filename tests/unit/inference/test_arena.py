"""Shared memory: what is read is what was written for that request, or an error; never a crash."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_platform.errors import PixelsLostError, PixelsUnreachableError
from vla_platform.inference.arena import Arena, ArenaReader, sweep


def numbers(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_a_slot_gives_back_what_was_written(tmp_path: Path):
    arena, reader = (
        Arena(slot_bytes=1000, num_slots=3, folder=tmp_path),
        ArenaReader(folder=tmp_path),
    )
    for seed in range(7):
        slot = arena.take()
        assert slot is not None
        parts = [numbers(600, seed), numbers(100, seed + 50)]
        generation = arena.write(slot, parts)
        for get in (reader.read, reader.view):
            found = get(arena.name, slot, generation, 700)
            found.check()
            assert np.array_equal(np.concatenate(parts), found.data)
        arena.give_back(slot)
    arena.close()
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_all_slots_are_handed_out_once(tmp_path: Path):
    arena = Arena(slot_bytes=10, num_slots=3, folder=tmp_path)
    assert {0, 1, 2} == {arena.take() for _ in range(3)}
    assert arena.take() is None
    arena.close()


def test_a_slot_that_was_used_again_is_never_taken_for_the_old_one(tmp_path: Path):
    arena, reader = Arena(slot_bytes=10, num_slots=1, folder=tmp_path), ArenaReader(folder=tmp_path)
    slot = arena.take()
    assert slot is not None
    old = arena.write(slot, [numbers(10, 0)])
    arena.write(slot, [numbers(10, 1)])
    for get in (reader.read, reader.view):
        with pytest.raises(PixelsLostError):
            get(arena.name, slot, old, 10)
    arena.close()
    reader.close()


def test_a_view_tells_when_its_slot_goes_to_another_request(tmp_path: Path):
    arena, reader = Arena(slot_bytes=10, num_slots=1, folder=tmp_path), ArenaReader(folder=tmp_path)
    generation = arena.write(0, [numbers(10, 0)])
    copied = reader.read(arena.name, 0, generation, 10)
    seen = reader.view(arena.name, 0, generation, 10)
    assert not seen.data.flags.writeable
    seen.check()
    arena.write(0, [numbers(10, 1)])
    copied.check()
    assert np.array_equal(numbers(10, 0), copied.data)
    with pytest.raises(PixelsLostError):
        seen.check()
    arena.close()
    reader.close()
    assert np.array_equal(numbers(10, 1), seen.data)  # it stays as long as somebody looks


@pytest.mark.parametrize(("slot", "size"), [(7, 10), (-1, 10), (0, 1 << 20), (1 << 40, 10)])
def test_places_outside_the_arena_are_errors(tmp_path: Path, slot: int, size: int):
    arena, reader = Arena(slot_bytes=10, num_slots=1, folder=tmp_path), ArenaReader(folder=tmp_path)
    for get in (reader.read, reader.view):
        with pytest.raises(PixelsLostError):
            get(arena.name, slot, 2, size)
    arena.close()
    reader.close()


def test_another_users_file_that_was_cut_short_is_an_error_and_no_fault(tmp_path: Path):
    """A mapping would end the worker with SIGBUS; a read comes back short."""
    arena, reader = Arena(slot_bytes=10, num_slots=2, folder=tmp_path), ArenaReader(folder=tmp_path)
    generation = arena.write(1, [numbers(10, 0)])
    try:
        os.chown(tmp_path / arena.name, os.geteuid() + 1, -1)
    except PermissionError:
        pytest.skip("only root may give a file to another user")
    assert np.array_equal(numbers(10, 0), reader.view(arena.name, 1, generation, 10).data)
    os.truncate(tmp_path / arena.name, 4096)
    with pytest.raises(PixelsLostError):
        reader.view(arena.name, 1, generation, 10)
    reader.close()
    arena.close()


def test_a_place_behind_the_end_of_a_file_is_an_error(tmp_path: Path):
    arena, reader = Arena(slot_bytes=10, num_slots=2, folder=tmp_path), ArenaReader(folder=tmp_path)
    os.truncate(tmp_path / arena.name, 4096)  # before anybody maps it
    for get in (reader.read, reader.view):
        with pytest.raises(PixelsLostError):
            get(arena.name, 1, 2, 10)
    reader.close()
    arena.close()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "vla-infer-" + "0" * 32, "vla-infer-x/../y"])
def test_unknown_names_are_unreachable(tmp_path: Path, name: str):
    with pytest.raises(PixelsUnreachableError):
        ArenaReader(folder=tmp_path).read(name, 0, 2, 10)


def test_what_a_killed_client_leaves_is_swept(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from vla_platform.inference.arena import Arena;"
        "Arena(slot_bytes=10, num_slots=1, folder=Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    living = Arena(slot_bytes=10, num_slots=1, folder=tmp_path)
    assert [living.name] == [path.name for path in tmp_path.iterdir()]
    assert sweep(tmp_path) == 0
    living.close()


def test_readers_let_go_of_arenas_that_are_closed(tmp_path: Path):
    arena, reader = Arena(slot_bytes=10, num_slots=1, folder=tmp_path), ArenaReader(folder=tmp_path)
    reader.read(arena.name, 0, arena.write(0, [numbers(10, 0)]), 10)
    assert reader.forget_closed() == 0
    arena.close()
    assert reader.forget_closed() == 1


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Too many mappings or descriptors cost speed, never the worker."""
    arena, reader = Arena(slot_bytes=10, num_slots=1, folder=tmp_path), ArenaReader(folder=tmp_path)
    generation = arena.write(0, [numbers(10, 0)])

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    seen = reader.view(arena.name, 0, generation, 10)
    arena.write(0, [numbers(10, 1)])
    seen.check()
    assert np.array_equal(numbers(10, 0), seen.data)
    reader.close()
    monkeypatch.undo()
    arena.close()


def test_a_copy_of_a_view_is_checked_once_more(tmp_path: Path):
    arena, reader = Arena(slot_bytes=10, num_slots=1, folder=tmp_path), ArenaReader(folder=tmp_path)
    seen = reader.view(arena.name, 0, arena.write(0, [numbers(10, 0)]), 10)
    kept = seen.copied()
    arena.write(0, [numbers(10, 1)])
    kept.check()
    assert np.array_equal(numbers(10, 0), kept.data)
    with pytest.raises(PixelsLostError):
        seen.copied()
    reader.close()
    arena.close()


def test_a_reader_holds_no_more_files_than_it_may(tmp_path: Path):
    """Views of an arena that had to make room stay what they are."""
    before = len(os.listdir("/proc/self/fd"))
    arenas = [Arena(slot_bytes=10, num_slots=1, folder=tmp_path) for _ in range(5)]
    reader = ArenaReader(folder=tmp_path, max_open=2)
    with_arenas = len(os.listdir("/proc/self/fd"))
    first = reader.view(arenas[0].name, 0, arenas[0].write(0, [numbers(10, 0)]), 10)
    for arena in arenas[1:]:
        reader.view(arena.name, 0, arena.write(0, [numbers(10, 1)]), 10)
    assert len(os.listdir("/proc/self/fd")) <= with_arenas + 2 * 2 + 1  # the view's mapping
    first.check()
    assert np.array_equal(numbers(10, 0), first.data)
    del first
    reader.close()
    for arena in arenas:
        arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_with_an_arenas_name_holds_up_nobody(tmp_path: Path):
    name = f"vla-infer-{'0' * 32}"
    os.mkfifo(tmp_path / name)
    with pytest.raises(PixelsUnreachableError):
        ArenaReader(folder=tmp_path).view(name, 0, 2, 10)
