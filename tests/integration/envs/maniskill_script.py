"""What the tests look at in real ManiSkill, in one process: its first picture takes long."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from vla_platform.envs.harnesses import open_session
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.policies import ExpertPolicy
from vla_platform.envs.rollout import rollout
from vla_platform.envs.rollout_messages import RolloutConfig
from vla_platform.envs.sessions import EnvironmentRequest, Session
from vla_platform.errors import ConfigurationError, SimulatorError
from vla_storage.payloads import MemoryPayloadStore

EXPERT = {"control_mode": "pd_ee_delta_pose", "observations": "state"}


def session(name: str, **options: Any) -> Session:
    env_id = f"maniskill/{name}"
    return open_session(EnvironmentRequest(env_id=env_id, options=options, expert=True))


def solve(one: Session, seed: int) -> tuple[bool, int, str]:
    seen = one.reset(seed)
    digest, count = hashlib.sha256(seen.state.tobytes()), 0
    while True:
        assert seen.expert_action is not None
        outcome = one.step(seen.expert_action[None])
        seen = outcome.observation
        count += 1
        digest.update(seen.state.tobytes() + outcome.rewards.tobytes())
        if outcome.done:
            return outcome.success, count, digest.hexdigest()


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    push, pick = session("PushCube-v1", **EXPERT), session("PickCube-v1", **EXPERT)
    found["push"] = [solve(push, seed)[0] for seed in range(20)]
    found["pick"] = [solve(pick, seed)[0] for seed in range(20)]
    found["state_dim"] = len(push.info.state_names)
    same = session("PushCube-v1", **EXPERT, repeatable=True)
    runs = [solve(same, 5)[2], solve(same, 3)[2], solve(same, 5)[2]]
    found["deterministic"] = runs[0] == runs[2]
    both = session("PushCube-v1", **{**EXPERT, "observations": "rgb+state"}, image_size=64)
    robot = session("PushCube-v1", **{**EXPERT, "observations": "rgb"}, image_size=64)
    seen = {name: one.reset(5) for name, one in
            (("state", push), ("rgb+state", both), ("rgb", robot))}  # fmt: skip
    found["observations"] = {
        "state_names": both.info.state_names == push.info.state_names,
        "equal_states": np.array_equal(seen["rgb+state"].state, seen["state"].state),
        "equal_pictures": np.array_equal(
            seen["rgb+state"].images["base_camera"], seen["rgb"].images["base_camera"]
        ),
        "state_dims": [len(seen[name].state) for name in ("state", "rgb+state", "rgb")],
        "cameras": [sorted(seen[name].images) for name in ("state", "rgb+state", "rgb")],
    }
    found["starts"] = len({push.reset(seed).state.tobytes() for seed in range(20)})
    push.reset(1)
    found["truncates"] = [
        (one.terminated, one.truncated, one.num_steps)
        for one in [push.step(np.zeros((50, 7), np.float32))]
    ]
    sparse = session("PushCube-v1", **EXPERT, reward_mode="sparse")
    sparse.reset(0)
    found["sparse_rewards"] = sparse.step(np.zeros((2, 7), np.float32)).rewards.tolist()
    try:
        open_session(EnvironmentRequest(env_id="maniskill/StackPyramid-v1",
                                        options={"reward_mode": "dense"})).reset(0)  # fmt: skip
        found["no_dense_reward"] = "taken"
    except SimulatorError as error:
        found["no_dense_reward"] = error.details["failure"]
    try:
        open_session(EnvironmentRequest(env_id="gymnasium/CartPole-v1"))
    except ConfigurationError as error:
        found["other_simulator"] = error.message
    host = EnvironmentHost()
    payloads = MemoryPayloadStore()
    asked = RolloutConfig(
        tenant="a", policy_key="a/p", partition_id="p1", env_id="maniskill/PushCube-v1",
        cameras=("base_camera",), image_size=64, chunk=1,
        env_options={"control_mode": "pd_ee_delta_pose", "image_size": 64, "max_steps": 30},
    )  # fmt: skip
    report = rollout(asked, "j1", 2, 12, 1, host=host, policy=ExpertPolicy(), payloads=payloads)
    rows = payloads.get("p1", "a")
    host.shut_down()
    found["rollout"] = {
        "transitions": report.num_transitions,
        "success_rate": report.success_rate,
        "images": list(rows["images"].shape),
        "pictures": len({row.tobytes() for row in rows["images"]}),
        "brightness": float(rows["images"].mean()),
        "spread": float(rows["images"].std()),
    }
    return found


print(json.dumps(main()))
