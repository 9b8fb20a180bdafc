"""Make the tiny base model: Qwen3-VL's architecture at 3.4 M parameters, pretrained on tabletops.

    python platform/assets/pretrain_tiny.py --out DIR --seed 0

Trains an offline tokenizer, then the whole model end to end as a QwenOFT regression: from one or
two camera views of coloured blocks and a sentence naming one of them, predict the next movements
of the gripper towards it. A frozen random backbone supports no learning from pixels; this one does.
The run takes about 25 minutes of one CPU thread, saves its state as it goes and resumes with the
same command. A few `--steps` make a short run for tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen3VLConfig

from vla_platform.assets.pretraining_model import WEIGHTS, PretrainingModel
from vla_platform.assets.tabletop_scenes import Scenes, make_scenes, training_sentences
from vla_platform.gpu_workers.canonical import QUERY_TOKEN, Canonicalizer, ImageFormat

IMAGE_SIZE = 128
VOCABULARY = 2048
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHUNKS = (8, 8, 4, 4, 8, 8, 4, 4)


def build_tokenizer(directory: Path) -> Any:
    """Byte-level BPE with Qwen's split rule and special tokens, trained on the task sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.train_from_iterator(training_sentences(), trainer)
    # Single and never merged: StarVLA counts these tokens to find its action queries.
    tokenizer.add_tokens([AddedToken(QUERY_TOKEN, normalized=False)])
    kind: Any = Qwen2Tokenizer
    fast = kind(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
    fast.padding_side = "left"
    fast.save_pretrained(directory)
    return fast


def build_config(tokenizer: Any) -> Qwen3VLConfig:
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "pad_token_id": token("<|endoftext|>"),
        "tie_word_embeddings": True,
        "initializer_range": 0.05,  # about 1 / sqrt(width), as for the wide models
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "out_hidden_size": 128,
        "num_position_embeddings": (IMAGE_SIZE // 16) ** 2,
        "deepstack_visual_indexes": [1, 2, 3],
        "initializer_range": 0.05,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def write_preprocessor(directory: Path) -> None:
    config = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(config, indent=2) + "\n")


PHASES = ("vision", "lookup", "whole")
"""The image tower alone; then, on its fixed features, finding what is named; then everything."""
LOOKUP = ("target", "gripper", "look")


def phase_of(step: int, options: argparse.Namespace) -> tuple[str, int, int]:
    """Phase of a step, the step within it, and its length."""
    vision, lookup = options.vision_steps, options.lookup_steps
    if step < vision:
        return "vision", step, vision
    if step < vision + lookup:
        return "lookup", step - vision, lookup
    return "whole", step - vision - lookup, options.steps - vision - lookup


def learning_rate(phase: str, step: int, steps: int, peak: float) -> float:
    """Warm-up in every phase, then constant; cosine down to 2 % in the last."""
    warmup = min(150, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    if phase != "whole":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.02 * peak + 0.98 * peak * 0.5 * (1 + math.cos(math.pi * progress))


def scenes_of_step(seed: int, step: int, batch: int) -> tuple[Scenes, int]:
    """The batch of a step is a pure function of (seed, step), so a resumed run sees the same."""
    rng = np.random.default_rng([seed, step])
    chunk = CHUNKS[step % len(CHUNKS)]
    return make_scenes(rng, batch, chunk=chunk, size=IMAGE_SIZE, views=1 + step % 2), chunk


def evaluate(model: PretrainingModel, canonicalizer: Canonicalizer, seed: int) -> dict[str, float]:
    """Held-out L1 of the movements against the mean predictor's, over 256 scenes of each kind."""
    errors, baseline = [], []
    model.eval()
    with torch.no_grad():
        for views in (1, 2):
            rng = np.random.default_rng([seed, 2**31, views])
            scenes = make_scenes(rng, 256, chunk=8, size=IMAGE_SIZE, views=views)
            queries = model.read(canonicalizer, scenes, 8).queries
            predicted = model.queries(queries)[..., :2].numpy()
            errors.append(float(np.abs(predicted - scenes.actions).mean()))
            middle = np.median(scenes.actions, axis=0, keepdims=True)
            baseline.append(float(np.abs(scenes.actions - middle).mean()))
    model.train()
    return {
        "heldout_l1_one_view": errors[0],
        "heldout_l1_two_views": errors[1],
        "baseline_l1": float(np.mean(baseline)),
    }


def train(options: argparse.Namespace, work: Path) -> PretrainingModel | None:
    """The trained model; none where `--stop-after` ended the run with its state saved."""
    tokenizer = build_tokenizer(options.out)
    write_preprocessor(options.out)
    torch.manual_seed(options.seed)
    model = PretrainingModel(build_config(tokenizer))
    canonicalizer = Canonicalizer(tokenizer, ImageFormat(size=IMAGE_SIZE))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    first, saved = 0, work / "state.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"resuming at step {first}", file=sys.stderr, flush=True)
    started, sums = time.monotonic(), dict.fromkeys(WEIGHTS, 0.0)
    for step in range(first, options.steps):
        phase, at, length = phase_of(step, options)
        model.vlm.model.visual.requires_grad_(phase != "lookup")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, at, length, options.lr)
        batch = options.batch * (2 if phase == "lookup" else 1)
        scenes, chunk = scenes_of_step(options.seed, step, batch)
        if phase == "vision":
            losses = model.vision_losses(canonicalizer, scenes)
        else:
            losses = model.losses(canonicalizer, scenes, chunk)
        if phase == "lookup":
            losses = {name: losses[name] for name in LOOKUP}
        total: Any = sum(WEIGHTS[name] * loss for name, loss in losses.items())
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for name, loss in losses.items():
            sums[name] += float(loss.detach())
        done = step + 1
        if done % options.report_every == 0:
            shown = " ".join(f"{k} {v / options.report_every:.4f}" for k, v in sums.items() if v)
            spent = time.monotonic() - started
            print(f"step {done}/{options.steps} {shown} {spent:.0f} s", file=sys.stderr, flush=True)
            sums = dict.fromkeys(WEIGHTS, 0.0)
        stops = done == options.stop_after
        if stops or (done % options.save_every == 0 and done < options.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, work / "next.pt")
            (work / "next.pt").replace(saved)
        if stops:
            return None
    return model


def publish(
    model: PretrainingModel, metrics: dict[str, float], options: argparse.Namespace
) -> None:
    vlm: Any = model.vlm
    vlm.to(torch.bfloat16).save_pretrained(options.out)
    (options.out / "generation_config.json").unlink(missing_ok=True)
    digest = hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest()
    recipe = {
        "command": f"python platform/assets/pretrain_tiny.py --seed {options.seed} "
        f"--steps {options.steps} --vision-steps {options.vision_steps} "
        f"--lookup-steps {options.lookup_steps} --batch {options.batch} --lr {options.lr}",
        "seed": options.seed,
        "steps": options.steps,
        "samples": (options.steps + options.lookup_steps) * options.batch,
        "data": "platform/assets/tabletop_scenes.py: batch of step i from the generator [seed, i]",
        "losses": WEIGHTS,
        "parameters": sum(p.numel() for p in model.vlm.parameters()),
        "metrics": {name: round(value, 5) for name, value in metrics.items()},
        "torch": torch.__version__,
        "model_safetensors_sha256": digest,
    }
    (options.out / "RECIPE.json").write_text(json.dumps(recipe, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4900, help="of all three phases")
    parser.add_argument("--lookup-steps", type=int, default=700, help="the second phase")
    parser.add_argument("--vision-steps", type=int, default=2000, help="the first phase")
    parser.add_argument("--batch", type=int, default=16, help="scenes per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--report-every", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--stop-after", type=int, help="end at this step; the next run goes on")
    parser.add_argument("--save-every", type=int, default=200, help="steps between saved states")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the result depends on the order of summation
    work = options.out / "in-progress"
    work.mkdir(parents=True, exist_ok=True)
    model = train(options, work)
    if model is None:
        return 0
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    canonicalizer = Canonicalizer(tokenizer, ImageFormat(size=IMAGE_SIZE))
    metrics = evaluate(model, canonicalizer, options.seed)
    publish(model, metrics, options)
    shutil.rmtree(work)
    print(json.dumps(metrics))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
