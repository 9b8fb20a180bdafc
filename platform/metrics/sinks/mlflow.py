"""Events to MLflow: one experiment per tenant, one run per workload."""

from __future__ import annotations

from collections import OrderedDict

from mlflow import MlflowClient
from mlflow.entities import Metric

from vla_platform.metrics.events import Event
from vla_platform.metrics.sinks.base import OPERATORS_ONLY, Sink, numbers_of

MOST_RUNS = 1000


class MlflowSink(Sink):
    """`target`: the tracking URI."""

    def __init__(self, target: str) -> None:
        self._client = MlflowClient(tracking_uri=target)
        self._runs: OrderedDict[tuple[str, str], str] = OrderedDict()

    def write(self, event: Event) -> None:
        numbers = numbers_of(event.values)
        if event.kind in OPERATORS_ONLY or not numbers:
            return
        at, step = int(1000 * event.at), int(numbers.get("step", 0))
        metrics = [
            Metric(f"{event.kind}.{name}", value, at, step) for name, value in numbers.items()
        ]
        self._client.log_batch(self._run(event), metrics=metrics)

    def _run(self, event: Event) -> str:
        """The run of a workload, also one of an earlier process."""
        key = (event.tenant, event.workload)
        if key not in self._runs:
            experiment = self._experiment(f"vla/{event.tenant}")
            known = self._client.search_runs(
                [experiment], f"tags.workload = '{event.workload}'", max_results=1
            )
            run = known[0] if known else self._client.create_run(
                experiment, tags={"workload": event.workload, "tenant": event.tenant},
                run_name=event.workload,
            )  # fmt: skip
            if len(self._runs) >= MOST_RUNS:
                self._runs.popitem(last=False)
            self._runs[key] = str(run.info.run_id)
        return self._runs[key]

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))
