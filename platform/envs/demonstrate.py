"""Make demonstrations in the harness's own interpreter; `vla demos` starts it.

python -m vla_platform.envs.demonstrate ENV_ID OUT --episodes N [--seed S] [--options JSON]
                                        [--planner] [--noise X]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_platform.datasets.recording import Plan, make_demonstrations
from vla_platform.envs.base import Environment
from vla_platform.envs.harnesses import make_environment
from vla_platform.envs.sessions import EnvironmentRequest
from vla_storage.errors import CodedError

DEFAULTS: dict[str, dict[str, Any]] = {"maniskill": {"control_mode": "pd_ee_delta_pose"}}
"""Options under which the scripted experts act."""


def demonstrate(
    env_id: str,
    out: Path,
    *,
    episodes: int,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    planner: bool = False,
    noise: float = 0.0,
) -> None:
    """Write `episodes` solved episodes as a LeRobot v3.0 dataset into the new folder `out`.

    Raises `SpecError`, `ConfigurationError` (no expert), `SimulatorError`, `DatasetError`.
    """
    harness, _, name = env_id.partition("/")
    given = {**DEFAULTS.get(harness, {}), **(options or {})}
    if planner:
        from vla_platform.envs.maniskill_planner import CONTROL_MODE, MAX_STEPS

        given = {"max_steps": MAX_STEPS, **(options or {}), "control_mode": CONTROL_MODE}
    env = make_environment(EnvironmentRequest(env_id=env_id, options=given))
    with env:
        make_demonstrations(
            out,
            env=env,
            episodes=episodes,
            seed=seed,
            noise=noise,
            plan=_planner(env, name) if planner else None,
            on_episode=lambda count: print(f"{count} of {episodes}", flush=True),
        )


def _planner(env: Environment, name: str) -> Plan:
    from vla_platform.envs.maniskill import ManiSkillEnvironment
    from vla_platform.envs.maniskill_planner import Planner

    assert isinstance(env, ManiSkillEnvironment)  # the control mode is one of its options
    return Planner(env, name)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="demonstrate")
    parser.add_argument("env_id")
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--planner", action="store_true")
    parser.add_argument("--noise", type=float, default=0.0)
    try:
        demonstrate(**vars(parser.parse_args(arguments)))
    except CodedError as error:
        print(json.dumps(error.to_dict(), default=str), file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
