"""Spans of one job join one trace whoever makes them; without the setting nothing happens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from vla_platform import tracing
from vla_platform.errors import ConfigurationError

pytest.importorskip("opentelemetry.sdk")
JOB, OTHER = "sft-0-0", "sft-1-0"


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    tracing.stop()


def spans(folder: Path) -> dict[str, dict[str, Any]]:
    found = [
        json.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return {one["name"]: one for one in found}


def test_processes_that_know_only_the_job_share_its_trace(tmp_path: Path) -> None:
    for process, name in (("sft", "produce"), ("gpu", "train")):
        tracing.start(str(tmp_path), process=process)
        with tracing.span(name, JOB, tenant="a"), tracing.span(f"{name}-inner", JOB):
            pass
        if process == "gpu":
            tracing.root(JOB, time.time() - 2, time.time(), state="completed")
        tracing.stop()
    found = spans(tmp_path)
    whole = found["job"]
    assert f"0x{tracing.trace_id(JOB):032x}" == whole["context"]["trace_id"]
    assert f"0x{tracing.root_span_id(JOB):016x}" == whole["context"]["span_id"]
    assert whole["parent_id"] is None
    assert {whole["context"]["trace_id"]} == {one["context"]["trace_id"] for one in found.values()}
    for name in ("produce", "train"):
        assert whole["context"]["span_id"] == found[name]["parent_id"]
        assert found[name]["context"]["span_id"] == found[f"{name}-inner"]["parent_id"]
    assert {"sft.jsonl", "gpu.jsonl"} == {file.name for file in tmp_path.iterdir()}
    assert found["train"]["attributes"]["tenant"] == "a"


def test_work_on_another_job_is_in_another_trace(tmp_path: Path) -> None:
    tracing.start(str(tmp_path), process="gpu")
    with tracing.span("outer", JOB), tracing.span("inner", OTHER):
        pass
    tracing.stop()
    found = spans(tmp_path)
    assert found["outer"]["context"]["trace_id"] != found["inner"]["context"]["trace_id"]
    assert f"0x{tracing.root_span_id(OTHER):016x}" == found["inner"]["parent_id"]


def test_a_message_carries_who_sent_it(tmp_path: Path) -> None:
    tracing.start(str(tmp_path), process="gpu")
    with tracing.span("sends", JOB):
        sent = tracing.headers()
    with tracing.caused_by(sent[tracing.HEADER]), tracing.span("receives", OTHER):
        pass
    with tracing.caused_by("00-forged"), tracing.span("unlinked", OTHER):
        pass
    tracing.stop()
    found = spans(tmp_path)
    (link,) = found["receives"]["links"]
    assert found["sends"]["context"]["span_id"] == link["context"]["span_id"]
    assert found["unlinked"]["links"] == []


def test_an_error_is_noted_and_passed_on(tmp_path: Path) -> None:
    tracing.start(str(tmp_path), process="gpu")
    with pytest.raises(KeyError), tracing.span("fails", JOB):
        raise KeyError("x")
    tracing.stop()
    found = spans(tmp_path)["fails"]
    assert (found["status"]["status_code"], found["events"][0]["name"]) == ("ERROR", "exception")


def test_off_it_does_nothing_and_imports_nothing() -> None:
    code = (
        "import sys, time; from vla_platform import tracing; tracing.start('', process='gpu')\n"
        "with tracing.span('a', 'j'), tracing.caused_by('x'): pass\n"
        "tracing.past('b', 'j', 0, 1); tracing.root('j', 0, 1); assert tracing.headers() == {}\n"
        "assert not tracing.is_on()\n"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"vla-platform\[otel\]"):
        tracing.start(str(tmp_path), process="gpu")


def test_spans_go_to_a_collector() -> None:
    """OTLP over HTTP, as every collector takes it."""
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    taken: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        tracing.start(f"http://127.0.0.1:{server.server_port}", process="gpu")
        with tracing.span("train", JOB, tenant="a"):
            pass
        tracing.stop()
        server.shutdown()
        thread.join()
    ((path, body),) = taken
    assert path == "/v1/traces"
    request = proto.ExportTraceServiceRequest.FromString(body)
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (span.name, int.from_bytes(span.trace_id, "big")) == ("train", tracing.trace_id(JOB))
