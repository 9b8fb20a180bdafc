"""Names of the environments of each harness, known without importing a simulator."""

from __future__ import annotations

import re

TABLETOP = ("reach", "push")

MANISKILL = (
    "DrawTriangle-v1",
    "Empty-v1",
    "FMBAssembly1Easy-v1",
    "LiftPegUpright-v1",
    "MS-AntRun-v1",
    "MS-AntWalk-v1",
    "MS-CartpoleBalance-v1",
    "MS-CartpoleSwingUp-v1",
    "MS-HopperHop-v1",
    "MS-HopperStand-v1",
    "MS-HumanoidRun-v1",
    "MS-HumanoidStand-v1",
    "MS-HumanoidWalk-v1",
    "PegInsertionSide-v1",
    "PickCube-v1",
    "PickCubeSO100-v1",
    "PlaceSphere-v1",
    "PlugCharger-v1",
    "PokeCube-v1",
    "PullCube-v1",
    "PullCubeTool-v1",
    "PushCube-v1",
    "PushT-v1",
    "RollBall-v1",
    "RotateSingleObjectInHandLevel0-v1",
    "RotateSingleObjectInHandLevel1-v1",
    "RotateValveLevel0-v1",
    "RotateValveLevel1-v1",
    "RotateValveLevel2-v1",
    "RotateValveLevel3-v1",
    "RotateValveLevel4-v1",
    "SO100GraspCube-v1",
    "StackCube-v1",
    "StackPyramid-v1",
    "TableTopFreeDraw-v1",
    "TriFingerRotateCubeLevel0-v1",
    "TriFingerRotateCubeLevel1-v1",
    "TriFingerRotateCubeLevel2-v1",
    "TriFingerRotateCubeLevel3-v1",
    "TriFingerRotateCubeLevel4-v1",
    "UnitreeG1PlaceAppleInBowl-v1",
    "UnitreeG1Stand-v1",
    "UnitreeG1TransportBox-v1",
)
"""The tasks whose assets the package brings and whose action is one box of numbers; the others
would ask on a terminal whether to download something (mani-skill 3.0.1)."""

LIBERO_SUITES = {
    "libero_spatial": 10,
    "libero_object": 10,
    "libero_goal": 10,
    "libero_10": 10,
    "libero_90": 90,
}
"""Suite to its number of tasks."""
LIBERO_INIT_STATES = 50

LIBERO = tuple(f"{suite}/{task}" for suite, count in LIBERO_SUITES.items() for task in range(count))

GYMNASIUM_NAME = re.compile(r"([A-Za-z0-9_\-]{1,64}/)?[A-Za-z0-9_.\-]{1,128}")
"""No colon: gymnasium would import the module before it."""
EXTERNAL_NAME = re.compile(r"[a-z0-9][a-z0-9\-]{0,62}")
