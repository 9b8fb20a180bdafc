"""The whole platform on one machine: two tenants, one backbone, and processes that die.

Real processes under the supervisor, real Valkeys, a real S3; the random base model.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from tests.acceptance.stacks import RANDOM, Stack, at_step, demonstrate, losses, sft, started
from vla_platform.cli.tenants import Operator
from vla_platform.client import Frames, Platform, Run
from vla_platform.control.recovery import recover
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.errors import (
    ConflictError,
    DatasetError,
    NotFoundError,
    SpecError,
    WorkloadCancelledError,
    WorkloadFailedError,
)
from vla_platform.stack import operate
from vla_storage.errors import (
    CheckpointNotFoundError,
    InvalidKeyError,
    PayloadNotFoundError,
    StorageAccessError,
)
from vla_storage.payloads.arena_file import ArenaFile

STEPS = 30
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, dict[str, Platform]]]:
    folder = tmp_path_factory.mktemp("stack")
    demonstrate(folder, episodes=12)
    one = Tabletop(cameras=("top",), gripper=False, sentences=("go to the {color} block",))
    make_demonstrations(folder / "data" / "go-to", env=one, episodes=12, seed=1)
    with (
        started(folder, environment=RANDOM) as found,
        Platform(found.admin.add("a")) as a,
        Platform(found.admin.add("ab")) as ab,
    ):
        yield found, {"a": a, "ab": ab}


def spec(policy: str, path: str, **changes: Any) -> dict[str, Any]:
    return sft(policy, path, **{"steps": STEPS, **changes})


@pytest.fixture(scope="module")
def undisturbed(stack) -> dict[str, Run]:
    """Each tenant alone, one after the other: what every other run has to equal."""
    platforms = stack[1]
    runs = {}
    for tenant, path in (("a", "reach"), ("ab", "go-to")):
        runs[tenant] = platforms[tenant].submit(spec("alone", path))
        runs[tenant].result(TIMEOUT_S)
    return runs


def test_a_run_learns_and_ends_with_a_verified_checkpoint(stack, undisturbed):
    running, platforms = stack
    for tenant, run in undisturbed.items():
        status = run.status()
        assert status.step == STEPS
        assert list(losses(run)) == list(range(1, STEPS + 1))
        # A random backbone learns nothing general in 30 steps, but it learns its batches.
        found = list(losses(run).values())
        assert sum(found[-5:]) < sum(found[:5])
        heldout = [e["step"] for e in run.metrics() if e["kind"] == "heldout"]
        assert heldout == [0, STEPS]
        assert len(running.digests(tenant, run)) == 3
        assert platforms[tenant].verify(status.checkpoint).step == STEPS
        states = [event["state"] for event in status.history]
        assert states == ["pending", "running", "succeeded"]


def test_a_trained_policy_acts_and_for_its_own_tenant_only(stack, undisturbed):
    """The way of an environment loop: observation in, un-normalised action chunk out."""
    platforms = stack[1]
    seen = Tabletop().reset(seed=3)
    platform, checkpoint = platforms["a"], undisturbed["a"].status().checkpoint
    current = platform.predict(seen, policy="alone", timeout_s=TIMEOUT_S)
    pinned = platform.predict([seen, seen], policy="alone", version=checkpoint)
    assert (1, *pinned.actions.shape[1:]) == current.actions.shape
    assert STEPS == current.policy_version == pinned.policy_version
    assert current.module_digest == pinned.module_digest
    assert np.abs(current.actions - pinned.actions[1]).max() <= 1e-5
    for options in ({"policy": "never"}, {"policy": "alone", "version": 10_000}):
        with pytest.raises(NotFoundError):
            platform.predict(seen, **options)
    with pytest.raises(NotFoundError):
        platforms["ab"].predict(seen, policy="alone", version=checkpoint)
    first = f"alone/{undisturbed['a'].id}/10"
    assert platform.predict(seen, policy="alone", version=first).policy_version == 10


def test_together_equals_alone_to_the_bit(stack, undisturbed):
    """Whether jobs meet in a group is a matter of timing, so pairs run until some did."""
    running, platforms = stack
    largest = 0
    for attempt in range(8):
        runs = {
            tenant: platforms[tenant].submit(spec(f"together-{attempt}", path))
            for tenant, path in (("a", "reach"), ("ab", "go-to"))
        }
        for tenant, run in runs.items():
            run.result(TIMEOUT_S)
            alone = undisturbed[tenant]
            assert losses(run) == losses(alone)
            mine = running.digests(tenant, run)
            theirs = running.digests(tenant, alone)
            for name in ("module.safetensors", "optimizer.safetensors"):
                assert mine[name] == theirs[name]
            largest = max(largest, *(event.get("group_size", 0) for event in run.metrics()))
        if largest == 2:
            break
    assert largest == 2


@pytest.mark.parametrize("role", ["gpu", "sft", "control"])
def test_a_killed_worker_changes_no_number(stack, undisturbed, role: str):
    """F03-F05, F23: both runs finish, each step took effect once, losses equal the undisturbed."""
    running, platforms = stack
    runs = {
        tenant: platforms[tenant].submit(spec(f"kill-{role}", path))
        for tenant, path in (("a", "reach"), ("ab", "go-to"))
    }
    at_step(runs["a"], 1 if role == "control" else 13)
    running.kill(role)
    for tenant, run in runs.items():
        run.result(TIMEOUT_S)
        assert losses(run) == losses(undisturbed[tenant])
        assert list(running.admin.ledger.steps(run.id)) == list(range(1, STEPS + 1))


def test_bad_requests_are_refused_and_leave_nothing(stack):
    platforms = stack[1]
    before = len(platforms["a"].runs())
    with pytest.raises(SpecError, match="batch_size"):
        platforms["a"].submit(spec("p", "reach", batch_size=0))
    with pytest.raises(SpecError, match="not served"):
        platforms["a"].submit(spec("p", "reach", base_model="huge"))
    for path in ("../secret", "/etc", "file:///etc/passwd", "nowhere", "s3://other/x"):
        with pytest.raises(DatasetError):
            platforms["a"].submit(spec("p", path))
    with pytest.raises(DatasetError, match="no feature"):
        platforms["a"].submit(spec("p", "reach", dataset={"path": "reach", "action": "torque"}))
    assert len(platforms["a"].runs()) == before


@pytest.mark.parametrize("server", ["redis-control", "s3", "redis-payload"])
def test_an_outage_of_a_server_fails_nobodys_run_f23_f59(stack, undisturbed, server: str):
    """Killed in mid-training and brought back after a while: same numbers, each step once."""
    running, platforms = stack
    # Another seed: cached features would let the run end before the kill.
    wanted = spec(f"out-{server}", "reach", seed=5, steps=80, checkpoint={"every_steps": 20})
    calm = platforms["a"].submit({**wanted, "policy": f"calm-{server}"})
    calm.result(TIMEOUT_S)
    run = platforms["a"].submit(wanted)
    at_step(run, 5)
    process = psutil.Process(running.pid(server))
    process.suspend()
    time.sleep(3)  # the outage itself
    process.kill()
    assert run.result(TIMEOUT_S).step == 80
    assert losses(run) == losses(calm)
    assert list(running.admin.ledger.steps(run.id)) == list(range(1, 81))


@pytest.mark.parametrize("name", ["sft", "gpu", "control", "beat"])
def test_a_tenant_named_like_a_worker_takes_nothing_from_it(stack, undisturbed, name: str):
    """The broker's users of the platform's own processes are out of every tenant's reach."""
    running, _ = stack
    with Platform(running.admin.add(name)) as platform:
        run = platform.submit(spec("named", "reach", steps=3, checkpoint={}))
        assert run.result(TIMEOUT_S).step == 3
    running.admin.remove(name)


def test_a_paused_run_goes_on_where_it_was(stack, undisturbed):
    platforms = stack[1]
    run = platforms["a"].submit(spec("paused", "reach", seed=8, steps=60))
    at_step(run, 5)
    assert run.pause() == "paused"
    assert "resume" in run.explain()["waits_for"]
    assert run.resume() == "running"
    assert run.result(TIMEOUT_S).step == 60


def test_a_run_that_waits_says_for_what(stack, undisturbed):
    platforms = stack[1]
    first = platforms["a"].submit(spec("busy", "reach", steps=5000))
    second = platforms["a"].submit(spec("busy", "reach", steps=5000, seed=1))
    at_step(first, 1)
    told = second.explain()
    while "trains this policy" not in told["waits_for"]:
        told = second.explain()
    assert (told["state"], first.id in told["waits_for"]) == ("pending", True)
    for run in (second, first):
        assert run.cancel() == "cancelled"


def test_a_run_whose_episodes_are_all_held_out_is_refused_at_once(stack):
    platforms = stack[1]
    dataset = {"path": "reach", "heldout_episodes": list(range(12))}
    with pytest.raises(SpecError, match="no episode is left"):
        platforms["a"].submit(spec("p", "reach", dataset=dataset))


def test_a_restarted_stack_goes_on_with_its_runs_and_tenants(stack, undisturbed):
    """`vla down`, `vla up` in mid-run, without repeating the dataset roots."""
    running, platforms = stack
    run = platforms["a"].submit(spec("restart", "reach", seed=6, steps=200, checkpoint={}))
    at_step(run, 10)
    operate.down(running.var)
    operate.up(running.var, environment={**os.environ, **RANDOM}, timeout_s=180)
    assert run.status().state in ("running", "succeeded")
    assert run.result(TIMEOUT_S).step == 200


def test_a_warm_stop_saves_what_was_trained_f08(stack, undisturbed):
    """SIGTERM: the worker checkpoints at the step it reached; nothing is redone."""
    running, platforms = stack
    run = platforms["a"].submit(spec("warm", "reach", checkpoint={"every_steps": STEPS}))
    at_step(run, 5)
    psutil.Process(running.pid("gpu")).terminate()
    run.result(TIMEOUT_S)
    assert losses(run) == losses(undisturbed["a"])
    steps = [event["step"] for event in run.events(follow=False) if event["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))


def test_data_that_hold_nan_end_their_own_run_only_b35_f16(stack, undisturbed):
    """The place is named, and the neighbour's numbers are those of a run alone."""
    running, platforms = stack
    data = running.data
    shutil.copytree(data / "reach", data / "broken")
    file = data / "broken" / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(file)
    actions = table["action"].to_pylist()
    actions[5][0] = math.nan
    at = table.schema.get_field_index("action")
    broken = pa.array(actions, type=table.schema.field("action").type)
    pq.write_table(table.set_column(at, table.schema.field("action"), broken), file)

    good = platforms["ab"].submit(spec("beside-nan", "go-to"))
    bad = platforms["a"].submit(spec("nan", "broken"))
    with pytest.raises(WorkloadFailedError) as caught:
        bad.result(TIMEOUT_S)
    details = caught.value.details["reason"]["details"]
    assert (details["episode"], details["frame"], details["column"]) == (0, 5, "action")
    good.result(TIMEOUT_S)
    assert losses(good) == losses(undisturbed["ab"])


def test_a_run_starts_from_an_own_checkpoint_of_the_same_interface_b20_b21(stack, undisturbed):
    platforms = stack[1]
    start = undisturbed["a"].status().checkpoint
    again = platforms["a"].submit(
        spec("from", "reach", init_from=start, steps=2, checkpoint={}, optimizer={"lr": 1e-6})
    )
    again.result(TIMEOUT_S)
    first = next(event for event in again.metrics() if event["kind"] == "heldout")
    last = [event for event in undisturbed["a"].metrics() if event["kind"] == "heldout"][-1]
    assert first["heldout_loss"] == last["heldout_loss"]
    other = undisturbed["ab"].status().checkpoint
    for unknown in (other, "alone/sft-none/3", "alone/../3"):
        with pytest.raises((CheckpointNotFoundError, InvalidKeyError)):
            platforms["a"].submit(spec("from", "reach", init_from=unknown))
    with pytest.raises(SpecError, match="its schema is"):
        platforms["a"].submit(spec("from", "go-to", init_from=start))


def test_submit_is_idempotent_b07_b08(stack):
    platforms = stack[1]
    wanted = spec("again", "reach", idempotency_key="once", steps=2, checkpoint={})
    first, second = platforms["a"].submit(wanted), platforms["a"].submit(wanted)
    assert first.id == second.id
    with pytest.raises(ConflictError):
        platforms["a"].submit({**wanted, "steps": 3})
    first.result(TIMEOUT_S)


def test_flower_shows_tasks_by_name_and_no_tenants_text(stack):
    """PF-49: a password is asked for; arguments name tenant and run, never the spec's content."""
    running, platforms = stack
    wanted = spec("shown", "reach", steps=2, checkpoint={}, description="pssst-private")
    run = platforms["a"].submit(wanted)
    run.result(TIMEOUT_S)
    info = running.admin.info
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{info.flower_url}/api/tasks", timeout=10)
    assert refused.value.code == 401
    refused.value.close()
    secret = base64.b64encode(f"{info.flower_user}:{info.flower_password}".encode()).decode()
    request = urllib.request.Request(
        f"{info.flower_url}/api/tasks?limit=1000", headers={"Authorization": f"Basic {secret}"}
    )
    end = time.monotonic() + 20
    text = ""
    while run.id not in text and time.monotonic() < end:
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
    tasks = json.loads(text).values()
    names = {task["name"] for task in tasks}
    assert {"ingress.submit", "sft.prepare", "sft.produce", "training.train_job"} <= names
    submits = [task["kwargs"] for task in tasks if task["name"] == "ingress.submit"]
    assert "(a/shown, sft)" in submits
    assert "pssst-private" not in text


def test_hostile_messages_change_nothing_and_end_nothing_b26_b27_b28(stack):
    """Whatever lies in a tenant's queue, the control worker lives and others are untouched."""
    running, platforms = stack
    victim = platforms["ab"].submit(spec("victim", "go-to", steps=4000, checkpoint={}))
    at_step(victim, 1)
    attack = {"task": "ingress.cancel", "args": [], "kwargs": {"request_id": "x", "run": victim.id}}
    attack["options"] = {"queue": "ingress.ab", "exchange": "", "routing_key": "ingress.ab"}
    given = {"request_id": "x", "run": "nope"}
    embed = {"callbacks": [attack], "errbacks": [attack], "chain": [attack], "chord": None}

    def encoded(value: Any) -> str:
        return base64.b64encode(json.dumps(value).encode()).decode()

    good = {
        "body": encoded([[], given, embed]),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": "ingress.cancel", "id": "1", "root_id": "1", "lang": "py"},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": "1",
            "delivery_info": {"exchange": "", "routing_key": "ingress.ab"},
        },
    }
    produce = {"tenant_id": "ab", "workload": victim.id}
    hostile: list[Any] = [
        good,
        {**good, "headers": {**good["headers"], "task": "sft.produce"},
         "body": encoded([[], produce, {}])},
        {**good, "headers": {**good["headers"], "task": "control.reconcile"}},
        {**good, "content-type": {"a": 1}},
        {**good, "content-type": "application/x-python-serialize"},
        {**good, "headers": []},
        {**good, "headers": {**good["headers"], "compression": "application/x-gzip"}},
        {**good, "body": 5},
        {**good, "properties": {}},
        {**good, "properties": {**good["properties"], "delivery_info": "x"}},
        {**good, "properties": {**good["properties"], "delivery_tag": {"a": 1}}},
        [1], 1, None,
    ]  # fmt: skip
    broker = platforms["a"]._connection.redis
    before = running.pid("control")
    for text in ["garbage", "[" * 100_000, "\x00", *map(json.dumps, hostile)]:
        broker.lpush("ingress.a", text)
    with pytest.raises(NotFoundError):
        Run(platforms["a"]._connection, "nope").cancel(timeout_s=20)
    assert before == running.pid("control")
    assert victim.status().state == "running"
    assert victim.cancel() == "cancelled"


def test_cancel_is_final_at_any_moment_f17(stack):
    """While a step runs or a checkpoint is on its way; what had ended stays what it was."""
    running, platforms = stack
    for checkpoint in ({}, {"every_steps": 1}):
        run = platforms["a"].submit(spec("long", "reach", steps=5000, checkpoint=checkpoint))
        at_step(run, 2)
        assert run.cancel() == "cancelled"
        done = running.admin.ledger.steps(run.id)
        assert run.cancel() == "cancelled"
        with pytest.raises(WorkloadCancelledError):
            run.result(5)
        other = platforms["a"].submit(spec("short", "reach", steps=3, checkpoint={}))
        other.result(TIMEOUT_S)
        assert running.admin.ledger.steps(run.id) == done
        assert other.cancel() == "succeeded"


def test_samples_of_a_host_go_through_its_shared_memory(stack, undisturbed):
    running, _ = stack
    arena = ArenaFile(running.admin.info.arena)
    assert arena.slots["generation"].sum() >= STEPS


def test_low_level_calls_on_samples_reach_the_own_partitions_only(stack):
    """`queue_put`, `queue_get`, `queue_clear` with the tenant's own user."""
    platforms = stack[1]
    one, other = platforms["a"], platforms["ab"]
    one.queue_put("mine", {"x": np.arange(3), "images": Frames(np.zeros((3, 2, 4, 4, 3), "u1"))})
    one.queue_put("mine", {"advantages": np.ones(2)}, rows=[0, 2])
    assert one.queue_get("mine", ["x", "advantages"], [2])["x"].tolist() == [2]
    assert len(one.queue_get("mine", ["images"])["images"].frames) == 1
    with pytest.raises(PayloadNotFoundError):
        other.queue_get("mine")
    assert not other.queue_clear("mine")
    with pytest.raises(StorageAccessError):
        other._connection.payloads.get("mine", "a")
    assert one.queue_clear("mine")
    assert not one.queue_clear("mine")


def test_a_tenant_reaches_nothing_of_another(stack, undisturbed):
    """B05, B72: tenants `a` and `ab` share a prefix of their names and nothing else."""
    platforms = stack[1]
    one, other = platforms["a"], platforms["ab"]
    with pytest.raises(NotFoundError):
        one.run(undisturbed["ab"].id)
    with pytest.raises(NotFoundError):
        Run(one._connection, undisturbed["ab"].id).status()
    broker = one._connection.redis
    run = undisturbed["ab"].id
    for command in (
        ("HGETALL", f"vla:t:ab:w:{run}"),
        ("LPUSH", "ingress.ab", "{}"),
        ("HGETALL", f"vla:w:{run}"),
        ("HSET", "vla:t:a:w:x", "state", "succeeded"),
        ("FCALL", "vla_reap", "0"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            broker.execute_command(*command)
    key = f"ab/workloads/{run}/spec.json"
    assert json.loads(other._connection.objects.get(key))["policy"] == "alone"
    with pytest.raises(StorageAccessError):
        one._connection.objects.get(key)


def test_an_emptied_ledger_is_rebuilt_from_the_object_store_f30(stack, undisturbed):
    """FLUSHALL in mid-run: what runs goes on with equal numbers, what has ended stays ended.

    The last test of this module: the event streams of earlier runs go with the rest.
    """
    running, platforms = stack
    wanted = spec("flushed", "reach", seed=7, steps=60)
    calm = platforms["a"].submit({**wanted, "policy": "unflushed"})
    calm.result(TIMEOUT_S)
    cancelled = platforms["ab"].submit(spec("cancelled", "go-to", steps=5000))
    cancelled.cancel()
    run = platforms["a"].submit(wanted)
    at_step(run, 25)
    running.admin.ledger.client.flushall()
    end = time.monotonic() + TIMEOUT_S
    while not running.admin.ledger.knows(run.id):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert run.result(TIMEOUT_S).step == 60
    found, wanted_digests = (running.digests("a", one) for one in (run, calm))
    for name in ("module.safetensors", "optimizer.safetensors"):
        assert found[name] == wanted_digests[name]
    assert cancelled.status().state == "cancelled"
    assert undisturbed["a"].status().state == "succeeded"
    assert undisturbed["a"].status().policy_version == STEPS
    assert rebuilt_again(running.admin) == ()


def rebuilt_again(admin: Operator) -> tuple[str, ...]:
    """A second recovery finds nothing to do."""
    found = recover(admin)
    return (*found.restored, *found.corrected, *found.unreadable)
