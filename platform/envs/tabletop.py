"""The built-in task: move a gripper to the named block on a table. numpy only.

Positions are in table units, (0, 0) left top to (1, 1) right bottom of the top view. One action
moves the gripper by at most `STEP` per axis; with a gripper dimension the block must also be
grasped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vla_platform.envs.base import (
    Environment,
    EnvironmentInfo,
    Observation,
    Step,
    check_action,
    init_state_of,
)
from vla_platform.errors import ConfigurationError

STEP = 0.06
"""Table units that the gripper moves at most in one action, per axis."""
REACH = 0.035
"""Distance between gripper and block centre, in table units, that counts as reached by default."""
GRIP_RATE = 0.5
"""Share of the opening that one action closes or opens at most."""
WRIST_EXTENT = 0.5
"""Table units that the wrist view spans."""

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "green": (50, 165, 65),
    "blue": (45, 85, 215),
    "yellow": (235, 210, 45),
    "purple": (145, 60, 185),
    "orange": (240, 135, 30),
}
CAMERAS = ("top", "wrist")

Array = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Block:
    color: str
    shape: Literal["square", "round"]
    center: tuple[float, float]
    half: float  # half the edge, or the radius


@dataclass(frozen=True)
class Scene:
    """What `reset` draws from the seed."""

    blocks: tuple[Block, ...]
    target: int  # index into blocks
    gripper: tuple[float, float]
    background: tuple[int, int, int]
    texture: Array  # brightness of an 8 x 8 checker under everything
    task: str

    @classmethod
    def draw(cls, seed: int, sentences: tuple[str, ...]) -> Scene:
        rng = np.random.default_rng(seed)
        num_blocks = int(rng.integers(2, 5))
        centers: list[Array] = []
        while len(centers) < num_blocks:
            center = rng.uniform(0.1, 0.9, 2)
            if all(np.linalg.norm(center - other) > 0.16 for other in centers):
                centers.append(center)
        colors = rng.permutation(list(COLORS))[:num_blocks]
        target = int(rng.integers(num_blocks))
        gripper = rng.uniform(0.08, 0.92, 2)
        while np.linalg.norm(gripper - centers[target]) < 0.2:
            gripper = rng.uniform(0.08, 0.92, 2)
        blocks = tuple(
            Block(
                color=str(color),
                shape="round" if rng.random() < 0.25 else "square",
                center=(float(center[0]), float(center[1])),
                half=float(rng.uniform(0.04, 0.06)),
            )
            for color, center in zip(colors, centers, strict=True)
        )
        gray = rng.uniform(60, 200)
        sentence = sentences[int(rng.integers(len(sentences)))]
        red, green, blue = (int(value) for value in np.clip(gray + rng.normal(0, 12, 3), 0, 255))
        return cls(
            blocks=blocks,
            target=target,
            gripper=(float(gripper[0]), float(gripper[1])),
            background=(red, green, blue),
            texture=rng.normal(0, 5, (8, 8)),
            task=sentence.format(color=blocks[target].color),
        )


class Tabletop(Environment):
    """Reach the named block.

    `cameras` is one or both of `top` and `wrist`. With `gripper` the action is (dx, dy, grip) and
    the state (x, y, opening); without, (dx, dy) and (x, y). All action values lie in [-1, 1]; grip
    above 0 closes. Reward: 1 at success, else 0; `dense` adds the way gained towards the block, in
    steps of full speed over their number in an episode. `reach_radius` is the distance to the
    block's centre that counts as reached. `render=False` leaves the images out.
    """

    def __init__(
        self,
        *,
        cameras: tuple[str, ...] = CAMERAS,
        gripper: bool = True,
        sentences: tuple[str, ...] = ("reach the {color} block",),
        image_size: int = 128,
        max_steps: int = 60,
        render: bool = True,
        dense: bool = False,
        reach_radius: float = REACH,
    ) -> None:
        if not cameras or not set(cameras) <= set(CAMERAS) or len(set(cameras)) != len(cameras):
            raise ConfigurationError(f"cameras are some of {CAMERAS}, not {cameras}")
        names = ("x", "y", "grip") if gripper else ("x", "y")
        self._info = EnvironmentInfo(
            cameras={name: (image_size, image_size) for name in cameras if render},
            state_names=names,
            action_names=("dx", "dy", "grip")[: len(names)],
            action_low=np.full(len(names), -1, np.float32),
            action_high=np.full(len(names), 1, np.float32),
            fps=10.0,
            max_steps=max_steps,
            robot_type="tabletop",
            can_snapshot=True,
        )
        self._sentences = sentences
        self._size = image_size
        self._has_gripper = gripper
        self._dense = dense
        self._reach = reach_radius
        self._scene: Scene | None = None
        self._still: Image | None = None
        self._position = np.zeros(2)
        self._opening = 1.0
        self._seed = 0
        self._steps = 0
        self._done = True

    @property
    def info(self) -> EnvironmentInfo:
        return self._info

    @property
    def scene(self) -> Scene:
        if self._scene is None:
            raise ConfigurationError("reset the environment first")
        return self._scene

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        init_state_of(options, 0)
        self._seed = seed
        self._scene = Scene.draw(seed, self._sentences)
        self._still = None
        self._position = np.array(self._scene.gripper)
        self._opening = 1.0
        self._steps = 0
        self._done = False
        return self._observe()

    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        if self._done:
            raise ConfigurationError("the episode is over: reset the environment first")
        executed, clipped = check_action(action, self._info, frame=self._steps)
        before = self._distance()
        self._position = np.clip(self._position + STEP * executed[:2].astype(np.float64), 0.0, 1.0)
        if self._has_gripper:
            change = -GRIP_RATE * float(executed[2])
            self._opening = min(1.0, max(0.0, self._opening + change))
        self._steps += 1
        success = self._distance() <= self._reach and (not self._has_gripper or self._opening < 0.1)
        truncated = not success and self._steps >= self._info.max_steps
        self._done = success or truncated
        return Step(
            observation=self._observe(render=render or self._done),
            reward=float(success) + self._progress(before),
            terminated=success,
            truncated=truncated,
            action=executed,
            info={"success": success, "clipped": clipped},
        )

    def close(self) -> None:
        self._scene = self._still = None
        self._done = True

    def snapshot(self) -> bytes:
        moving = [*self._position.tolist(), self._opening]
        return json.dumps([self._seed, moving, self._steps, self._done]).encode()

    def restore(self, snapshot: bytes) -> Observation:
        seed, moving, steps, done = json.loads(snapshot)
        self.reset(int(seed))
        self._position = np.array(moving[:2], np.float64)
        self._opening = float(moving[2])
        self._steps, self._done = int(steps), bool(done)
        return self._observe()

    def expert_action(self) -> npt.NDArray[np.float32]:
        """Straight to the target, then grasp. Shape: (A,)."""
        way = np.array(self.scene.blocks[self.scene.target].center) - self._position
        move = way * min(1.0, STEP / max(float(np.linalg.norm(way)), 1e-9)) / STEP
        if not self._has_gripper:
            return move.astype(np.float32)
        grip = 1.0 if self._distance() <= self._reach / 2 else -1.0
        return np.array([*move, grip], np.float32)

    def _progress(self, before: float) -> float:
        if not self._dense:
            return 0.0
        return (before - self._distance()) / (STEP * self._info.max_steps)

    def _distance(self) -> float:
        center = self.scene.blocks[self.scene.target].center
        return float(np.linalg.norm(self._position - np.array(center)))

    def _observe(self, *, render: bool = True) -> Observation:
        state = [*self._position, self._opening] if self._has_gripper else [*self._position]
        shown = self._info.cameras if render else ()
        images = {name: self._image(name) for name in shown}
        return Observation(images, np.array(state, np.float32), self.scene.task)

    def _image(self, camera: str) -> Image:
        if camera == "wrist":
            image = draw_table(self.scene, tuple(self._position), WRIST_EXTENT, self._size)
            draw_gripper(image, (0.5, 0.5), self._opening, 1 / WRIST_EXTENT)
            return image
        if self._still is None:
            self._still = draw_table(self.scene, (0.5, 0.5), 1.0, self._size)
        image = self._still.copy()
        x, y = self._position
        draw_gripper(image, (float(x), float(y)), self._opening, 1.0)
        return image


def draw_table(scene: Scene, center: tuple[float, ...], extent: float, size: int) -> Image:
    """The table and its blocks seen from above: a square window of `extent` table units."""
    axis = ((np.arange(size) + 0.5) / size - 0.5) * extent
    x, y = center[0] + axis, center[1] + axis
    rows, columns = (np.clip((8 * edge).astype(np.int64), 0, 7) for edge in (y, x))
    canvas = scene.texture[rows[:, None], columns[None, :], None] + np.array(scene.background)
    inside_y, inside_x = (y >= 0) & (y <= 1), (x >= 0) & (x <= 1)
    canvas[~inside_y] *= 0.55
    canvas[:, ~inside_x] *= 0.55
    image: Image = np.clip(canvas, 0, 255).astype(np.uint8)
    for block in scene.blocks:
        dx, dy = x - block.center[0], y - block.center[1]
        window = _window(dx, dy, block.half)
        near_x, near_y = dx[window[1]][None, :], dy[window[0]][:, None]
        if block.shape == "round":
            image[window][near_x**2 + near_y**2 < block.half**2] = COLORS[block.color]
        else:
            image[window] = COLORS[block.color]
    return image


def draw_gripper(image: Image, center: tuple[float, float], opening: float, scale: float) -> None:
    """Two dark fingers, drawn in place; the gap shows the opening; `scale` in image widths."""
    axis = (np.arange(len(image)) + 0.5) / len(image)
    dx, dy = (axis - center[0]) / scale, (axis - center[1]) / scale
    gap = 0.012 + 0.02 * opening
    for side in (-gap, gap):
        rows, columns = np.abs(dy) < 0.03, np.abs(dx - side) < 0.01
        image[np.ix_(rows, columns)] = (20, 20, 25)


def _window(dx: Array, dy: Array, half: float) -> tuple[slice, slice]:
    """Rows and columns within `half` of the centre; `dx` and `dy` rise."""
    top, bottom = np.searchsorted(dy, (-half, half))
    left, right = np.searchsorted(dx, (-half, half))
    return slice(int(top), int(bottom)), slice(int(left), int(right))
