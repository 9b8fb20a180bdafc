"""Our side of `benchmarks/inference.py`: the platform's own consumer, channel and batching.

    python benchmarks/inference_server.py PAYLOAD_URL standin|tiny-random NUM_TENANTS [--batch 32]

`standin` runs the stand-in's forward; everything else is what a GPU worker runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from inference_rows import STATE
from inference_standin import StandIn

from vla_platform.datasets.statistics import Statistics
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.consumer import InferenceConsumer
from vla_platform.gpu_workers.group_batching import GroupBatching
from vla_platform.gpu_workers.inference import InferenceModelService, Outcome, RunCost
from vla_platform.gpu_workers.inference_metrics import InferenceMetrics
from vla_platform.gpu_workers.module_source import MemoryModuleSource
from vla_platform.gpu_workers.module_versions import ModuleVersions
from vla_platform.gpu_workers.training import TrainingModelService
from vla_platform.gpu_workers.weights import ModuleMeta, Weights, digest_of_tensors
from vla_platform.inference.channel.redis_streams import RedisStreamsChannel, open_client
from vla_platform.inference.protocol import Prediction, PredictRequest
from vla_platform.metrics.events import Emitter


@dataclass(frozen=True)
class Prepared:
    tenant: str
    row: Any
    lane: str = "any"


class StandInEngine:
    def __init__(self, num_tenants: int) -> None:
        self.model = StandIn(num_tenants)

    def prepare(self, tenant: str, client: str, request: PredictRequest, pixels: Any) -> Prepared:
        return Prepared(tenant, pixels.copy())

    def run(self, parts: Sequence[Any]) -> tuple[list[Outcome], RunCost]:
        tenants = [int(part.prepared.tenant.removeprefix("t")) for part in parts]
        actions = self.model([part.prepared.row for part in parts], tenants)
        return [
            Prediction(
                actions=row.reshape(1, 8, 7), policy_version=1, module_digest="d", signature="s"
            )
            for row in actions
        ], RunCost(tokens={f"t{tenant}": 1 for tenant in tenants}, num_forwards=1)

    def release(self, prepared: Prepared) -> None:
        return None


def tiny_engine(num_tenants: int) -> InferenceModelService:
    from model_load import oft_config

    torch.set_num_threads(1)
    backbone = Backbone.load("tiny-random")
    training = TrainingModelService(backbone)
    source = MemoryModuleSource()
    for number in range(num_tenants):
        config = oft_config(backbone, f"t{number}", seed=number)
        ones = np.ones((2, STATE)) * [[-1], [1]]
        config = replace(
            config,
            schema=replace(config.schema, state_dim=STATE),
            statistics={**config.statistics, "state": Statistics.compute(ones, key="state")},
        )
        training.mount(config)
        arrays = training.export_params(config.policy_key)
        source.put(
            f"t{number}/bench",
            Weights(1, arrays, ModuleMeta.of(config), digest_of_tensors(arrays)),
        )
    versions = ModuleVersions(
        source,
        base_digest=backbone.digest,
        feature_dim=backbone.hidden_dim,
        device=backbone.device,
    )
    return InferenceModelService(backbone, versions)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("engine")
    parser.add_argument("num_tenants", type=int)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    standin = options.engine == "standin"
    engine: Any = (
        StandInEngine(options.num_tenants) if standin else tiny_engine(options.num_tenants)
    )
    emitter = Emitter(open_client(options.url))
    consumer = InferenceConsumer(
        RedisStreamsChannel(
            open_client(options.url),
            options.engine,
            tenants=lambda: [f"t{n}" for n in range(options.num_tenants)],
        ),
        engine,
        GroupBatching(max_samples=options.batch, max_wait_s=0.005),
        observers=[InferenceMetrics(emitter.emit, base_model=options.engine)],
    )
    consumer.start()

    print("ready", flush=True)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    stopping.wait()
    consumer.stop()
    sys.exit(0)


if __name__ == "__main__":
    main()
