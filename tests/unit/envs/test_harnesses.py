"""Which environments and options are taken, before any simulator is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from vla_platform.envs.harnesses import check_request
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import SpecError


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("maniskill/PushCub-v1", "PushCube-v1"),
        ("maniskill/RoboCasaKitchen-v1", ""),  # wants a download
        ("libero/libero_spatial/10", "libero_spatial/1"),
        ("libero/libero_spatial/-1", ""),
        ("libero/libero_spatial", ""),
        ("tabletop/reech", "reach"),
        ("manyskill/PushCube-v1", "maniskill"),
        ("PushCube-v1", ""),
        ("gymnasium/os:system", ""),
        ("gymnasium/../x", ""),
        ("external/../x", ""),
        ("", ""),
    ],
)
def test_b18_unknown_environments_are_refused_with_the_nearest(env_id: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_request(EnvironmentRequest(env_id=env_id))
    assert caught.value.details["problems"][0]["field"] == "env_id"
    assert hint in caught.value.message


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("maniskill/PushCube-v1", {"control_mode": "pd_everything"}),
        ("maniskill/PushCube-v1", {"__class__": "os.system"}),
        ("maniskill/PushCube-v1", {"image_size": True}),
        ("maniskill/PushCube-v1", {"observations": "depth"}),
        ("tabletop/reach", {"cameras": ["../../etc/passwd"]}),
        ("tabletop/reach", {"max_steps": 0}),
        ("gymnasium/CartPole-v1", {"arguments": {"render_mode": "human"}}),
        ("gymnasium/CartPole-v1", {"arguments": {"__init__": 1}}),
        ("external/mine", {"url": "file:///etc/passwd"}),
        ("external/mine", {"url": "ws://host/..%2f"}),
        ("external/mine", {}),
        ("tabletop/reach", {"max_steps": len}),
        ("libero/libero_goal/0", {"settle_steps": float("nan")}),
    ],
)
def test_b19_options_are_an_allow_list_of_plain_values(
    env_id: str, options: dict[str, Any]
) -> None:
    with pytest.raises(SpecError):
        check_request(EnvironmentRequest(env_id=env_id, options=options))


def test_admission_imports_no_simulator() -> None:
    code = (
        "import sys\n"
        "from vla_platform.envs.harnesses import check_request\n"
        "from vla_platform.envs.sessions import EnvironmentRequest\n"
        "check_request(EnvironmentRequest(env_id='maniskill/PickCube-v1'))\n"
        "check_request(EnvironmentRequest(env_id='libero/libero_90/89'))\n"
        "print({'torch', 'mani_skill', 'libero', 'gymnasium', 'av'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_one_process_serves_one_simulator() -> None:
    code = (
        "from vla_platform.envs import harnesses\n"
        "from vla_platform.envs.sessions import EnvironmentRequest\n"
        "harnesses.open_session(EnvironmentRequest(env_id='tabletop/push'))\n"
        "harnesses.open_session(EnvironmentRequest(env_id='gymnasium/CartPole-v1'))\n"
        "harnesses.open_session(EnvironmentRequest(env_id='tabletop/push'))\n"
        "try:\n"
        "    harnesses.open_session(EnvironmentRequest(env_id='maniskill/PickCube-v1'))\n"
        "except Exception as error:\n"
        "    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "this process serves gymnasium; maniskill needs another"
