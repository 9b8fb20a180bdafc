"""The second built-in task: push the named block into the ring. numpy only.

The gripper's fist pushes the block along the line between their centres while they touch
(quasi-static, no friction). The block has to be pushed from behind, so unlike `reach` the straight
way is not the solution.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
from vla_platform.envs.tabletop import (
    CAMERAS,
    COLORS,
    STEP,
    WRIST_EXTENT,
    Block,
    Scene,
    draw_gripper,
    draw_table,
)
from vla_platform.errors import ConfigurationError

HALF = 0.05
"""Half the edge of the block, in table units."""
CONTACT = 0.075
"""Distance between the centres at which the fist touches the block."""
SUBSTEPS = 4
"""Parts of a move, so that a full one cannot jump over the block."""
GOAL = 0.05
"""Distance between block and ring centre, in table units, that counts as inside."""
RING = (0.055, 0.07)
"""Inner and outer radius of the drawn ring."""

Array = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]


class TabletopPush(Environment):
    """Push the block into the ring.

    The action is (dx, dy) in [-1, 1], the state the gripper's (x, y). Reward: how much nearer the
    block came to the ring, in table units, and 1 more at success. `render=False` leaves the images
    out.
    """

    def __init__(
        self,
        *,
        cameras: tuple[str, ...] = CAMERAS,
        sentences: tuple[str, ...] = ("push the {color} block into the ring",),
        image_size: int = 128,
        max_steps: int = 80,
        render: bool = True,
    ) -> None:
        if not cameras or not set(cameras) <= set(CAMERAS) or len(set(cameras)) != len(cameras):
            raise ConfigurationError(f"cameras are some of {CAMERAS}, not {cameras}")
        self._info = EnvironmentInfo(
            cameras={name: (image_size, image_size) for name in cameras if render},
            state_names=("x", "y"),
            action_names=("dx", "dy"),
            action_low=np.full(2, -1, np.float32),
            action_high=np.full(2, 1, np.float32),
            fps=10.0,
            max_steps=max_steps,
            robot_type="tabletop",
            can_snapshot=True,
        )
        self._sentences = sentences
        self._size = image_size
        self._seed = 0
        self._scene: Scene | None = None
        self._gripper = self._block = self._goal = np.zeros(2)
        self._steps = 0
        self._done = True

    @property
    def info(self) -> EnvironmentInfo:
        return self._info

    def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> Observation:
        init_state_of(options, 0)
        self._seed = seed
        rng = np.random.default_rng(seed)
        self._block = rng.uniform(0.3, 0.7, 2)
        self._goal = rng.uniform(0.15, 0.85, 2)
        while np.linalg.norm(self._goal - self._block) < 0.22:
            self._goal = rng.uniform(0.15, 0.85, 2)
        self._gripper = rng.uniform(0.08, 0.92, 2)
        while np.linalg.norm(self._gripper - self._block) < 2 * CONTACT:
            self._gripper = rng.uniform(0.08, 0.92, 2)
        color = str(rng.choice(list(COLORS)))
        gray = int(rng.uniform(60, 200))
        sentence = self._sentences[int(rng.integers(len(self._sentences)))]
        self._scene = Scene(
            blocks=(Block(color, "square", (0.0, 0.0), HALF),),
            target=0,
            gripper=(float(self._gripper[0]), float(self._gripper[1])),
            background=(gray, gray, gray),
            texture=rng.normal(0, 5, (8, 8)),
            task=sentence.format(color=color),
        )
        self._steps = 0
        self._done = False
        return self._observe()

    def step(self, action: npt.NDArray[np.float32], *, render: bool = True) -> Step:
        if self._done:
            raise ConfigurationError("the episode is over: reset the environment first")
        executed, clipped = check_action(action, self._info, frame=self._steps)
        before = self._distance()
        self._move(STEP * executed.astype(np.float64))
        self._steps += 1
        success = self._distance() <= GOAL
        truncated = not success and self._steps >= self._info.max_steps
        self._done = success or truncated
        return Step(
            observation=self._observe(render=render or self._done),
            reward=before - self._distance() + float(success),
            terminated=success,
            truncated=truncated,
            action=executed,
            info={"success": success, "clipped": clipped},
        )

    def close(self) -> None:
        self._scene = None
        self._done = True

    def expert_action(self) -> npt.NDArray[np.float32]:
        """Round the block to its far side, then towards the ring. Shape: (A,)."""
        way = self._goal - self._block
        ahead = way / np.linalg.norm(way)
        offset = self._gripper - self._block
        behind = -float(offset @ ahead)
        side = offset + behind * ahead
        if behind > 0 and np.linalg.norm(side) < 0.012:
            # In line: push, but no further than the ring's centre.
            length = float(np.linalg.norm(way)) + max(behind - CONTACT, 0.0)
            move = ahead * length - side
        else:
            move = self._way_round(self._block - ahead * (CONTACT + 0.03))
        return (move * min(1.0, STEP / max(float(np.abs(move).max()), 1e-9)) / STEP).astype(
            np.float32
        )

    def snapshot(self) -> bytes:
        places = [*self._gripper.tolist(), *self._block.tolist()]
        return json.dumps([self._seed, places, self._steps, self._done]).encode()

    def restore(self, snapshot: bytes) -> Observation:
        seed, places, steps, done = json.loads(snapshot)
        self.reset(int(seed))
        self._gripper, self._block = np.array(places[:2]), np.array(places[2:])
        self._steps, self._done = int(steps), bool(done)
        return self._observe()

    def _way_round(self, target: Array) -> Array:
        """The first move to `target` that keeps clear of the block."""
        margin = CONTACT + 0.02
        straight = target - self._gripper
        length = max(float(np.linalg.norm(straight)), 1e-9)
        along = np.clip((self._block - self._gripper) @ straight / length, 0.0, length)
        nearest = self._gripper + straight / length * along
        if np.linalg.norm(nearest - self._block) >= margin:
            return straight
        outward = self._gripper - self._block
        distance = max(float(np.linalg.norm(outward)), 1e-9)
        tangent = np.array([-outward[1], outward[0]]) / distance
        if tangent @ (target - self._block) < 0:
            tangent = -tangent
        # Half a step along the circle; a step too near or too far is drawn back to it.
        return tangent * STEP / 2 + outward / distance * (margin + 0.01 - distance)

    def _move(self, change: Array) -> None:
        for _ in range(SUBSTEPS):
            self._gripper = np.clip(self._gripper + change / SUBSTEPS, 0.0, 1.0)
            gap = self._block - self._gripper
            distance = float(np.linalg.norm(gap))
            if distance < CONTACT:
                direction = gap / distance if distance > 1e-9 else np.array([1.0, 0.0])
                self._block = np.clip(self._gripper + direction * CONTACT, HALF, 1.0 - HALF)

    def _distance(self) -> float:
        return float(np.linalg.norm(self._block - self._goal))

    def _observe(self, *, render: bool = True) -> Observation:
        if self._scene is None:
            raise ConfigurationError("reset the environment first")
        shown = self._info.cameras if render else ()
        images = {name: self._image(self._scene, name) for name in shown}
        return Observation(images, self._gripper.astype(np.float32), self._scene.task)

    def _image(self, scene: Scene, camera: str) -> Image:
        block = scene.blocks[0]
        at = (float(self._block[0]), float(self._block[1]))
        moved = Scene(
            blocks=(Block(block.color, block.shape, at, block.half),),
            target=0,
            gripper=scene.gripper,
            background=scene.background,
            texture=scene.texture,
            task=scene.task,
        )
        wrist = camera == "wrist"
        center = (float(self._gripper[0]), float(self._gripper[1])) if wrist else (0.5, 0.5)
        extent = WRIST_EXTENT if wrist else 1.0
        image = draw_table(moved, center, extent, self._size)
        axis = ((np.arange(self._size) + 0.5) / self._size - 0.5) * extent
        radius = np.hypot(
            axis[None, :] + center[0] - self._goal[0], axis[:, None] + center[1] - self._goal[1]
        )
        image[(radius > RING[0]) & (radius < RING[1])] = (250, 250, 250)
        hand = (0.5, 0.5) if wrist else (float(self._gripper[0]), float(self._gripper[1]))
        draw_gripper(image, hand, 0.0, 1 / extent)
        return image
