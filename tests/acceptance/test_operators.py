"""A run, an evaluation by schedule, and what operators and auditors do, on a real stack."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.acceptance.stacks import Stack, started, vla_json, with_tabletop
from tests.waiting import wait_until
from vla_platform.client import Platform
from vla_platform.control import maintenance
from vla_platform.errors import AccessError, QuotaError, UnavailableError
from vla_platform.operators.workers import Workers
from vla_platform.stack import operate

POLICY = "reach"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    subprocess.run(
        (sys.executable, "-m", "vla_platform.envs.demonstrate", "tabletop/reach",
         str(folder / "data" / "reach"), "--episodes", "4", "--seed", "0", "--options", "{}",
         "--noise", "0"),
        check=True, capture_output=True,
    )  # fmt: skip
    with started(folder, roles=with_tabletop(folder)) as found:
        yield found


def test_a_run_is_evaluated_audited_counted_and_limited(stack: Stack) -> None:
    var, admin = stack.var, stack.admin
    url = admin.add("a")
    spec = {
        "kind": "sft", "policy": POLICY, "steps": 4, "batch_size": 4,
        "dataset": {"path": str(stack.data / "reach")}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    with Platform(url) as platform:
        run = platform.submit(spec)
        run.result(timeout_s=200)
        evaluation = {"policy": POLICY, "suite": "tabletop/reach", "episodes": 2, "videos": 1}
        made = platform.schedule(evaluation, name="nightly", cron="0 */6 * * *")
        assert len(made.next) == 10
        started = platform.change_schedule("nightly", "run-now")
        wait_until(lambda: platform.evaluations(POLICY))
        record = platform.evaluation(started["evaluation"])
        assert (record.policy_version, record.num_episodes) == (4, 2)
        once = platform.evaluate({**evaluation, "videos": 0}).result(timeout_s=200)
        assert (once.policy_version, once.num_episodes) == (4, 2)
        assert once.success_rate == record.success_rate  # the same version, scenes and seeds
        (state,) = platform.schedules()
        wait_until(lambda: not platform.schedules()[0].running)
        assert (state.num_fired, state.num_failed) == (1, 0)
        maintenance.begin(admin.ledger.client, "new disks until 18:00")
        with pytest.raises(UnavailableError, match="new disks until 18:00"):
            platform.submit(spec)
        maintenance.end(admin.ledger.client)
        month = platform.usage
        day = time.strftime("%Y-%m", time.gmtime())

        def simulated() -> bool:
            admin.ledger.client.delete("vla:chore:usage")  # written in a moment, not in a minute
            return any(one.totals.get("simulator_s") for one in month(day))

        wait_until(simulated, every_s=0.5)
        line = next(x for one in month(day) for x in one.lines if x.workload == run.id)
        whole = admin.ledger.client.hget("vla:usage:a", "jobs")
        assert line.amounts["jobs"] == int(whole)
        rc, _ = vla_json(var, "tenants", "limits", "a", "--monthly-worker-s", "0.001")
        assert rc == 0
        with pytest.raises(QuotaError, match="budget is used up"):
            platform.submit({**spec, "steps": 5})
        checkpoint = platform.checkpoints(POLICY)[-1].checkpoint_id
        rc, told = vla_json(var, "audit", "--deep")
        assert (rc, told["worst"]) == (0, None)
        prefix = f"a/policies/{POLICY}/checkpoints/"
        victim = next(i.key for i in admin.objects.list(prefix) if "/optimizer-" in i.key)
        admin.objects.delete(victim)
        rc, told = vla_json(var, "audit", "--tenant", "a")
        assert rc == 4
        assert [f["key"] for f in told["audits"][0]["report"]["findings"]] == [victim]
        assert checkpoint
    new = admin.rotate("a")
    with Platform(url) as stale, pytest.raises(AccessError):
        stale.runs()
    with Platform(new) as fresh:
        assert [one.id for one in fresh.runs()] == [run.id]


def test_operators_see_it_in_a_browser(stack: Stack, tmp_path: Path) -> None:
    info = stack.admin.info
    login = (info.flower_user, info.flower_password)
    for address in (info.page_url, info.flower_url):
        assert httpx.get(address, timeout=20).status_code == 401
    assert httpx.get(info.page_url, auth=login, timeout=20).status_code == 200
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium on this machine")

    def shown(address: str, *more: str) -> str:
        entry = address.replace("http://", f"http://{login[0]}:{login[1]}@")
        done = subprocess.run(
            (browser, "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}", "--dump-dom",
             "--timeout=10000", *more, entry),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.stdout

    page = shown(info.page_url)
    assert 'id="tenants"' in page
    assert "env-tabletop-1" in page
    # Its table comes by a script, after the page.
    flower = shown(f"{info.flower_url}/workers", "--virtual-time-budget=5000")
    for worker in ("gpu@", "control@", "sft@", "env-tabletop-1@"):
        assert worker in flower


def test_a_worker_is_drained_restarted_and_works_on(stack: Stack) -> None:
    var, admin = stack.var, stack.admin
    workers = Workers(admin.info.redis_url, admin.ledger.client)
    before = {row.name.partition("@")[0]: row.pid for row in workers.rows()}
    rc, rows = vla_json(var, "workers", "drain", "sft")
    assert (rc, set(rows["left"].split(", "))) == (0, {"sft", "graders", "advantages", "audit"})
    rc, _ = vla_json(var, "workers", "undrain", "sft")
    assert rc == 0
    operate.restart_role(var, "sft")
    wait_until(lambda: {r.name.partition("@")[0] for r in workers.rows()} == set(before))
    after = {row.name.partition("@")[0]: row for row in workers.rows()}
    assert after["sft"].pid != before["sft"]
    assert after["sft"].queues == ("advantages", "audit", "graders", "sft")
    assert after["control"].pid == before["control"]
    workers.close()
