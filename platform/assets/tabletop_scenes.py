"""Synthetic tabletops for pretraining: coloured blocks, a gripper, one or two views, a sentence.

Everything that the task does not fix is drawn at random (background, texture, block shape and
size, the gripper's look, camera zoom), so that the features carry over to other renderers.
Positions are in table units, (0, 0) left top to (1, 1) right bottom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_platform.envs import tabletop

COLORS = {**tabletop.COLORS, "cyan": (60, 200, 215), "pink": (240, 140, 190)}
NOUNS = ("block", "block", "block", "cube", "object", "bottle", "cup", "ball")
SENTENCES = (
    "reach the {color} {noun}",
    "reach the {color} {noun}",
    "move to the {color} {noun}",
    "push the {color} {noun}",
    "pick up the {color} {noun}",
    "Reach the {color} {noun}.",
    "Pick up the {color} {noun} on the table.",
    "go to the {color} {noun}",
)
GRID = 4  # visual tokens along an image edge
CELLS = 8  # cells along an edge of the table, for naming places
STEP = 0.06  # table units that the gripper moves at most in one action

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes. Shapes with C views, M marks, V = C * GRID^2 visual tokens.

    images (B, C, P, P, 3) uint8; actions (B, H, 2) in units of STEP; auxiliary (B, 6) target,
    gripper and their difference, in [-1, 1]; cells (B, 2) the table cell of the target and of the
    gripper; target_mark (B,) the index of the target's colour; mark_present (B, V, M);
    mark_offset (B, V, M, 2) place in the view, in [-1, 1].
    """

    images: npt.NDArray[np.uint8]
    prompts: list[str]
    actions: Array
    auxiliary: Array
    cells: npt.NDArray[np.int64]
    target_mark: npt.NDArray[np.int64]
    mark_present: Array
    mark_offset: Array


def training_sentences() -> Iterator[str]:
    """What the tokenizer is trained on: the tasks, OFT's suffix, numbers, general robot talk."""
    for sentence in SENTENCES:
        for color in COLORS:
            for noun in sorted(set(NOUNS)):
                yield sentence.format(color=color, noun=noun)
    for count in range(1, 65):
        yield f" Please predict the next {count} robot actions: <action><action>."
    for number in range(256):
        yield f" [STATE] {number} {255 - number} {(7 * number) % 256} [ACTION]"
    yield from (
        "user\n assistant\n system\n",
        "What colour is the block on the left of the table?",
        "Open the drawer, close the door and put the spoon into the bowl with the left hand.",
        "Place the bottle in the basket, stack the cups, pour the water, wipe the table.",
        "Turn the robot arm, grasp the handle with the gripper and lift it above the tray.",
    ) * 4


def chunk_of_moves(gripper: Array, target: Array, chunk: int) -> Array:
    """Straight to the target, at most STEP per action. Shapes (B, 2), (B, 2) to (B, H, 2)."""
    moves = np.empty((len(gripper), chunk, 2), np.float32)
    at = gripper.astype(np.float32).copy()
    for index in range(chunk):
        way = target - at
        distance = np.linalg.norm(way, axis=1, keepdims=True)
        move = way * np.minimum(1.0, STEP / np.maximum(distance, 1e-6))
        moves[:, index] = move / STEP
        at = at + move
    return moves


def make_scenes(rng: np.random.Generator, num: int, *, chunk: int, size: int, views: int) -> Scenes:
    names = list(COLORS)
    num_blocks = int(rng.integers(2, 5))
    colors = np.argsort(rng.random((num, len(names))), axis=1)[:, :num_blocks]
    blocks = _spread(rng, num, num_blocks)
    gripper = rng.uniform(0.08, 0.92, (num, 2)).astype(np.float32)
    chosen = rng.integers(num_blocks, size=num)
    rows = np.arange(num)
    target = blocks[rows, chosen]
    prompts = [
        SENTENCES[rng.integers(len(SENTENCES))].format(
            color=names[colors[row, chosen[row]]], noun=NOUNS[rng.integers(len(NOUNS))]
        )
        for row in rows
    ]
    look = _Look.draw(rng, num, num_blocks, colors)
    cameras = [
        (np.full((num, 2), 0.5, np.float32), rng.uniform(1.0, 1.15, num).astype(np.float32)),
        (gripper, rng.uniform(0.4, 0.65, num).astype(np.float32)),
    ][:views]
    images = np.stack(
        [_render(rng, look, blocks, gripper, *camera, size=size) for camera in cameras], axis=1
    )
    marks = [_marks(blocks, colors, gripper, *camera) for camera in cameras]
    return Scenes(
        images=images,
        prompts=prompts,
        actions=chunk_of_moves(gripper, target, chunk),
        auxiliary=np.concatenate(
            [2 * target - 1, 2 * gripper - 1, 2 * (target - gripper)], axis=1
        ).astype(np.float32),
        cells=np.stack([_cell_of(target), _cell_of(gripper)], axis=1),
        target_mark=colors[rows, chosen],
        mark_present=np.concatenate([present for present, _ in marks], axis=1),
        mark_offset=np.concatenate([offset for _, offset in marks], axis=1),
    )


def _spread(rng: np.random.Generator, num: int, num_blocks: int) -> Array:
    """Block centres that do not hide each other: the best of several draws per scene."""
    draws = rng.uniform(0.08, 0.92, (6, num, num_blocks, 2)).astype(np.float32)
    gaps = np.linalg.norm(draws[:, :, :, None] - draws[:, :, None], axis=-1)
    gaps += 9 * np.eye(num_blocks, dtype=np.float32)
    best = gaps.min(axis=(2, 3)).argmax(axis=0)
    chosen: Array = draws[best, np.arange(num)]
    return chosen


@dataclass(frozen=True)
class _Look:
    """How one batch of scenes is drawn; everything has a leading B."""

    color: Array
    half: Array
    turn: Array
    disc: npt.NDArray[np.bool_]
    base: Array
    gripper_color: Array
    gripper_radius: Array
    gripper_kind: npt.NDArray[np.int64]

    @classmethod
    def draw(
        cls, rng: np.random.Generator, num: int, num_blocks: int, colors: npt.NDArray[np.int64]
    ) -> _Look:
        palette = np.asarray(list(COLORS.values()), np.float32)
        gray = rng.uniform(25, 235, (num, 1))
        dark = rng.random((num, 1)) < 0.5
        return cls(
            color=palette[colors] + rng.normal(0, 12, (num, num_blocks, 3)).astype(np.float32),
            half=rng.uniform(0.03, 0.065, (num, num_blocks)).astype(np.float32),
            turn=rng.choice([0.0, 1.0], (num, num_blocks)).astype(np.float32)
            * rng.uniform(0, 1.57, (num, num_blocks)).astype(np.float32),
            disc=rng.random((num, num_blocks)) < 0.25,
            base=(gray + rng.normal(0, 15, (num, 3))).astype(np.float32),
            gripper_color=np.where(
                dark, rng.uniform(0, 40, (num, 3)), rng.uniform(215, 255, (num, 3))
            ).astype(np.float32),
            gripper_radius=rng.uniform(0.022, 0.045, num).astype(np.float32),
            gripper_kind=rng.integers(4, size=num),
        )


def _render(
    rng: np.random.Generator,
    look: _Look,
    blocks: Array,
    gripper: Array,
    centre: Array,
    extent: Array,
    *,
    size: int,
) -> npt.NDArray[np.uint8]:
    num = len(blocks)
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    x = (centre[:, 0, None] + extent[:, None] * axis)[:, None, :]
    y = (centre[:, 1, None] + extent[:, None] * axis)[:, :, None]
    cells = int(rng.choice([4, 8, 16]))
    texture = rng.normal(0, rng.uniform(0, 14), (num, cells, cells, 1)).astype(np.float32)
    texture = texture.repeat(size // cells, axis=1).repeat(size // cells, axis=2)
    canvas = look.base[:, None, None, :] + texture
    outside = (x < 0) | (x > 1) | (y < 0) | (y > 1)
    canvas[outside] *= 0.55
    for block in range(blocks.shape[1]):
        dx, dy = x - blocks[:, block, 0, None, None], y - blocks[:, block, 1, None, None]
        half = look.half[:, block, None, None]
        cos = np.cos(look.turn[:, block])[:, None, None]
        sin = np.sin(look.turn[:, block])[:, None, None]
        square = np.maximum(np.abs(cos * dx + sin * dy), np.abs(cos * dy - sin * dx)) < half
        disc = dx * dx + dy * dy < half * half
        inside = np.where(look.disc[:, block, None, None], disc, square)
        canvas = np.where(inside[..., None], look.color[:, block, None, None, :], canvas)
    dx, dy = x - gripper[:, 0, None, None], y - gripper[:, 1, None, None]
    drawn = _gripper(dx, dy, look.gripper_radius[:, None, None], look.gripper_kind[:, None, None])
    canvas = np.where(drawn[..., None], look.gripper_color[:, None, None, :], canvas)
    image: npt.NDArray[np.uint8] = np.clip(canvas, 0, 255).astype(np.uint8)
    return image


def _gripper(
    dx: npt.NDArray[Any], dy: npt.NDArray[Any], radius: Array, kind: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Ring, cross, disc or two fingers."""
    square = dx * dx + dy * dy
    thin = radius * 0.35
    ring = (square < radius**2) & (square > (radius * 0.55) ** 2)
    cross = ((np.abs(dx) < thin) & (np.abs(dy) < radius)) | (
        (np.abs(dy) < thin) & (np.abs(dx) < radius)
    )
    disc = square < (radius * 0.8) ** 2
    fingers = (np.abs(np.abs(dx) - radius * 0.8) < thin) & (np.abs(dy) < radius)
    drawn: npt.NDArray[np.bool_] = np.select(
        [kind == 0, kind == 1, kind == 2], [ring, cross, disc], fingers
    )
    return drawn


def _cell_of(points: Array) -> npt.NDArray[np.int64]:
    at = np.clip(np.floor(points * CELLS), 0, CELLS - 1).astype(np.int64)
    cell: npt.NDArray[np.int64] = at[..., 1] * CELLS + at[..., 0]
    return cell


def _marks(
    blocks: Array, colors: npt.NDArray[np.int64], gripper: Array, centre: Array, extent: Array
) -> tuple[Array, Array]:
    """Which visual token holds the centre of which block, and where that is in the view."""
    num = len(colors)
    present = np.zeros((num, GRID * GRID, len(COLORS) + 1), np.float32)
    offset = np.zeros((num, GRID * GRID, len(COLORS) + 1, 2), np.float32)
    points = np.concatenate([blocks, gripper[:, None]], axis=1)
    marks = np.concatenate([colors, np.full((num, 1), len(COLORS))], axis=1)
    place = ((points - centre[:, None]) / extent[:, None, None] + 0.5) * GRID
    cell = np.floor(place).astype(np.int64)
    inside = ((cell >= 0) & (cell < GRID)).all(axis=2)
    row, which = np.nonzero(inside)
    token = cell[row, which, 1] * GRID + cell[row, which, 0]
    present[row, token, marks[row, which]] = 1.0
    offset[row, token, marks[row, which]] = 2 * place[row, which] / GRID - 1
    return present, offset
