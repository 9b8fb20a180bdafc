"""The whole stack dies at once, servers and workers, and is started again.

Nothing is told beforehand and nothing ends in order; what counts is what the control Redis and the
object store had taken.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import psutil
import pytest

from tests.acceptance.stacks import RANDOM, demonstrate, sft
from tests.waiting import wait_until
from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Platform, Run
from vla_platform.stack import operate, supervisor
from vla_storage.checkpoint_types import MODULE

STEPS = 40
ROUNDS = int(os.environ.get("VLA_TEST_POWER_LOSSES", "3"))  # F78 asks for 30: half an hour
TIMEOUT_S = 180
ENVIRONMENT = {**os.environ, **RANDOM, "VLA_SLICE_S": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 + 120 * ROUNDS)]


def result(admin: Operator, tenant: str, run: Run) -> tuple[dict[int, float], str]:
    """Losses by step and the digest of the module, from what the ledger and the storage say."""
    manifest = admin.checkpoints(tenant).verify(run.result(TIMEOUT_S).checkpoint or "")
    module = next(one.sha256 for one in manifest.objects if one.name == MODULE)
    return {step: entry["loss"] for step, entry in admin.ledger.steps(run.id).items()}, module


def kill_everything(var: Path, rng: random.Random) -> None:
    """Every process of the stack, its supervisor too, in any order."""
    daemon = supervisor.daemon(var)
    assert daemon is not None
    processes = [daemon, *daemon.children(recursive=True)]
    rng.shuffle(processes)
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=20)


def test_a_stack_that_loses_power_under_load_loses_nothing_f78(tmp_path: Path) -> None:
    var, rng = tmp_path / "var", random.Random(0)
    (tmp_path / "data").mkdir()
    demonstrate(tmp_path, episodes=8)
    up = {"environment": ENVIRONMENT, "timeout_s": TIMEOUT_S}
    try:
        operate.up(var, dataset_roots=str(tmp_path / "data"), **up)
        with operator(var) as admin:
            urls = {name: admin.add(name) for name in ("a", "b")}
            calm = {}
            for seed, (name, url) in enumerate(urls.items()):
                with Platform(url) as platform:
                    run = platform.submit(sft("calm", seed=seed, steps=STEPS))
                    calm[name] = result(admin, name, run)
        for number in range(ROUNDS):
            runs = {}
            with operator(var) as admin:
                for seed, (name, url) in enumerate(urls.items()):
                    with Platform(url) as platform:
                        asked = sft(f"p{number}", seed=seed, steps=STEPS)
                        runs[name] = platform.submit(asked).id
                moment, first = rng.randrange(1, STEPS), runs["a"]
                wait_until(lambda: int(admin.ledger.workload(first)["step"]) >= moment, TIMEOUT_S)  # noqa: B023
            kill_everything(var, rng)
            operate.up(var, **up)
            with operator(var) as admin:
                for name, url in urls.items():
                    with Platform(url) as platform:
                        found = result(admin, name, platform.run(runs[name]))
                    assert (number, list(found[0])) == (number, list(range(1, STEPS + 1)))
                    assert found == calm[name]
                assert admin.ledger.live_partitions() == set()
    finally:
        operate.down(var)
