"""The tiny model with the heads and losses of its pretraining, which are thrown away after it.

Regression of the action queries alone sits at the median of the possible targets for a long time.
What is hard is to look up the named block among the image tokens. So the image tokens say what they
hold, every token behind the images names the gripper's cell, every token from the colour word on
the target's, and attention heads are shown where to look: one at the gripper, one of the colour
word at its block, one of what follows (a layer later) at the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from vla_platform.assets.tabletop_scenes import CELLS, COLORS, Scenes
from vla_platform.gpu_workers.backbone import use_linear_patch_embedding
from vla_platform.gpu_workers.canonical import Canonicalizer, Row

NUM_AUXILIARY = 6  # target xy, gripper xy, target minus gripper
NUM_MARKS = len(COLORS) + 1  # what an image token may hold: a block of each colour, the gripper
WEIGHTS = {
    "action": 1.0,
    "auxiliary": 1.0,
    "target": 1.0,
    "gripper": 0.3,
    "look": 1.0,
    "marks": 3.0,
    "offsets": 0.5,
}


@dataclass(frozen=True)
class Reading:
    """One forward. Shapes: B rows, L tokens, V image tokens, T queries, D width.

    hidden (B, L, D); seen (B, V, D) image tokens before and held (B, V, D) after the language
    model; queries (B, T, D); looks: attention maps (B, L, L) of the colour word, of what follows
    it, and of all tokens at the gripper; is_image, named (from the colour word on) and behind
    (the images) are masks (B, L).
    """

    hidden: Tensor
    seen: Tensor
    held: Tensor
    queries: Tensor
    looks: tuple[Tensor, Tensor, Tensor]
    is_image: Tensor
    named: Tensor
    behind: Tensor


class PretrainingModel(nn.Module):
    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__()
        config._attn_implementation = "eager"  # the others give no attention maps
        self.vlm = Qwen3VLForConditionalGeneration(config)
        use_linear_patch_embedding(self.vlm)
        width = config.get_text_config().hidden_size
        self.queries = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 2 + NUM_AUXILIARY)
        )
        self.cells = nn.Linear(width, 2 * CELLS * CELLS)
        self.marks = nn.ModuleList([nn.Linear(width, NUM_MARKS * 3) for _ in range(2)])

    def read(self, canonicalizer: Canonicalizer, scenes: Scenes, chunk: int) -> Reading:
        rows = [
            Row(images=images, prompt=prompt, num_queries=chunk)
            for images, prompt in zip(scenes.images, scenes.prompts, strict=True)
        ]
        layouts = [
            canonicalizer.layout(row.prompt, num_images=len(row.images), num_queries=chunk)
            for row in rows
        ]
        batch = canonicalizer.batch(rows, layouts, length=max(lay.length for lay in layouts))
        output = self.vlm.model(
            input_ids=torch.from_numpy(batch.input_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            mm_token_type_ids=torch.from_numpy(batch.is_image.astype(np.int64)),
            pixel_values=torch.from_numpy(batch.patches),
            image_grid_thw=torch.from_numpy(batch.grid_thw),
            use_cache=False,
            output_attentions=True,
        )
        num, hidden = len(rows), output.last_hidden_state
        width = hidden.shape[2]
        is_image = torch.from_numpy(batch.is_image)
        is_query = torch.from_numpy(batch.input_ids == canonicalizer.query_id)
        words = [canonicalizer.tokenizer.encode(f" {color}")[0] for color in COLORS]
        before = np.maximum.accumulate(batch.is_image[:, ::-1], axis=1)[:, ::-1]
        maps = output.attentions
        return Reading(
            hidden=hidden,
            seen=torch.cat(output.image_outputs.pooler_output).view(num, -1, width),
            held=hidden[is_image].view(num, -1, width),
            queries=hidden[is_query].view(num, chunk, width),
            looks=(maps[1][:, 0], maps[2][:, 0], maps[1][:, 2]),
            is_image=is_image,
            named=torch.from_numpy(np.maximum.accumulate(np.isin(batch.input_ids, words), axis=1)),
            behind=torch.from_numpy(~before & (batch.attention_mask == 1)),
        )

    def vision_losses(self, canonicalizer: Canonicalizer, scenes: Scenes) -> dict[str, Tensor]:
        """The image tower alone: what is where. Cheaper by half than a step of the whole model."""
        num, views = scenes.images.shape[:2]
        patches = canonicalizer.image.patches(scenes.images.reshape(-1, *scenes.images.shape[2:]))
        grid = torch.tensor([[1, canonicalizer.image.grid, canonicalizer.image.grid]])
        pooled = self.vlm.model.get_image_features(
            torch.from_numpy(patches), grid.expand(num * views, 3), return_dict=True
        ).pooler_output
        seen = torch.cat(pooled).view(num, -1, pooled[0].shape[-1])
        marks, offsets = _mark_losses(self.marks[0](seen), scenes)
        return {"marks": marks, "offsets": offsets}

    def losses(self, canonicalizer: Canonicalizer, scenes: Scenes, chunk: int) -> dict[str, Tensor]:
        reading = self.read(canonicalizer, scenes, chunk)
        predicted = self.queries(reading.queries)
        actions = torch.from_numpy(scenes.actions)
        auxiliary = torch.from_numpy(scenes.auxiliary)[:, None].expand(-1, chunk, -1)
        cells = self.cells(reading.hidden).unflatten(-1, (2, CELLS * CELLS))
        cell = torch.from_numpy(scenes.cells)[:, None].expand(-1, cells.shape[1], -1)
        named, behind = reading.named, reading.behind
        seen_marks, seen_offsets = _mark_losses(self.marks[0](reading.seen), scenes)
        held_marks, held_offsets = _mark_losses(self.marks[1](reading.held), scenes)
        return {
            "action": (predicted[..., :2] - actions).abs().mean(),
            "auxiliary": (predicted[..., 2:] - auxiliary).abs().mean(),
            "target": functional.cross_entropy(cells[named][:, 0], cell[named][:, 0]),
            "gripper": functional.cross_entropy(cells[behind][:, 1], cell[behind][:, 1]),
            "look": _look_loss(reading, scenes),
            "marks": (seen_marks + held_marks) / 2,
            "offsets": (seen_offsets + held_offsets) / 2,
        }


def _mark_losses(predicted: Tensor, scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Which marks a token holds (cross-entropy) and where those are in the view (L1)."""
    present = torch.from_numpy(scenes.mark_present)
    marks = predicted.view(*present.shape, 3)
    held = present[..., None]
    away = (marks[..., 1:] - torch.from_numpy(scenes.mark_offset)).abs() * held
    found = functional.binary_cross_entropy_with_logits(marks[..., 0], present)
    return found, away.sum() / held.sum().clamp(min=1)


def _look_loss(reading: Reading, scenes: Scenes) -> Tensor:
    """Minus log attention on the image tokens that hold the target, and the gripper.

    Three means apart, for there is one colour word among many tokens, and it has to come first.
    """
    rows = np.arange(len(scenes.target_mark))
    target = scenes.mark_present[rows, :, scenes.target_mark]
    gripper = scenes.mark_present[:, :, -1]
    word = reading.named & (reading.named.cumsum(dim=1) == 1)
    total = reading.hidden.new_zeros(())
    for attention, tokens, wanted in zip(
        reading.looks,
        (word, reading.named & ~word, reading.behind),
        (target, target, gripper),
        strict=True,
    ):
        place = torch.zeros(reading.is_image.shape)
        place[reading.is_image] = torch.from_numpy(wanted).flatten()
        share = (attention * place[:, None]).sum(dim=2)[tokens]
        total = total - (share + 1e-4).log().mean()
    return total
