"""Shared memory in large pages: the same bytes, for whoever has the file mapped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from vla_storage.huge_pages import PAGE_BYTES, use_huge_pages


@pytest.fixture
def file(request: pytest.FixtureRequest) -> int:
    path = Path(f"/dev/shm/vla-test-{os.getpid()}-{request.node.name}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    request.addfinalizer(lambda: os.close(fd))
    return fd


@pytest.fixture
def able(file: int) -> int:
    """`file`, on a kernel that can."""
    os.posix_fallocate(file, 0, PAGE_BYTES)
    if use_huge_pages(file, PAGE_BYTES) == 0:
        pytest.skip("this kernel has no large pages for shared memory (MADV_COLLAPSE, Linux 6.1)")
    os.ftruncate(file, 0)
    return file


def test_content_and_mappings_outlive_the_move(able: int) -> None:
    file = able
    size = 3 * PAGE_BYTES + 4096
    os.posix_fallocate(file, 0, size)
    mapped = np.frombuffer(mmap.mmap(file, size), np.uint8)
    wanted = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    mapped[:] = wanted

    moved = use_huge_pages(file, size)

    assert moved == 3 * PAGE_BYTES
    assert np.array_equal(wanted, mapped)
    assert os.pread(file, size, 0) == wanted.tobytes()
    mapped[PAGE_BYTES] += 1
    assert os.pread(file, 1, PAGE_BYTES) == bytes([mapped[PAGE_BYTES]])


def test_a_second_time_finds_the_same(able: int) -> None:
    os.posix_fallocate(able, 0, 2 * PAGE_BYTES)
    assert [use_huge_pages(able, 2 * PAGE_BYTES) for _ in range(2)] == [2 * PAGE_BYTES] * 2


def test_what_is_smaller_than_a_large_page_stays(file: int) -> None:
    os.posix_fallocate(file, 0, PAGE_BYTES - 4096)
    assert use_huge_pages(file, PAGE_BYTES - 4096) == 0
