"""Failpoints: armed by a setting or by a file for one process, reached so many times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vla_platform import failpoints
from vla_platform.errors import ConfigurationError
from vla_platform.failpoints import Failpoint, reach, reach_in_storage


def use(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    trigger = failpoints._Trigger(setting)
    monkeypatch.setattr(failpoints, "_trigger", lambda: trigger)


def test_a_place_fails_at_its_nth_pass_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "part_k:raise:2")
    reach(Failpoint.AFTER_STEP)
    reach(Failpoint.PART_K)
    with pytest.raises(RuntimeError, match="failpoint"):
        reach_in_storage("checkpoint.object")
    assert [reach(Failpoint.PART_K) for _ in range(3)] == [None] * 3


def test_a_running_process_is_armed_by_the_file_of_its_pid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, f"@{tmp_path}/armed")
    (tmp_path / "armed").write_text("after_step:raise:1")
    (tmp_path / f"armed-{os.getpid() + 1}").write_text("after_step:raise:1")
    assert reach(Failpoint.AFTER_STEP) is None
    (tmp_path / f"armed-{os.getpid()}").write_text("after_step:raise:1")
    with pytest.raises(RuntimeError, match="failpoint"):
        reach(Failpoint.AFTER_STEP)


@pytest.mark.parametrize("setting", ["after_step", "after_step:kill", "x:kill:1", "after_step:x:1"])
def test_a_setting_that_names_nothing_is_refused(setting: str) -> None:
    with pytest.raises(ConfigurationError, match="use NAME"):
        failpoints._Trigger(setting)
