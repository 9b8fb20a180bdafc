"""Shared memory: recycled slots, pins, dead writers and readers, other people's addresses."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vla_storage.errors import (
    PayloadFullError,
    PayloadNotFoundError,
    StorageUnavailableError,
    StoreUnfitError,
)
from vla_storage.payloads.arena import ArenaTier
from vla_storage.payloads.arena_file import NUM_PINS, create_arena
from vla_storage.payloads.base import Want
from vla_storage.payloads.memory import MemoryIndex
from vla_storage.payloads.segments import Key, Place, Segment
from vla_storage.payloads.store import PayloadStore
from vla_storage.payloads.writing import BodyPiece
from vla_storage.tensors import Array

HEAP_BYTES = 4 << 20
BODY = 1 << 20
KEY = Key("a", "p1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_arena(tmp_path / "arena", HEAP_BYTES)
    return tmp_path / "arena"


@pytest.fixture
def arena(path: Path) -> ArenaTier:
    return ArenaTier(path)


def allocate(arena: ArenaTier, key: Key = KEY, size: int = BODY, ttl_s: float = 60) -> Place:
    return arena.allocate(key, "s", [(0, size)], ttl_s=ttl_s)


def fill(arena: ArenaTier, key: Key, value: int, size: int = BODY, ttl_s: float = 60) -> Place:
    place = allocate(arena, key, size, ttl_s)
    data = np.full(size, value, np.uint8)
    arena.write(key, "s", place, lambda: iter([BodyPiece(0, data, key, 0, [0, size])]))
    arena.seal(key, "s", place)
    return place


def read(
    arena: ArenaTier, place: Place, key: Key = KEY, size: int = BODY, *, copy: bool = False
) -> Array:
    segment = Segment(segment_id="s", size_bytes=size, place=place, blocks=())
    want = Want(segment=segment, offset=0, size_bytes=size)
    return arena.read(key, [want], copy=copy)[0]


def start(path: Path, body: str) -> subprocess.Popen[str]:
    """A process of its own that has the arena open; returns when it has printed a line."""
    code = f"""
import sys, time, signal
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_arena import *
arena = ArenaTier(Path({str(path)!r}))
{body}
print("there", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.stdout.close()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_reader_that_outlives_a_recycled_slot_gets_not_found(arena: ArenaTier) -> None:
    old = fill(arena, KEY, 1)
    arena.free(KEY, "s", old)
    other = Key("ab", "p1")
    new = fill(arena, other, 2)

    assert (old["slot"], old["generation"] + 1) == (new["slot"], new["generation"])
    for key in (KEY, other):
        for copy in (False, True):
            with pytest.raises(PayloadNotFoundError):
                read(arena, old, key, copy=copy)
    assert (read(arena, new, other) == 2).all()


def test_another_tenants_address_is_refused(arena: ArenaTier) -> None:
    place = fill(arena, Key("b", "p1"), 7)

    for key in (KEY, Key("b", "p2"), Key("b", "p")):
        with pytest.raises(PayloadNotFoundError):
            read(arena, place, key)
    for wrong in ({"slot": -1}, {"slot": 1 << 40}, {"slot": "0"}, {"arena": 1}, {"generation": 0}):
        with pytest.raises(PayloadNotFoundError):
            read(arena, {**place, **wrong}, Key("b", "p1"))
    with pytest.raises(PayloadNotFoundError):  # beyond the slot's end lies somebody else
        read(arena, place, Key("b", "p1"), size=HEAP_BYTES)


def test_views_hold_their_extent_until_the_last_is_gone(arena: ArenaTier) -> None:
    place = fill(arena, KEY, 5)
    whole = read(arena, place)
    part = whole[10:20].view(np.uint16).reshape(5)
    assert not part.flags.writeable
    del whole
    arena.free(KEY, "s", place)
    with pytest.raises(PayloadNotFoundError):
        read(arena, place)
    held = []
    with pytest.raises(PayloadFullError):
        for _ in range(4):  # the fourth would need the extent that is read
            held.append(fill(arena, KEY, 9))
    assert len(held) == 3
    assert (part == 0x0505).all()

    del part
    gc.collect()
    assert (read(arena, fill(arena, KEY, 8)) == 8).all()


def test_views_outlive_the_store_that_gave_them(path: Path) -> None:
    arena, other = ArenaTier(path), ArenaTier(path)
    place = fill(arena, KEY, 5)
    view = read(arena, place)
    arena.close()
    other.free(KEY, "s", place)
    for _ in range(3):
        fill(other, KEY, 9)
    with pytest.raises(PayloadFullError):
        fill(other, KEY, 9)
    assert (view == 5).all()


def test_without_a_free_pin_readers_get_copies(arena: ArenaTier) -> None:
    place = fill(arena, KEY, 3)
    views = [read(arena, place) for _ in range(NUM_PINS + 2)]
    assert not views[0].flags.writeable
    assert views[-1].flags.writeable
    assert (views[-1] == 3).all()


def test_small_reads_are_copies_and_need_no_pin(arena: ArenaTier) -> None:
    place = fill(arena, KEY, 3, size=1000)
    small = read(arena, place, size=1000)
    arena.free(KEY, "s", place)
    fill(arena, KEY, 4, size=1000)
    assert (small == 3).all()


def test_a_body_expires(arena: ArenaTier) -> None:
    place = fill(arena, KEY, 1, ttl_s=0.05)
    deadline = time.monotonic() + 5
    with pytest.raises(PayloadNotFoundError):
        while time.monotonic() < deadline:
            read(arena, place)
    for _ in range(4):
        fill(arena, KEY, 2)


def test_kill_9_of_a_writer_in_the_middle_leaves_nothing(path: Path, arena: ArenaTier) -> None:
    """F36: its extent is free again, and nobody ever sees half a body."""
    writer = start(
        path,
        """
def pieces():
    yield BodyPiece(0, np.full(BODY, 1, np.uint8), KEY, 0, [0, BODY])
    print("there", flush=True)
    time.sleep(600)
place = allocate(arena, size=3 * BODY)
arena.write(KEY, "s", place, pieces)
""",
    )
    with pytest.raises(PayloadFullError):
        allocate(arena, size=2 * BODY)  # it lives: its room is its own
    kill(writer)
    place = fill(arena, KEY, 2, size=4 * BODY)
    assert (read(arena, place, size=4 * BODY) == 2).all()


def test_kill_9_of_a_reader_frees_what_it_held(path: Path, arena: ArenaTier) -> None:
    place = fill(arena, KEY, 1, size=4 * BODY)
    reader = start(path, f"view = read(arena, {place!r}, size=4 * BODY)")
    arena.free(KEY, "s", place)
    with pytest.raises(PayloadFullError):
        allocate(arena)
    kill(reader)
    assert (read(arena, fill(arena, KEY, 2)) == 2).all()


def test_kill_9_while_the_table_is_locked(path: Path, arena: ArenaTier) -> None:
    holder = start(path, "lock = arena._file.locked(); lock.__enter__()")
    done = threading.Event()

    def work() -> None:
        fill(arena, KEY, 1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.2)
    kill(holder)
    assert done.wait(5)
    thread.join()


def test_a_stopped_holder_of_the_lock_blocks_nobody_for_ever(
    path: Path, arena: ArenaTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_storage.payloads.arena_file._LOCK_WAIT_S", 0.2)
    holder = start(path, "lock = arena._file.locked(); lock.__enter__()")
    try:
        with pytest.raises(StorageUnavailableError):
            allocate(arena)
    finally:
        kill(holder)
    allocate(arena)


def test_a_clear_in_the_middle_of_a_put_gives_the_room_to_nobody_else(path: Path) -> None:
    """The writer may still be copying: only it, or its death, frees the extent."""
    arena, index = ArenaTier(path), MemoryIndex()
    store = PayloadStore(index, [arena])
    place = allocate(arena, size=3 * BODY)
    index.begin(
        KEY, "f" * 32, place, size_bytes=3 * BODY, ttl_s=60, quota_bytes=1 << 40, owner="job"
    )
    assert store.clear("p1", "a")
    with pytest.raises(PayloadFullError):
        allocate(arena, size=2 * BODY)
    arena.free(KEY, "f" * 32, place)
    allocate(arena, size=2 * BODY)


def test_the_collector_frees_what_no_index_knows(path: Path) -> None:
    """The payload Redis lost everything: the arena's bodies are nobody's."""
    arena = ArenaTier(path)
    PayloadStore(MemoryIndex(), [arena]).put(
        "p1", "a", {"x": np.zeros(4 * BODY, np.uint8)}, ttl_s=60
    )
    after = PayloadStore(MemoryIndex(), [arena])
    with pytest.raises(PayloadFullError):
        after.put("p2", "a", {"x": np.zeros(8)}, ttl_s=60)
    assert after.collect([], grace_s=60) == 0
    assert after.collect([], grace_s=0) == 1
    after.put("p2", "a", {"x": np.zeros(8)}, ttl_s=60)  # there is room again


def test_many_processes_recycle_and_never_read_foreign_bytes(path: Path) -> None:
    """Three writers and readers churn through an arena that is too small for them."""
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_arena import *
arena = ArenaTier(Path({str(path)!r}))
number = int(sys.argv[1])
key, wins = Key("t", f"p{{number}}"), 0
while wins < 30:
    try:
        place = fill(arena, key, number, size=BODY + number)
    except PayloadFullError:
        continue
    view = read(arena, place, key, BODY + number)
    arena.free(key, "s", place)
    assert (view == number).all()
    del view
    wins += 1
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in range(1, 5)
    ]
    assert [process.wait(120) for process in processes] == [0] * 4
    fill(ArenaTier(path), KEY, 9, size=HEAP_BYTES)  # nothing is left of them


@pytest.mark.parametrize("content", [b"", b"x" * 9000, None, "link"])
def test_what_is_no_arena_is_refused(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "odd"
    if content == "link":
        create_arena(tmp_path / "real", HEAP_BYTES)
        path.symlink_to(tmp_path / "real")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(StoreUnfitError):
        ArenaTier(path)


def test_an_arena_is_kept_or_replaced_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    create_arena(path, HEAP_BYTES)
    place = fill(ArenaTier(path), KEY, 1)
    create_arena(path, HEAP_BYTES)
    assert (read(ArenaTier(path), place) == 1).all()
    create_arena(path, 2 * HEAP_BYTES)
    with pytest.raises(PayloadNotFoundError):
        read(ArenaTier(path), place)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == os.getuid()
    with pytest.raises(StoreUnfitError):
        create_arena(path, 1 << 50)
    assert [entry.name for entry in tmp_path.iterdir()] == ["arena"]
