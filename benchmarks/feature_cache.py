"""Epochs after the first: with the feature cache against without, on the OFT head.

    python benchmarks/feature_cache.py [--quick]

The same policy trains twice on the same rows, once per setting; epochs alternate so that other
load hits both. `cached_epoch_speedup` is the ratio of the median epoch times after the first
epoch. The losses of both must be equal, bit by bit, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from model_load import Columns, oft_columns, oft_config
from result_line import print_result, target

from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.feature_cache import FeatureCache
from vla_platform.gpu_workers.training import TrainingModelService, use_one_thread

GOAL = 3.0
BATCH = 8


def epoch(
    service: TrainingModelService, key: str, batches: list[Columns]
) -> tuple[float, list[float]]:
    started = time.perf_counter()
    losses = [service.train_batch(key, batch).loss for batch in batches]
    return time.perf_counter() - started, losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer epochs; same result names")
    parser.add_argument("--base-model", default="tiny-random")
    options = parser.parse_args()
    epochs, rows = (4, 128) if options.quick else (9, 512)
    use_one_thread()
    backbone = Backbone.load(options.base_model)
    config = oft_config(backbone, "bench")
    batches = [oft_columns(backbone, BATCH, seed=seed) for seed in range(rows // BATCH)]
    cached = TrainingModelService(backbone, cache=FeatureCache())
    plain = TrainingModelService(backbone)
    times: dict[str, list[float]] = {"cached": [], "plain": []}
    for service in (cached, plain):
        service.mount(config)
    for number in range(epochs):
        cached_s, cached_losses = epoch(cached, config.policy_key, batches)
        plain_s, plain_losses = epoch(plain, config.policy_key, batches)
        if cached_losses != plain_losses:
            raise SystemExit(f"losses differ in epoch {number + 1}")
        if number > 0:
            times["cached"].append(cached_s)
            times["plain"].append(plain_s)
        print(
            f"epoch {number + 1}/{epochs}: cached {cached_s:.3f} s, plain {plain_s:.3f} s",
            file=sys.stderr,
            flush=True,
        )
    medians = {name: statistics.median(values) for name, values in times.items()}
    assert cached.encoder.cache is not None
    found = cached.encoder.cache.statistics
    print_result(
        "feature_cache",
        {
            "cached_epoch_speedup": target(
                medians["plain"] / medians["cached"], GOAL, "ratio of epoch times"
            )
        },
        {
            "cached_epoch_s": round(medians["cached"], 4),
            "plain_epoch_s": round(medians["plain"], 4),
            "losses_equal": True,
            "cache_hits": found.hits,
            "cache_misses": found.misses,
            "cache_bytes": found.size_bytes,
        },
    )


if __name__ == "__main__":
    main()
