"""What a group of tenants gains on one backbone.

    python benchmarks/sft_group.py [--quick]

Forward: N tenants with b rows each, encoded one tenant after the other (serial) and together
(grouped), through the platform's encoder; beside it, in the same rounds, the bare model on inputs
prepared beforehand, one tenant at a time and concatenated. `grouped_forward_n8_b1` is the encoder's
ratio serial / grouped as a share of the bare model's. Medians of the processor time of alternating
rounds, one thread.

End to end: see `end_to_end.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from end_to_end import BATCHES, end_to_end
from model_load import oft_columns
from result_line import print_result, target

from vla_platform.gpu_workers.backbone import Backbone, FeatureKind
from vla_platform.gpu_workers.canonical import Row
from vla_platform.gpu_workers.features import FeatureEncoder
from vla_platform.gpu_workers.samples import decode_prompts
from vla_platform.gpu_workers.training import use_one_thread

TENANTS = (2, 4, 8)
ROWS = (1, 2, 4, 8)
CHUNK = 8
FORWARD_GOAL = 0.95

Targets = dict[str, dict[str, Any]]


def tenant_rows(backbone: Backbone, num: int, *, seed: int) -> list[Row]:
    columns = oft_columns(backbone, num, seed=seed)
    prompts = decode_prompts(columns["prompt"])
    return [
        Row(images=images, prompt=prompt, num_queries=CHUNK)
        for images, prompt in zip(columns["images"], prompts, strict=True)
    ]


def bare_inputs(backbone: Backbone, rows: list[Row]) -> dict[str, torch.Tensor]:
    canonicalizer = backbone.canonicalizer
    layouts = [canonicalizer.layout(row.prompt, num_images=1, num_queries=CHUNK) for row in rows]
    length = max(layout.padded_length for layout in layouts)
    batch = canonicalizer.batch(rows, layouts, length=length)
    return {
        "input_ids": torch.from_numpy(batch.input_ids),
        "attention_mask": torch.from_numpy(batch.attention_mask),
        "mm_token_type_ids": torch.from_numpy(batch.is_image.astype(np.int64)),
        "pixel_values": torch.from_numpy(batch.patches),
        "image_grid_thw": torch.from_numpy(batch.grid_thw),
    }


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of this thread: other load on the machine does not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def forward(backbone: Backbone, *, rounds: int) -> tuple[Targets, dict[str, Any]]:
    """Grouped against serial encoding, beside the bare model's own gain."""
    encoder = FeatureEncoder(backbone)
    model: Any = backbone._model.model

    def encode(rows: list[Row]) -> None:
        encoder.encode(rows, [FeatureKind.QUERIES] * len(rows))

    @torch.no_grad()
    def bare(inputs: dict[str, torch.Tensor]) -> None:
        model(**inputs, use_cache=False)

    table: dict[str, dict[str, float]] = {}
    for num in TENANTS:
        for size in ROWS:
            tenants = [tenant_rows(backbone, size, seed=100 * num + at) for at in range(num)]
            together = [row for rows in tenants for row in rows]
            inputs = [bare_inputs(backbone, rows) for rows in tenants]
            whole = {key: torch.cat([one[key] for one in inputs]) for key in inputs[0]}
            cases: dict[str, Callable[[], object]] = {
                "serial": lambda tenants=tenants: [encode(rows) for rows in tenants],
                "grouped": lambda together=together: encode(together),
                "bare_serial": lambda inputs=inputs: [bare(one) for one in inputs],
                "bare_grouped": lambda whole=whole: bare(whole),
            }
            for work in cases.values():
                work()
            repeats = max(3, rounds if num * size <= 8 else rounds // 3)
            times: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(repeats):
                for name, work in cases.items():
                    times[name].append(timed(work))
            medians = {name: statistics.median(values) for name, values in times.items()}
            gain = medians["serial"] / medians["grouped"]
            bare_gain = medians["bare_serial"] / medians["bare_grouped"]
            table[f"n{num}_b{size}"] = {
                "gain": round(gain, 3),
                "bare_gain": round(bare_gain, 3),
                "grouped_ms": round(medians["grouped"] * 1e3, 2),
                "bare_grouped_ms": round(medians["bare_grouped"] * 1e3, 2),
            }
            print(
                f"{num} tenants x {size} rows: serial {medians['serial'] * 1e3:.1f} ms, "
                f"grouped {medians['grouped'] * 1e3:.1f} ms, gain {gain:.2f} "
                f"(bare concatenation {bare_gain:.2f})",
                file=sys.stderr,
                flush=True,
            )
    one = table["n8_b1"]
    share = one["gain"] / one["bare_gain"]
    return {
        "grouped_forward_n8_b1": target(share, FORWARD_GOAL, "share of bare concatenation's gain")
    }, {"forward": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; same result names")
    parser.add_argument("--base-model", default="tiny-random")
    options = parser.parse_args()
    use_one_thread()
    backbone = Backbone.load(options.base_model)
    targets, details = forward(backbone, rounds=15 if options.quick else 45)
    whole = end_to_end(
        steps=60 if options.quick else 200,
        rounds=3 if options.quick else 5,
        base_model=options.base_model,
    )
    ratio = whole[BATCHES[0]]["ratio"]
    unit = f"x plain loop, batch {BATCHES[0]}"
    targets["vs_plain_loop_1"] = target(ratio["one"], 0.9, f"{unit}, one tenant")
    targets["vs_plain_loop_4"] = target(ratio["four"], 1.0, f"{unit}, four tenants")
    print_result("sft_group", targets, {**details, "end_to_end": whole})


if __name__ == "__main__":
    main()
