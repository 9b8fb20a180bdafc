"""The whole platform against a plain PyTorch loop that does the same work.

Same data, order, backbone, head, optimizer and batch; the feature cache is off on both sides, so
every step pays for decoding, one backbone forward and one update. Steps per second between the
first and the last step. The stack stays up while the plain loop runs: the two alternate.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vla_platform.cli.tenants import operator
from vla_platform.client import Platform, Run
from vla_platform.datasets import Demonstrations, open_dataset
from vla_platform.datasets.recording import make_demonstrations
from vla_platform.envs.tabletop import Tabletop
from vla_platform.gpu_workers.action_modules.build import build_action_module
from vla_platform.gpu_workers.algorithms.sft import sft_loss
from vla_platform.gpu_workers.backbone import Backbone
from vla_platform.gpu_workers.features import FeatureEncoder, stack_features
from vla_platform.gpu_workers.samples import rows_of, samples_of
from vla_platform.schema import Schema
from vla_platform.specs import OFTModule
from vla_platform.stack import operate

BATCHES = (4, 8)
"""Rows per step: grouping pays where a tenant's own batch leaves the device idle."""
CHUNK = 8
LR = 1e-3
CAMERAS = ("observation.images.top", "observation.images.wrist")


def plain_loop(folder: Path, backbone: Backbone, *, steps: int, batch: int, seed: int) -> float:
    """Steps per second of one policy, without the platform."""
    encoder = FeatureEncoder(backbone)
    with Demonstrations(
        open_dataset(folder),
        cameras=CAMERAS,
        state_key="observation.state",
        action_key="action",
        chunk=CHUNK,
        image_size=backbone.image_size,
        episodes=[episode.index for episode in open_dataset(folder).episodes][:-1],
        seed=seed,
    ) as data:
        first = data.batch(0, 1).columns
        schema = Schema(
            base_model="tiny",
            base_digest=backbone.digest,
            cameras=CAMERAS,
            image_size=backbone.image_size,
            state_dim=first["state"].shape[1],
            action_dim=first["actions"].shape[2],
            chunk=CHUNK,
            action_module="oft",
            state_input="encoder",
        )
        known = data.statistics()
        module = build_action_module(
            OFTModule(chunk=CHUNK),
            schema,
            feature_dim=backbone.hidden_dim,
            seed=seed,
            normalization="min_max",
            state_statistics=known["state"],
            action_statistics=known["action"],
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
        noise = torch.Generator().manual_seed(seed)
        started = 0.0
        for step in range(steps):
            columns = data.batch(step * batch, batch).columns
            rows = rows_of(columns, module)
            encoded = encoder.encode(rows, [module.feature_kind] * batch)
            feature = stack_features(encoded.features, module.feature_kind)
            samples = samples_of(columns, feature, schema)
            drawn = module.draw(batch, noise)
            loss = sft_loss(module, samples, num_valid=int(samples.valid.sum()), drawn=drawn)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                started = time.perf_counter()
    return (steps - 1) / (time.perf_counter() - started)


def on_platform(platforms: list[Platform], *, steps: int, batch: int, seed: int) -> float:
    """Steps per second of all tenants together."""
    spec = {
        "kind": "sft",
        "policy": f"bench-{batch}-{seed}",
        "dataset": {"path": "bench", "heldout_samples": 0},
        "steps": steps,
        "batch_size": batch,
        "seed": seed,
        "optimizer": {"lr": LR},
        "checkpoint": {"every_steps": steps},
    }
    runs: list[Run] = [platform.submit(spec) for platform in platforms]
    times: list[float] = []
    for run in runs:
        run.result(timeout_s=600)
        times += [event["at"] for event in run.metrics() if event["kind"] == "step"]
    return (len(times) - len(runs)) / (max(times) - min(times))


def end_to_end(*, steps: int, rounds: int, base_model: str) -> dict[int, dict[str, Any]]:
    """By batch size, medians of alternating rounds: steps per second, ratios to the plain loop."""
    backbone = Backbone.load(base_model)
    found: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # About ten frames an episode: no frame comes twice within a run.
        episodes = steps * max(BATCHES) // 8 + 20
        make_demonstrations(folder / "data" / "bench", env=Tabletop(), episodes=episodes, seed=0)
        environment: dict[str, Any] = {
            **os.environ,
            "VLA_FEATURE_CACHE_BYTES": "0",
            "VLA_BASE_MODELS": f"tiny={base_model}",
        }
        try:
            operate.up(
                folder / "var",
                environment=environment,
                dataset_roots=str(folder / "data"),
                timeout_s=240,
                on_progress=lambda role, state: print(f"{role}: {state}", file=sys.stderr),
            )
            with operator(folder / "var") as admin:
                platforms = [Platform(admin.add(f"t{number}")) for number in range(4)]
                data = folder / "data" / "bench"
                for batch in BATCHES:
                    mine = found[batch] = {"plain": [], "one": [], "four": []}
                    size = {"steps": steps, "batch": batch}
                    for at in range(rounds):
                        mine["plain"].append(plain_loop(data, backbone, **size, seed=at))
                        mine["one"].append(on_platform(platforms[:1], **size, seed=at))
                        mine["four"].append(on_platform(platforms, **size, seed=100 + at))
                        shown = ", ".join(f"{key} {rate[-1]:.1f}" for key, rate in mine.items())
                        place = f"batch {batch}, round {at + 1}/{rounds}"
                        print(f"{place}: {shown} steps/s", file=sys.stderr, flush=True)
                for platform in platforms:
                    platform.close()
        finally:
            operate.down(folder / "var")
    return {batch: _medians(mine) for batch, mine in found.items()}


def _medians(found: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        kind: [mine / plain for mine, plain in zip(found[kind], found["plain"], strict=True)]
        for kind in ("one", "four")
    }
    return {
        "steps_per_s": {kind: statistics.median(values) for kind, values in found.items()},
        "ratio": {kind: statistics.median(values) for kind, values in ratios.items()},
    }
