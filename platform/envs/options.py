"""What a tenant may ask of each harness: closed schemas, plain values only (B19).

Admission validates against these without importing a simulator.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vla_platform.specs import Float, Int, Spec

ImageSize = Annotated[Int, Field(ge=16, le=1024, multiple_of=2)]
MaxSteps = Annotated[Int, Field(ge=1, le=10_000)]
Sentence = Annotated[str, Field(min_length=1, max_length=256)]
Scalar = bool | int | float


class TabletopOptions(Spec):
    """`tabletop/reach` and `tabletop/push`."""

    cameras: tuple[Literal["top", "wrist"], ...] = Field(("top", "wrist"), min_length=1)
    gripper: bool = Field(True, description="reach only: the block must be grasped as well")
    image_size: ImageSize = 128
    max_steps: MaxSteps | None = None
    sentences: tuple[Sentence, ...] = Field((), max_length=64)
    render: bool = True
    reward: Literal["sparse", "dense"] = Field(
        "sparse", description="reach only: dense adds the way gained towards the block"
    )
    reach_radius: Float = Field(
        0.035,
        ge=0.005,
        le=0.5,
        description="reach only: distance to the block's centre, in widths of the table, that "
        "counts as reached; blocks measure 0.08 to 0.12",
    )


class ManiSkillOptions(Spec):
    """`maniskill/<task>`."""

    observations: Literal["state", "rgb", "rgb+state"] = Field(
        "rgb",
        description="rgb: pictures and the robot's own state; state: the task's full state, with "
        "the poses of its objects; rgb+state: pictures and the task's full state",
    )
    control_mode: (
        Literal[
            "pd_joint_delta_pos",
            "pd_joint_pos",
            "pd_ee_delta_pos",
            "pd_ee_delta_pose",
            "pd_ee_pose",
        ]
        | None
    ) = Field(None, description="default: the task's own")
    reward_mode: Literal["normalized_dense", "dense", "sparse"] | None = None
    image_size: ImageSize = 128
    max_steps: MaxSteps | None = None
    backend: Literal["cpu", "gpu"] = "cpu"
    repeatable: bool = Field(
        False, description="build the scene anew at each reset (0.3 s): episodes repeat bit for bit"
    )


class LiberoOptions(Spec):
    """`libero/<suite>/<task number>`."""

    cameras: tuple[Literal["agentview", "robot0_eye_in_hand"], ...] = (
        "agentview",
        "robot0_eye_in_hand",
    )
    image_size: ImageSize = 128
    max_steps: MaxSteps | None = Field(None, description="default: the suite's own limit")
    settle_steps: Int = Field(10, ge=0, le=100, description="idle steps after an init state")


class GymnasiumOptions(Spec):
    """`gymnasium/<id>`; the id must be registered by an installed package."""

    camera: bool = Field(False, description="give the rendered picture as camera `main`")
    image_size: ImageSize = 128
    task: str = Field("", max_length=1024, description="the instruction text")
    max_steps: MaxSteps | None = None
    success_return: Float | None = Field(
        None, description="an episode whose return reaches this is a success"
    )
    arguments: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], Scalar] = Field(
        default_factory=dict, max_length=16, description="numbers for the environment's own maker"
    )


class ExternalOptions(Spec):
    """`external/<name>`: a simulator that the tenant runs; see `vla_platform.envs.external`."""

    url: str = Field(max_length=512, pattern=r"^wss?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?(/[\w\-./]*)?$")
    token: str = Field("", max_length=256)
    timeout_s: Float = Field(30.0, gt=0.0, le=600.0)
