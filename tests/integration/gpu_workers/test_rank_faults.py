"""Ranks that die, hang, or are left alone by their worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

from tests.integration.gpu_workers.test_ranks import CALM, pair_of_ranks, settings_for  # noqa: E402
from tests.unit.gpu_workers.conftest import config_maker, make_columns  # noqa: E402
from tests.waiting import wait_until  # noqa: E402
from vla_platform.errors import ConfigurationError, RankLostError  # noqa: E402
from vla_platform.gpu_workers.ranks.leader import Team  # noqa: E402
from vla_platform.gpu_workers.training_items import TrainResult  # noqa: E402

LEADER = """
import sys, threading
from vla_platform.gpu_workers.ranks.leader import Team
from vla_platform.settings import Settings
team = Team(Settings.model_validate_json(sys.argv[1]), device="cpu", on_lost=print)
print(*team.pids, flush=True)
threading.Event().wait()
"""


def test_a_rank_that_hangs_or_dies_is_noticed(_redis_urls: dict[str, str], tmp_path: Path) -> None:
    """Of three: first it hangs, until rank 0 has waited long enough; then it dies."""
    url = _redis_urls["redis-payload"]
    with pair_of_ranks(tmp_path, url, training_watchdog_s=5.0, training_ranks=3) as found:
        config = config_maker(found.backbone)("a", optimizer=CALM)
        found.mount(config)
        columns = make_columns(config, 0, num=4)
        [outcome] = found.both.train_group([found.item(config, columns)])
        assert isinstance(outcome, TrainResult)
        found.alone.train_batch(config.policy_key, columns)
        found.assert_close(config.policy_key)
        pid = found.team.pids[-1]
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RankLostError):
            found.both.train_group([found.item(config, columns)])
        assert 4.5 < time.monotonic() - begun < 30
        assert found.lost == []
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: found.lost)
        assert str(pid) in found.lost[0]
        with pytest.raises(RankLostError):
            found.both.unmount(config.policy_key)


def test_no_follower_outlives_its_worker(_redis_urls: dict[str, str], tmp_path: Path) -> None:
    """Not even one that is stopped."""
    settings = settings_for(tmp_path, _redis_urls["redis-payload"], training_ranks=3)
    command = [sys.executable, "-c", LEADER, settings.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        followers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(followers) == 2
        # `child.py` has asked the kernel to end them, and has become what they are.
        wait_until(lambda: not any("child.py" in " ".join(one.cmdline()) for one in followers))
        followers[0].suspend()
        process.kill()
    gone, alive = psutil.wait_procs(followers, timeout=10)
    for one in alive:
        one.kill()
    assert (len(gone), alive) == (2, [])


def test_as_many_devices_as_ranks_are_needed(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several devices")
    settings = settings_for(tmp_path, "redis://nowhere")
    with pytest.raises(ConfigurationError, match="VLA_TRAINING_RANKS is 2"):
        Team(settings, device="cuda", on_lost=print)


def test_ranks_train_on_one_base_model(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "redis://nowhere", base_models="tiny-random,tiny")
    with pytest.raises(ConfigurationError, match="one base model"):
        Team(settings, device="cpu", on_lost=print)
