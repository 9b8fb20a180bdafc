"""The metrics collector: drains the platform's event stream to S3 and serves Prometheus.

    python -m vla_platform.metrics.collector

Each batch becomes one JSON-lines object per workload, named by its first entry, then is
acknowledged: after a crash the same entries make the same objects again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import redis
from prometheus_client import Counter, Gauge, start_http_server

from vla_platform.control import usage
from vla_platform.control.gpu_reports import read_reports
from vla_platform.logs import configure
from vla_platform.metrics.events import OUTAGE_S, PLATFORM_STREAM, Event
from vla_platform.metrics.sinks import Sink, open_sinks
from vla_platform.settings import load_settings
from vla_storage.audit_findings import Severity
from vla_storage.errors import StorageError
from vla_storage.objects import ObjectStore, S3ObjectStore

GROUP, CONSUMER = "collector", "collector"
BATCH, BLOCK_MS = 512, 1000
SEEN, SEEN_S = "vla:metrics:seen", 10 * OUTAGE_S  # ids of events that came, for as long

STEPS = Counter("vla_steps_total", "Steps of SFT and updates of RL", ["tenant", "workload"])
SAMPLES = Counter("vla_samples_total", "Training rows", ["tenant", "workload"])
CACHE_HITS = Counter("vla_feature_cache_hits_total", "Rows whose features were known", ["tenant"])
LOSS = Gauge("vla_loss", "Last training loss", ["tenant", "workload"])
GROUP_SIZE = Gauge("vla_group_size", "Jobs in the last shared forward", [])
REQUESTS = Counter("vla_inference_requests_total", "Requests answered", ["tenant", "base_model"])
BACKBONE = Counter(
    "vla_inference_backbone_seconds_total",
    "Seconds of the shared forward, split by tokens",
    ["tenant", "base_model"],
)
BATCH_SIZE = Gauge("vla_inference_batch_size", "Mean samples of a batch", ["base_model"])
FORWARD = Gauge("vla_inference_forward_ms", "Mean time of a forward", ["base_model"])
DECODE = Gauge("vla_inference_decode_ms", "Mean time of decoding a batch", ["base_model"])
WAITED = Gauge("vla_inference_waited_ms", "Longest wait for a batch", ["tenant", "base_model"])
DEPTH = Gauge("vla_inference_queue_depth", "Samples that wait in a worker", ["base_model"])
SUCCESS = Gauge(
    "vla_evaluation_success_rate", "Of the last evaluation", ["tenant", "policy", "suite"]
)
REGRESSIONS = Counter(
    "vla_evaluation_regressions_total", "Drops beyond their interval", ["tenant", "policy"]
)
SCHEDULES = Counter("vla_schedule_events_total", "Schedules", ["tenant", "state"])
FINDINGS = Gauge("vla_audit_findings", "Of the last audit", ["tenant", "severity"])
STORED = Gauge("vla_stored_bytes", "At the last audit", ["tenant"])
AUDITED = Gauge("vla_last_audit_seconds", "When the last audit ended, Unix time", ["tenant"])
WORKLOADS = Gauge("vla_workloads", "Workloads", ["state"])
WORKERS = Gauge("vla_training_workers", "Training workers that are alive")
ROLLOUTS = Gauge("vla_rollouts", "Rollouts whose environments step")
STALENESS = Gauge("vla_policy_staleness", "Versions, of the last update", ["tenant", "workload"])
BUSY = Gauge("vla_gpu_busy_share", "Of the last minute", ["worker", "work"])
LAG = Gauge("vla_metrics_backlog", "Events that are not collected yet")
LOST = Counter("vla_sink_errors_total", "Events that a sink did not take", ["sink"])
READY = Gauge("vla_ready_jobs", "Training jobs that wait", ["base_model"])

_log = logging.getLogger(__name__)
Entry = tuple[str, dict[str, Any]]


def collect(
    client: Any, objects: ObjectStore, *, block_ms: int = BLOCK_MS, sinks: Sequence[Sink] = ()
) -> int:
    """One round: unacknowledged entries first, then new ones. Returns how many were stored."""
    for start, wait in (("0", None), (">", block_ms)):
        found = client.xreadgroup(GROUP, CONSUMER, {PLATFORM_STREAM: start}, BATCH, block=wait)
        entries = found[0][1] if found else []
        if entries:
            events = _new(client, [(entry, json.loads(told["event"])) for entry, told in entries])
            _store(objects, events)
            _acknowledge(client, [entry for entry, _ in entries], events)
            forward(sinks, events)
            return len(entries)
    return 0


def open_group(client: Any) -> None:
    try:
        client.xgroup_create(PLATFORM_STREAM, GROUP, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


def _new(client: Any, entries: list[Entry]) -> list[Entry]:
    """Without those that came before: an emitter sends again what it heard no answer to."""
    by_id: dict[str, Entry] = {}
    for entry, event in entries:
        by_id.setdefault(event.get("id", entry), (entry, event))
    seen = client.zmscore(SEEN, list(by_id))
    return [one for one, at in zip(by_id.values(), seen, strict=True) if at is None]


def _acknowledge(client: Any, read: list[str], events: list[Entry]) -> None:
    """Done with, and counted as used, in one transaction: neither without the other."""
    day, now = usage.today(client), time.time()
    with client.pipeline() as pipe:
        pipe.xack(PLATFORM_STREAM, GROUP, *read)
        pipe.zremrangebyscore(SEEN, "-inf", now - SEEN_S)
        for entry, event in events:
            pipe.zadd(SEEN, {event.get("id", entry): now})
            if event["kind"] == "inference":
                amounts: dict[str, float] = {
                    str(usage.Use.BACKBONE_S): event["values"]["backbone_s"],
                    str(usage.Use.REQUESTS): event["values"]["requests"],
                }
                usage.count(
                    pipe, event["tenant"], day, policy="-", workload=event["workload"],
                    amounts=amounts,
                )  # fmt: skip
        pipe.execute()


def _store(objects: ObjectStore, entries: list[Entry]) -> None:
    by_workload: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry, event in entries:
        by_workload[event["tenant"], event["workload"]].append((entry, event))
    for (tenant, workload), mine in by_workload.items():
        lines = "".join(
            json.dumps({"kind": e["kind"], "at": e["at"], **e["values"]}) + "\n" for _, e in mine
        )
        objects.put(f"{tenant}/workloads/{workload}/metrics/{mine[0][0]}.jsonl", lines.encode())
        for _, event in mine:
            _count(tenant, workload, event)


def _count(tenant: str, workload: str, event: dict[str, Any]) -> None:
    values = event["values"]
    if event["kind"] == "inference":
        _count_inference(tenant, values)
    elif event["kind"] == "evaluated":
        SUCCESS.labels(tenant, values["policy"], values["suite"]).set(values["success_rate"])
        REGRESSIONS.labels(tenant, values["policy"]).inc(int(values["regression"]))
    elif event["kind"] == "schedule":
        SCHEDULES.labels(tenant, values["state"]).inc()
    elif event["kind"] == "audit":
        for severity in Severity:
            FINDINGS.labels(tenant, severity).set(values[severity])
        STORED.labels(tenant).set(values["size_bytes"])
        AUDITED.labels(tenant).set(event["at"])
    elif event["kind"] == "step":
        _count_training(tenant, workload, values, rows=values["samples"])
        CACHE_HITS.labels(tenant).inc(values["cache_hits"])
        GROUP_SIZE.set(values["group_size"])
    elif event["kind"] == "update":
        _count_training(tenant, workload, values, rows=values["num_rows"])
        STALENESS.labels(tenant, workload).set(values["staleness"])


def _count_training(tenant: str, workload: str, values: dict[str, Any], *, rows: int) -> None:
    STEPS.labels(tenant, workload).inc()
    SAMPLES.labels(tenant, workload).inc(rows)
    LOSS.labels(tenant, workload).set(values["loss"])


def _count_inference(tenant: str, values: dict[str, Any]) -> None:
    base_model = values["base_model"]
    REQUESTS.labels(tenant, base_model).inc(values["requests"])
    BACKBONE.labels(tenant, base_model).inc(values["backbone_s"])
    WAITED.labels(tenant, base_model).set(values["waited_ms"])
    BATCH_SIZE.labels(base_model).set(values["batch_size"])
    FORWARD.labels(base_model).set(values["forward_ms"])
    DECODE.labels(base_model).set(values["decode_ms"])
    DEPTH.labels(base_model).set(values["queue_depth"])


def measure(client: Any) -> None:
    """Gauges of the ledger's state."""
    workers = client.zrange("vla:workers", 0, -1)
    for base_model in client.hkeys("vla:bases"):
        queues = [f"vla:ready:{base_model}"]
        queues += [f"vla:ready:{base_model}:{worker}" for worker in workers]
        READY.labels(base_model).set(sum(client.zcard(one) for one in queues))
    for state in ("pending", "running", "paused"):
        WORKLOADS.labels(state).set(client.scard(f"vla:{state}"))
    WORKERS.set(len(workers))
    ROLLOUTS.set(client.scard("vla:rollouts"))
    BUSY.clear()
    for one in read_reports(client):
        BUSY.labels(one.worker, "training").set(one.training_share)
        BUSY.labels(one.worker, "inference").set(one.inference_share)
    groups = client.xinfo_groups(PLATFORM_STREAM)
    LAG.set(sum((group.get("lag") or 0) + group["pending"] for group in groups))


def forward(sinks: Sequence[Sink], entries: list[Entry]) -> None:
    """To every sink; what one of them does not take is lost to it alone."""
    for sink in sinks:
        for _, raw in entries:
            try:
                sink.write(Event(**raw))
            except Exception as error:  # a tracker's own errors are many, and none may stop us
                LOST.labels(type(sink).__name__).inc()
                _log.warning(
                    "action=event_not_sunk sink=%s reason=%.200r", type(sink).__name__, error
                )


def main() -> None:
    settings = load_settings()
    configure(settings.log_format, process=settings.role)
    client: Any = redis.Redis.from_url(settings.redis_url, decode_responses=True, socket_timeout=15)
    objects = S3ObjectStore(
        settings.s3_bucket,
        endpoint=settings.s3_endpoint,
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key,
    )
    sinks = open_sinks(settings.metrics_sinks)
    stopping: list[int] = []  # an event has a lock, and what is interrupted may hold it
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopping.append(number))
    start_http_server(settings.port or 9100, addr=settings.host)
    open_group(client)
    while not stopping:
        try:
            collect(client, objects, sinks=sinks)
            measure(client)
        except (redis.RedisError, StorageError) as error:
            _log.warning("action=collect_failed pid=%d reason=%s", os.getpid(), error)
            time.sleep(1.0)
    for sink in sinks:
        sink.close()


if __name__ == "__main__":
    main()
