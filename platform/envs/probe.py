"""Play a random and a scripted episode and say what was found; `vla env check` starts it.

python -m vla_platform.envs.probe ENV_ID [--options JSON] [--picture PNG] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_platform.envs.base import Observation
from vla_platform.envs.harnesses import open_session
from vla_platform.envs.policies import RandomPolicy
from vla_platform.envs.processes import resident_bytes
from vla_platform.envs.sessions import EnvironmentRequest, Session
from vla_platform.errors import ConfigurationError
from vla_storage.errors import CodedError


@dataclass(frozen=True, kw_only=True)
class Findings:
    env_id: str
    task: str
    cameras: dict[str, tuple[int, int]]
    state: tuple[str, ...]
    actions: tuple[str, ...]
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    max_steps: int
    can_snapshot: bool
    num_init_states: int
    make_s: float
    random_steps_per_s: float
    random_return: float
    expert_success: bool | None  # None: there is no scripted expert
    expert_steps: int
    memory_mb: int


def probe(
    env_id: str, *, options: dict[str, Any], picture: Path | None = None, steps: int = 100
) -> Findings:
    """Raises `SpecError` and `SimulatorError`."""
    started = time.monotonic()
    session = open_session(EnvironmentRequest(env_id=env_id, options=options))
    made_s = time.monotonic() - started
    info = session.info
    seen = session.reset(0)
    speed, total = _random_episode(session, steps)
    session.close()
    success, length, last = _expert_episode(env_id, options, seen)
    if picture is not None and last.images:
        _save(last, picture)
    return Findings(
        env_id=env_id,
        task=seen.task,
        cameras=dict(info.cameras),
        state=info.state_names,
        actions=info.action_names,
        action_low=tuple(info.action_low.tolist()),
        action_high=tuple(info.action_high.tolist()),
        max_steps=info.max_steps,
        can_snapshot=info.can_snapshot,
        num_init_states=info.num_init_states,
        make_s=round(made_s, 2),
        random_steps_per_s=round(speed, 1),
        random_return=round(total, 4),
        expert_success=success,
        expert_steps=length,
        memory_mb=resident_bytes(os.getpid()) >> 20,
    )


def _random_episode(session: Session, steps: int) -> tuple[float, float]:
    """Steps a second and the return."""
    policy = RandomPolicy(session.info)
    started, count, total = time.monotonic(), 0, 0.0
    seen = session.reset(1)
    while count < steps:
        drawn = policy.predict([seen], policy_key="", version=None, seed=count, timeout_s=1.0)
        outcome = session.step(drawn.actions[0])
        seen = outcome.observation
        count += 1
        total += float(outcome.rewards.sum())
        if outcome.done:
            break
    return count / (time.monotonic() - started), total


def _expert_episode(
    env_id: str, options: dict[str, Any], seen: Observation
) -> tuple[bool | None, int, Observation]:
    session = open_session(EnvironmentRequest(env_id=env_id, options=options, expert=True))
    try:
        seen = session.reset(0)
    except ConfigurationError:
        return None, 0, seen
    count = 0
    while True:
        assert seen.expert_action is not None  # the session asks for it
        outcome = session.step(seen.expert_action[None])
        seen = outcome.observation
        count += 1
        if outcome.done:
            session.close()
            return outcome.success, count, seen


def _save(seen: Observation, path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(list(seen.images.values()), axis=1)).save(path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="probe")
    parser.add_argument("env_id")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args(arguments)
    try:
        found = probe(given.env_id, options=given.options, picture=given.picture, steps=given.steps)
    except CodedError as error:
        print(json.dumps(error.to_dict(), default=str), file=sys.stderr)
        return 3
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
