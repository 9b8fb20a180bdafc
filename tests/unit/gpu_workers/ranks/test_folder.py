from __future__ import annotations

import os
import time
from pathlib import Path

from vla_platform.gpu_workers.ranks.folder import PREFIX, YOUNG_S, meeting_folder


def age(folder: Path) -> None:
    long_ago = time.time() - YOUNG_S - 1
    os.utime(folder, (long_ago, long_ago))


def test_a_folder_is_gone_with_its_worker_or_with_the_next(tmp_path: Path) -> None:
    """What a worker that was killed has left is swept, what one has that lives is not."""
    left, other = tmp_path / f"{PREFIX}left", tmp_path / "other"
    for folder in (left, other):
        folder.mkdir()
        (folder / "store").write_text("")
        age(folder)
    with meeting_folder(tmp_path) as first:
        assert not left.exists()
        (first / "store").write_text("")
        age(first)
        with meeting_folder(tmp_path) as second:
            assert {*tmp_path.iterdir()} == {first, second, other}
    assert {*tmp_path.iterdir()} == {other}


def test_a_folder_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    with meeting_folder(tmp_path) as found:
        assert {*tmp_path.iterdir()} == {young, found}
