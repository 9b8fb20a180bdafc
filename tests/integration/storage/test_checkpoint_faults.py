"""Checkpoints when the writer dies, two write, or the network is cut, on a real S3."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vla_platform.stack.servers import S3Address
from vla_storage.checkpoints import Checkpoint, CheckpointStore
from vla_storage.errors import (
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageUnavailableError,
)
from vla_storage.leftovers import collect_leftovers
from vla_storage.objects import S3ObjectStore
from vla_storage.objects.s3 import s3_client
from vla_storage.staging import CheckpointWriter

pytestmark = pytest.mark.services
KEY = b"platform key of the tests"
Make = Callable[..., Checkpoint]

WRITER = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from vla_storage.checkpoints import Checkpoint, CheckpointHeader, CheckpointStore
from vla_storage.manifests import Lineage
from vla_storage.objects import S3ObjectStore
from vla_storage.staging import CheckpointWriter

address, folder, step, value, point, nth = json.loads(sys.argv[1])
reached = 0
def die(name):
    global reached
    reached += name == point
    if name == point and reached == nth:
        os.kill(os.getpid(), signal.SIGKILL)

bucket = address.pop("bucket")
store = CheckpointStore(
    objects=S3ObjectStore(bucket, **address), tenant_id="a",
    signing_key=b"platform key of the tests", failpoint=die,
)
lineage = Lineage(spec_digest="s", dataset_digest="d", base_digest="b", schema_signature="g")
checkpoint = Checkpoint(
    header=CheckpointHeader(policy="reach", workload_id="w1", step=step, policy_version=step,
                            position=8 * step, lineage=lineage),
    module={"w": np.full((4, 3), value, np.float32), "b": np.zeros((), np.float64)},
    optimizer={"w.exp_avg": np.full((4, 3), value / 2, np.float32)},
    state={"step": step, "lr": 1e-4, "rng": [1, 2, 3]},
)
writer = CheckpointWriter(Path(folder))
future = writer.save(store, checkpoint)
writer.close(30)
try:
    future.result()
except Exception as error:
    sys.exit(type(error).__name__)
"""


@pytest.fixture
def objects(s3: S3Address) -> Iterator[S3ObjectStore]:
    with s3.objects() as store:
        yield store


@pytest.fixture
def store(objects: S3ObjectStore) -> CheckpointStore:
    return CheckpointStore(objects=objects, tenant_id="a", signing_key=KEY)


def start_writer(
    s3: S3Address, folder: Path, step: int, *, value: float, point: str = "", nth: int = 0
) -> subprocess.Popen[str]:
    arguments = json.dumps([asdict(s3), str(folder), step, value, point, nth])
    return subprocess.Popen(
        (sys.executable, "-c", WRITER, arguments),
        env=dict(os.environ),
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.strip().rpartition("\n")[2]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_f55_pf20_killed_after_object_k_nothing_is_visible_and_the_previous_resumes(
    nth: int,
    s3: S3Address,
    store: CheckpointStore,
    objects: S3ObjectStore,
    make_checkpoint: Make,
    tmp_path: Path,
) -> None:
    store.save(make_checkpoint(200))
    writer = start_writer(s3, tmp_path, 300, value=300.0, point="checkpoint.object", nth=nth)
    assert finish(writer)[0] == -signal.SIGKILL

    restored = store.restore("reach", "w1")
    assert restored is not None
    assert (restored.manifest.step, nth) == (200, len(list(objects.list("a/"))) - 5)

    # The next process clears the dead one's staging; publishing the step again succeeds.
    assert list(tmp_path.glob("staging-*")) != []
    successor = CheckpointWriter(tmp_path)
    assert successor.save(store, make_checkpoint(300)).result(30).step == 300
    assert successor.close(30)
    assert list(tmp_path.glob("staging-*")) == []
    assert collect_leftovers(store, "reach", older_than_s=-60.0) == []
    assert len(list(objects.list("a/"))) == 10


def test_f55_leftovers_of_other_content_are_collected(
    s3: S3Address, store: CheckpointStore, make_checkpoint: Make, tmp_path: Path
) -> None:
    writer = start_writer(s3, tmp_path, 300, value=-1.0, point="checkpoint.object", nth=2)
    assert finish(writer)[0] == -signal.SIGKILL
    store.save(make_checkpoint(300))

    gone = collect_leftovers(store, "reach", older_than_s=-60.0)
    assert ["-" in key.rpartition("/")[2] for key in gone] == [True, True]
    assert store.verify("reach/w1/300").step == 300


def test_f56_killed_after_the_manifest_the_checkpoint_counts(
    s3: S3Address, store: CheckpointStore, make_checkpoint: Make, tmp_path: Path
) -> None:
    store.save(make_checkpoint(200))
    writer = start_writer(s3, tmp_path, 300, value=300.0, point="checkpoint.manifest", nth=1)
    assert finish(writer)[0] == -signal.SIGKILL

    latest = store.latest("reach", "w1")
    assert latest is not None
    assert latest.step == 300
    assert store.save(make_checkpoint(300)) == latest  # the resumed worker comes here again


def test_f57_of_two_processes_that_publish_one_step_one_wins(
    s3: S3Address, store: CheckpointStore, tmp_path: Path
) -> None:
    writers = [start_writer(s3, tmp_path, 300, value=value) for value in (1.0, 2.0)]
    outcomes = sorted(finish(writer) for writer in writers)

    assert outcomes == [(0, ""), (1, "ObjectExistsError")]
    assert [ref.step for ref in store.list("reach")] == [300]
    assert float(store.load("reach/w1/300").module["w"][0, 0]) in (1.0, 2.0)


class Cutter:
    """A TCP proxy that cuts every connection after so many bytes towards the server."""

    def __init__(self, target: str, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            with client, socket.create_connection(self._target) as server:
                if not client.recv(1, socket.MSG_PEEK):
                    return
                back = threading.Thread(target=self._pipe, args=(server, client, None))
                back.start()
                self._pipe(client, server, self.limit_bytes)
                for side in (server, client):
                    try:
                        side.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue
                back.join()

    @staticmethod
    def _pipe(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while (limit is None or passed < limit) and (data := source.recv(65536)):
                sink.sendall(data)
                passed += len(data)
        except OSError:
            return

    def close(self) -> None:
        socket.create_connection(self._server.getsockname()).close()
        self._thread.join(10)
        self._server.close()


def test_f60_a_cut_upload_leaves_no_object(s3: S3Address, objects: S3ObjectStore) -> None:
    cutter = Cutter(s3.endpoint, limit_bytes=1 << 20)
    try:
        cut = replace(s3, endpoint=cutter.endpoint)
        with (
            S3ObjectStore(
                cut.bucket,
                endpoint=cut.endpoint,
                access_key=cut.access_key,
                secret_key=cut.secret_key,
                attempts=2,
            ) as through,
            pytest.raises(StorageUnavailableError),
        ):
            through.put("a/x", bytes(2 << 20))
    finally:
        cutter.close()
    with pytest.raises(ObjectNotFoundError):
        objects.get("a/x")


def test_f62_what_changes_behind_our_back_is_noticed(
    store: CheckpointStore, objects: S3ObjectStore, make_checkpoint: Make
) -> None:
    store.save(make_checkpoint(1))
    for key in [item.key for item in objects.list("a/") if item.size]:  # a seal is a name only
        content = objects.get(key)
        objects.put(key, content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(StorageError) as caught:
            store.verify("reach/w1/1")
        assert caught.value.code in {"checkpoint_corrupt", "manifest_invalid"}
        objects.put(key, content)
    assert store.verify("reach/w1/1").step == 1


class Rotated:
    """A user of the object store whose keys can be taken away."""

    def __init__(self, s3: S3Address) -> None:
        self._s3 = s3
        self._iam = s3_client(
            "iam", endpoint=s3.endpoint, access_key=s3.access_key, secret_key=s3.secret_key
        )
        resources = [f"arn:aws:s3:::{s3.bucket}", f"arn:aws:s3:::{s3.bucket}/*"]
        everything = {"Effect": "Allow", "Action": "s3:*", "Resource": resources}
        self._iam.create_user(UserName="worker")
        self._iam.put_user_policy(
            UserName="worker",
            PolicyName="all",
            PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [everything]}),
        )

    def fresh(self) -> S3ObjectStore:
        key = self._iam.create_access_key(UserName="worker")["AccessKey"]
        found = S3ObjectStore(
            self._s3.bucket, endpoint=self._s3.endpoint, access_key=key["AccessKeyId"],
            secret_key=key["SecretAccessKey"],
        )  # fmt: skip
        end = time.monotonic() + 20
        while True:  # IAM changes are not instantaneous
            try:
                found.put("a/probe", b"")
                return found
            except StorageAccessError:
                assert time.monotonic() < end
                time.sleep(0.05)

    def expire(self, objects: S3ObjectStore) -> None:
        for key in self._iam.list_access_keys(UserName="worker")["AccessKeyMetadata"]:
            self._iam.delete_access_key(UserName="worker", AccessKeyId=key["AccessKeyId"])
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                objects.put("a/probe", b"")
            except StorageAccessError:
                return
            time.sleep(0.05)
        raise AssertionError("the keys still work")

    def close(self) -> None:
        self._iam.delete_user_policy(UserName="worker", PolicyName="all")
        self._iam.delete_user(UserName="worker")
        self._iam.close()


def test_f61_credentials_that_expire_mid_upload_fail_cleanly(
    s3: S3Address, store: CheckpointStore, make_checkpoint: Make, tmp_path: Path
) -> None:
    """After the first object of step 2: its future ends with the reason, step 1 is untouched, and
    a process with fresh keys publishes step 2."""
    store.save(make_checkpoint(1))
    rotated = Rotated(s3)
    with contextlib.closing(rotated):
        old = rotated.fresh()
        reached: list[str] = []

        def expire(name: str) -> None:
            reached.append(name)
            if len(reached) == 1:
                rotated.expire(old)

        writer = CheckpointWriter(tmp_path)
        mine = replace(store, objects=old, failpoint=expire)
        with pytest.raises(StorageAccessError):
            writer.save(mine, make_checkpoint(2)).result(60)
        assert reached == ["checkpoint.object"]
        found = store.restore("reach", "w1")
        assert found is not None
        assert found.manifest.step == 1
        fresh = replace(store, objects=rotated.fresh())
        assert writer.save(fresh, make_checkpoint(2)).result(60).step == 2
        assert writer.close(30)
        assert collect_leftovers(store, "reach", older_than_s=0.0) == []
        rotated.expire(fresh.objects)
