"""What inference tells the outside: one event set per batch in Flower, usage per tenant.

Batches come tens a second; tenants get one event a second, with the shared backbone's seconds
split by tokens, under the workload name `inference`.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vla_platform.gpu_workers.items import BatchReport
from vla_platform.metrics.events import Event

WORKLOAD = "inference"
TASK_NAME = "gpu.infer_batch"
EVERY_S = 1.0


@dataclass
class TenantUse:
    """Of one tenant since the last event."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    batches: int = 0
    backbone_s: float = 0.0
    waited_s: float = 0.0  # longest
    shared_with: int = 0  # most tenants of a batch


class InferenceMetrics:
    """An observer of the consumer. Nothing is sent on the replying thread.

    `dispatch(type, **fields)` sends one Celery event; None where there is no worker around.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        *,
        base_model: str,
        dispatch: Callable[..., Any] | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._emit = emit
        self._base_model = base_model
        self._dispatch = dispatch
        self._every_s = every_s
        self._reports: queue.SimpleQueue[BatchReport | None] = queue.SimpleQueue()
        self._use: dict[str, TenantUse] = defaultdict(TenantUse)
        self._platform: list[BatchReport] = []
        self._thread = threading.Thread(target=self._run, name="infer-metrics", daemon=True)
        self._thread.start()

    def __call__(self, report: BatchReport) -> None:
        self._reports.put(report)

    def close(self) -> None:
        """Send what waits."""
        self._reports.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        sent = time.monotonic()
        while True:
            try:
                report = self._reports.get(timeout=self._every_s)
            except queue.Empty:
                pass
            else:
                if report is None:
                    self._flush()
                    return
                self._count(report)
                self._show(report)
            if time.monotonic() - sent >= self._every_s:
                sent = time.monotonic()
                self._flush()

    def _count(self, report: BatchReport) -> None:
        self._platform.append(report)
        total = sum(report.tokens.values()) or 1
        for tenant, samples in report.samples.items():
            use = self._use[tenant]
            tokens = report.tokens.get(tenant, 0)
            use.requests += report.requests[tenant]
            use.samples += samples
            use.tokens += tokens
            use.batches += 1
            use.backbone_s += report.forward_s * tokens / total
            use.waited_s = max(use.waited_s, report.waited_s)
            use.shared_with = max(use.shared_with, len(report.samples))

    def _flush(self) -> None:
        for tenant, use in self._use.items():
            values = {
                "base_model": self._base_model,
                "requests": use.requests,
                "samples": use.samples,
                "tokens": use.tokens,
                "batches": use.batches,
                "backbone_s": round(use.backbone_s, 6),
                "waited_ms": round(1e3 * use.waited_s, 3),
                "tenants_per_batch": use.shared_with,
                **self._means(),
            }
            self._emit(Event(tenant=tenant, workload=WORKLOAD, kind="inference", values=values))
        self._use.clear()
        self._platform.clear()

    def _means(self) -> dict[str, float]:
        num = len(self._platform)
        return {
            "batch_size": round(sum(sum(r.samples.values()) for r in self._platform) / num, 2),
            "forward_ms": round(1e3 * sum(r.forward_s for r in self._platform) / num, 3),
            "decode_ms": round(1e3 * sum(r.decode_s for r in self._platform) / num, 3),
            "queue_depth": self._platform[-1].num_waiting,
        }

    def _show(self, report: BatchReport) -> None:
        """As a task of Celery's, so that Flower lists it."""
        if self._dispatch is None:
            return
        task = str(uuid.uuid4())
        runtime = report.forward_s + report.decode_s
        shown = {
            "name": TASK_NAME,
            "args": "()",
            "kwargs": f"{{'samples': {sum(report.samples.values())}, "
            f"'tenants': {len(report.samples)}, 'base_model': '{self._base_model}'}}",
            "retries": 0,
        }
        self._dispatch("task-received", uuid=task, **shown)
        self._dispatch("task-started", uuid=task)
        if report.num_failed == sum(report.requests.values()):
            self._dispatch("task-failed", uuid=task, exception="every request failed")
        else:
            result = f"waited {1e3 * report.waited_s:.1f} ms"
            self._dispatch("task-succeeded", uuid=task, result=result, runtime=runtime)
