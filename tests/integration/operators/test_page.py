"""The operators' page: behind a login, read-only, true to the ledger, one page however many."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from vla_platform.control import maintenance
from vla_platform.control.gpu_reports import GpuReport, keep_report
from vla_platform.control.ledger import Ledger
from vla_platform.control.states import JobState
from vla_platform.metrics.events import Emitter, Event
from vla_platform.operators.page import create_page
from vla_platform.operators.snapshot import PAGE_SIZE, take
from vla_platform.stack.credentials import write_acl

pytestmark = pytest.mark.services
USER, PASSWORD = "admin", "pa:ss wörd"


@pytest.fixture
def ledger(control_redis_url: str) -> Iterator[Ledger]:
    found = Ledger.connect(control_redis_url)
    found.load()
    found.client.sadd("vla:tenants", "a")
    found.register_base_model("tiny", {"digest": "d", "image_size": 64})
    yield found
    found.close()


def submit(ledger: Ledger, run: str, *, policy: str = "pick") -> None:
    fields = {
        "tenant": "a", "policy": policy, "policy_key": f"a/{policy}", "kind": "sft",
        "base_model": "tiny", "schema_signature": "s", "spec_digest": run, "priority": 0,
        "max_in_flight": 2, "max_seconds": 0, "display_name": "", "lifecycle": "sft",
        "target": "positions",
    }  # fmt: skip
    ledger.submit(run, fields, max_pending=100_000)


def start(ledger: Ledger, run: str) -> None:
    submit(ledger, run, policy=f"p-{run}")
    ledger.prepared(run, total_positions=4, total_steps=4)
    assert ledger.admit(run, max_running=100) == "running"


@pytest.fixture
def url(ledger: Ledger) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        page = create_page(ledger, user=USER, password=PASSWORD)
        server = uvicorn.Server(uvicorn.Config(page, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize("auth", [None, ("admin", ""), ("admin", "password"), ("x", PASSWORD)])
@pytest.mark.parametrize("path", ["/", "/?state=pending", "/workloads/run-1", "/nothing"])
def test_nothing_is_shown_without_the_login(
    url: str, auth: tuple[str, str] | None, path: str
) -> None:
    answer = httpx.get(url + path, auth=auth)
    assert answer.status_code == 401
    assert "vla platform" not in answer.text


def test_it_tells_what_the_ledger_says(url: str, ledger: Ledger) -> None:
    start(ledger, "run-1")
    job = ledger.reserve("run-1", lease_s=10)
    assert not isinstance(job, str)
    ledger.mark(job, JobState.READY)
    (leased,) = ledger.lease_group("gpu-1", "tiny", max_jobs=1, lease_s=10)
    ledger.complete(leased, step=1, result={}, cost_s=1.5, samples=8)
    submit(ledger, "run-2", policy="<script>")
    with httpx.Client(base_url=url, auth=(USER, PASSWORD)) as client:
        shown = client.get("/")
        assert shown.status_code == 200
        assert 'http-equiv="refresh"' in shown.text
        for text in ("run-1", "1/4", "gpu-1", "a/p-run-1", "<td>1.5</td>"):
            assert text in shown.text
        assert "run-2" not in shown.text
        waiting = client.get("/", params={"state": "pending"}).text
        assert "&lt;script&gt;" in waiting
        assert "<script>" not in waiting
        detail = client.get("/workloads/run-2").text
        assert "Waits for:" in detail
        assert client.get("/workloads/nobody").status_code == 404
        assert client.get("/", params={"state": "../x"}).status_code == 404
        assert client.get("/", params={"page": "-1"}).status_code == 404
        assert client.post("/").status_code == 405
        assert client.delete("/workloads/run-1").status_code == 405
        maintenance.begin(ledger.client, "new disks until 18:00")
        assert "new disks until 18:00" in client.get("/").text
        maintenance.end(ledger.client)
        assert shown.headers["x-frame-options"] == "DENY"
    assert httpx.get(f"{url}/healthcheck").text == "ok"


def test_it_tells_how_busy_devices_are_and_how_stale_samples(url: str, ledger: Ledger) -> None:
    start(ledger, "run-1")
    report = GpuReport(
        worker="gpu-1@host", base_models="tiny", device="cpu",
        training_share=0.5, inference_share=0.25, slots=3,
    )  # fmt: skip
    keep_report(ledger.client, report)
    emitter = Emitter(ledger.client)
    for staleness in (0, 2):
        values = {"staleness": staleness}
        emitter.emit(Event(tenant="a", workload="run-1", kind="update", values=values))
    emitter.close()
    now = take(ledger)
    assert (report,) == now.gpus
    assert now.staleness == {"run-1": 2}
    text = httpx.get(url, auth=(USER, PASSWORD)).text
    assert (
        "<td>gpu-1@host</td><td>cpu</td><td>tiny</td><td>3</td><td>50 %</td><td>25 %</td>" in text
    )
    ledger.client.delete("vla:gpu:gpu-1@host")  # as its expiry does
    assert take(ledger).gpus == ()


def test_a_page_is_a_page_however_many_workloads_there_are(ledger: Ledger) -> None:
    for number in range(2 * PAGE_SIZE + 10):
        submit(ledger, f"run-{number:04d}", policy=f"p{number}")
    first = take(ledger, state="pending")
    last = take(ledger, state="pending", page=99)
    assert (first.counts["pending"], first.num_pages, last.page) == (2 * PAGE_SIZE + 10, 3, 3)
    assert (len(first.workloads), len(last.workloads)) == (PAGE_SIZE, 10)
    seen = {
        row.id for page in (1, 2, 3) for row in take(ledger, state="pending", page=page).workloads
    }
    assert len(seen) == 2 * PAGE_SIZE + 10


def test_a_browser_shows_it(url: str, ledger: Ledger, tmp_path: Path) -> None:
    """Headless Chromium follows the login and renders the tables."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    start(ledger, "run-1")
    address = url.replace("http://", "http://admin:pa%3Ass%20w%C3%B6rd@")
    done = subprocess.run(
        (browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path}", "--dump-dom", "--timeout=8000", address),
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert 'id="workloads"' in done.stdout, done.stderr[-2000:]
    assert "run-1" in done.stdout


def test_the_rights_of_its_own_user_are_enough(
    ledger: Ledger, control_redis_url: str, tmp_path: Path
) -> None:
    write_acl(tmp_path / "users.acl", {"page": "secret"})
    (line,) = (
        one
        for one in (tmp_path / "users.acl").read_text().splitlines()
        if one.startswith("user page")
    )
    ledger.client.execute_command("ACL", "SETUSER", "page", *line.split()[2:])
    submit(ledger, "run-1")
    own = Ledger.connect(control_redis_url.replace("redis://", "redis://page:secret@"))
    assert [row.id for row in take(own, state="pending").workloads] == ["run-1"]
    own.close()
    ledger.client.execute_command("ACL", "DELUSER", "page")
