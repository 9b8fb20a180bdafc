"""`vla up --profile cluster-like`: the topology of a cluster on one machine, and a run that trains,
evaluates itself, survives a dead GPU worker, and is told by logs, traces and checkpoints."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.acceptance.stacks import RANDOM, at_step, demonstrate, sft, vla, vla_json
from tests.waiting import wait_until
from vla_platform import tracing
from vla_platform.cli.tenants import Operator, operator
from vla_platform.client import Platform, Run
from vla_platform.stack import operate
from vla_platform.stack.roles import Profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 40


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Operator, Platform]]:
    folder = tmp_path_factory.mktemp("cluster")
    demonstrate(folder, episodes=4)
    var = folder / "var"
    try:
        rc, told = vla(
            var, "up", "--profile", "cluster-like", "--dataset-root", str(folder / "data"),
            "--timeout-s", "380", VLA_LOG_FORMAT="json", VLA_TRACES="traces", **RANDOM,
        )  # fmt: skip
        assert rc == 0, told
        with operator(var) as admin, Platform(admin.add("a")) as platform:
            yield var, admin, platform
    finally:
        operate.down(var)


@pytest.fixture(scope="module")
def trained(stack: tuple[Path, Operator, Platform]) -> Run:
    """A run whose GPU worker is killed in the middle of it."""
    var, admin, platform = stack
    run = platform.submit(
        sft(
            "reach", steps=STEPS,
            evaluation={"every_updates": 20, "suite": "tabletop/reach", "episodes": 2},
        )
    )  # fmt: skip
    at_step(run, 12)
    owner = admin.ledger.client.hget("vla:policy:a/reach", "slot_owner")
    victims = [
        one for one in operate.status(var)
        if one.role.startswith("gpu-") and f"worker={owner}" in "".join(operate.logs(var, one.role))
    ]  # fmt: skip
    (victim,) = victims
    assert victim.pid is not None
    psutil.Process(victim.pid).send_signal(signal.SIGKILL)
    for one in operate.status(var):
        if one.role in ("flower", "page", "metrics"):  # F74: who only watches
            assert one.pid is not None
            psutil.Process(one.pid).send_signal(signal.SIGKILL)
    run.result(timeout_s=240)
    return run


def test_it_has_the_processes_of_a_cluster(stack: tuple[Path, Operator, Platform]) -> None:
    var = stack[0]
    roles = {one.role for one in operate.status(var)}
    assert {role.name for role in Profile.CLUSTER_LIKE.roles} <= roles
    kinds = Counter(role.rpartition("-")[0] for role in roles if "-" in role)
    del kinds["redis"]
    assert dict(kinds) == {"control": 2, "gpu": 2, "beat": 2, "env-tabletop": 2}
    rc, rows = vla_json(var, "workers", "list")
    assert rc == 0
    queues = {row["worker"].partition("@")[0]: row["queues"] for row in rows}
    assert {"sft", "advantages", "audit"} <= queues.keys()
    assert "advantages" in queues["advantages"]
    assert "advantages" not in queues["sft"]


def test_a_run_trains_there_and_a_dead_worker_costs_nothing(
    stack: tuple[Path, Operator, Platform], trained: Run
) -> None:
    steps = [event["step"] for event in trained.metrics() if event["kind"] == "step"]
    assert list(range(1, STEPS + 1)) == steps


def test_a_short_run_starts_while_a_long_one_trains_pf10(
    stack: tuple[Path, Operator, Platform], trained: Run
) -> None:
    """A worker leases a group at a time and hoards nothing beyond it."""
    _, _, platform = stack
    asked = {"kind": "sft", "dataset": trained.spec()["dataset"], "batch_size": 4}
    long = platform.submit({**asked, "policy": "long", "steps": 100_000})
    wait_until(lambda: long.status().step >= 5)
    submitted = time.monotonic()
    short = platform.submit({**asked, "policy": "short", "steps": 3})
    wait_until(lambda: short.status().step >= 1)
    started_s = time.monotonic() - submitted
    assert short.result(timeout_s=120).step == 3
    assert long.status().state == "running"
    assert long.cancel() == "cancelled"
    assert started_s < 20  # of 100 000 steps; eighteen processes on two cores take their time


def test_f74_watchers_come_back_and_tell_the_truth(
    stack: tuple[Path, Operator, Platform], trained: Run
) -> None:
    info = stack[1].info
    login = (info.flower_user, info.flower_password)

    def answers(url: str) -> bool:
        try:
            return httpx.get(url, auth=login, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    for url in (info.flower_url, info.page_url, info.metrics_url):
        wait_until(lambda url=url: answers(url))
    known = stack[1].ledger.workload(trained.id)
    assert (known["state"], str(trained.status().state)) == ("succeeded", "succeeded")
    page = httpx.get(f"{info.page_url}/workloads/{trained.id}", auth=login, timeout=20).text
    assert "succeeded" in page

    def shown() -> str:
        return httpx.get(info.page_url, auth=login, timeout=20).text

    # The one that was killed loads its base model anew.
    wait_until(lambda: all(f"<td>gpu-{number}@" in shown() for number in (1, 2)))


def test_it_evaluates_itself_once_per_version(
    stack: tuple[Path, Operator, Platform], trained: Run
) -> None:
    platform = stack[2]
    wait_until(lambda: len(platform.evaluations("reach")) == 2, timeout_s=200)
    found = {one.evaluation_id: one.policy_version for one in platform.evaluations("reach")}
    assert {f"{trained.id}-20": 20, f"{trained.id}-40": 40} == found
    key = stack[1].ledger.client
    wait_until(lambda: not key.exists("vla:t:a:evaluations"))
    marks = platform.marks("reach").of
    scored = {place for place, mark in marks.items() if mark.score is not None}
    assert {f"{trained.id}/{step}" for step in (20, 40)} <= scored


def test_operators_read_one_run_in_the_logs_of_all(
    stack: tuple[Path, Operator, Platform], trained: Run
) -> None:
    var = stack[0]
    lines = list(operate.logs_of_run(var, trained.id))
    told: list[tuple[str, dict[str, Any]]] = []
    for line in lines:
        role, _, text = line.partition(" ")
        if text.strip().startswith("{"):
            told.append((role, json.loads(text)))
    kinds = {role.partition("-")[0] for role, _ in told}
    assert {"control", "sft", "gpu", "env"} <= kinds
    own = [record for _, record in told if record.get("workload") == trained.id]
    assert own
    assert {"a"} == {record["tenant"] for record in own if "tenant" in record}
    times = [record["time"] for _, record in told]
    assert sorted(times) == times


def test_the_trace_of_a_job_spans_the_processes(
    stack: tuple[Path, Operator, Platform], trained: Run
) -> None:
    var = stack[0]
    jobs = {e["step"]: e["job_id"] for e in trained.metrics() if e["kind"] == "step"}
    wanted = f"0x{tracing.trace_id(jobs[20]):032x}"

    def spans() -> dict[str, str]:
        found = {}
        for file in (var / "traces").glob("*.jsonl"):
            for line in file.read_text().splitlines():
                one = json.loads(line)
                if one["context"]["trace_id"] == wanted:
                    found[one["name"]] = file.stem
        return found

    expected = {"reserve", "produce", "queue_wait", "fetch", "train", "settle", "save", "publish"}
    wait_until(lambda: {"job", *expected} <= spans().keys(), timeout_s=30)
    assert spans()["produce"] == "sft"
    assert spans()["train"].startswith("gpu-")
    rc, told = vla_json(var, "trace", jobs[20], "--picture", str(var / "job.svg"))
    assert rc == 0, told
    phases = {one["name"]: one for one in told["phases"]}
    assert list(phases) == ["produce", "waits for training", "training", "checkpoint"]
    assert (var / "job.svg").stat().st_size > 1000
    assert phases == {one["name"]: one for one in trained.timeline(jobs[20])}
    rc, told = vla(var, "trace", trained.id)
    assert (rc, jobs[STEPS] in told) == (0, True)


def test_its_checkpoint_is_reproduced(stack: tuple[Path, Operator, Platform], trained: Run) -> None:
    var, _, platform = stack
    checkpoint = trained.status().checkpoint or ""
    rc, found = vla_json(
        var, "checkpoints", "verify", checkpoint, "--tenant", "a", "--base-model", "tiny-random"
    )
    assert rc == 0, found
    assert (found["canary"]["match"], found["signature"]) == ("exact", "verified")
    assert found["canary"]["recorded"]["digest"] == found["canary"]["now"]["digest"]
    mark = platform.pin(checkpoint)
    assert mark.pinned
    (plan,) = platform.delete_checkpoints([checkpoint])
    assert plan.go == ()
