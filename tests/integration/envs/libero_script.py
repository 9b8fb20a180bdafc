"""What the tests look at in real LIBERO."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

import numpy as np

from vla_platform.envs.evaluation import evaluate
from vla_platform.envs.harnesses import open_session
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.policies import ExpertPolicy
from vla_platform.envs.sessions import EnvironmentRequest, Session
from vla_platform.envs.suites import suite
from vla_storage.objects.memory import MemoryObjectStore


def session(task: str, **options: Any) -> Session:
    return open_session(EnvironmentRequest(env_id=f"libero/{task}", options=options, expert=True))


def play(one: Session, *, decisions: int = 3) -> str:
    seen = one.reset(3, {"init_state": 1})
    digest = hashlib.sha256(seen.state.tobytes())
    for _ in range(decisions):
        assert seen.expert_action is not None
        seen = one.step(np.tile(seen.expert_action, (4, 1))).observation
        digest.update(seen.state.tobytes())
        digest.update(b"".join(picture.tobytes() for picture in seen.images.values()))
    return digest.hexdigest()


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    soup = session("libero_object/0", cameras=["agentview"], image_size=64)
    found["init_states"] = soup.info.num_init_states
    found["starts"] = len({soup.reset(1, {"init_state": at}).state.tobytes() for at in range(5)})
    first = soup.reset(1, {"init_state": 0})
    found["task"] = first.task
    picture = first.images["agentview"].astype(float)
    # The basket stands on the right in this scene, the wall is above the table: upright.
    found["upright"] = float(picture[:12].mean() - picture[-12:].mean())
    solo = play(soup)
    found["deterministic"] = solo == play(soup)
    bowl = session("libero_spatial/0", cameras=["agentview"], image_size=64)
    play(bowl, decisions=1)
    found["beside_another_in_its_thread"] = solo == play(soup)
    elsewhere: list[str] = []
    thread = threading.Thread(
        target=lambda: elsewhere.append(
            play(session("libero_object/0", cameras=["agentview"], image_size=64))
        )
    )
    thread.start()
    thread.join()
    found["in_another_thread"] = [solo] == elsewhere
    for one in (soup, bowl):
        one.close()
    host = EnvironmentHost()
    record = evaluate(
        suite("libero/libero_object/0", episodes=2, options={"cameras": []}), ExpertPolicy(),
        evaluation_id="e1", tenant="a", policy_key="a/p", version=None, host=host,
        objects=MemoryObjectStore(), num_envs=2,
    )  # fmt: skip
    host.shut_down()
    found["evaluation"] = {
        "success_rate": record.success_rate,
        "init_states": [one.init_state for one in record.episodes],
    }
    return found


print(json.dumps(main()))
