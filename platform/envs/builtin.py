"""The harness `tabletop`: environments without dependencies."""

from __future__ import annotations

from typing import Any

from vla_platform.envs.base import Environment
from vla_platform.envs.options import TabletopOptions
from vla_platform.envs.tabletop import Tabletop
from vla_platform.envs.tabletop_push import TabletopPush


def make(name: str, options: TabletopOptions) -> Environment:
    given: dict[str, Any] = {
        "cameras": options.cameras,
        "image_size": options.image_size,
        "render": options.render,
    }
    if options.sentences:
        given["sentences"] = options.sentences
    if options.max_steps is not None:
        given["max_steps"] = options.max_steps
    if name == "push":
        return TabletopPush(**given)
    return Tabletop(
        gripper=options.gripper,
        dense=options.reward == "dense",
        reach_radius=options.reach_radius,
        **given,
    )
