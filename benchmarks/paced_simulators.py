"""A simulator that runs elsewhere and takes its time: the built-in task behind the platform's
WebSocket protocol, one action every 1/HZ seconds, like a robot or a simulator in real time.

    python benchmarks/paced_simulators.py PORT reach|push HZ

Prints `listening` once it takes connections; one connection is one environment.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from vla_platform.envs import wire
from vla_platform.envs.base import Environment
from vla_platform.envs.tabletop import Tabletop
from vla_platform.envs.tabletop_push import TabletopPush

MAX_STEPS = 64


def make(name: str) -> Environment:
    if name == "push":
        return TabletopPush(max_steps=MAX_STEPS)
    return Tabletop(max_steps=MAX_STEPS, dense=True)


def serve_one(connection: ServerConnection, env: Environment, period_s: float) -> None:
    with contextlib.suppress(ConnectionClosed):
        for raw in connection:
            due = time.monotonic() + period_s
            assert isinstance(raw, bytes)
            message = wire.decode(raw)
            result = answer(env, message["op"], message["arguments"])
            if message["op"] == "step":
                time.sleep(max(0.0, due - time.monotonic()))
            connection.send(wire.encode({"call": message["call"], "result": result}))


def answer(env: Environment, op: str, arguments: dict[str, Any]) -> Any:
    if op == "open":
        return env.info
    if op == "reset":
        return env.reset(arguments["seed"])
    step = env.step(arguments["action"], render=arguments["render"])
    return {
        "observation": step.observation,
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": step.info,
    }


def main() -> None:
    port, name, hz = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    with serve(
        lambda connection: serve_one(connection, make(name), 1 / hz), "127.0.0.1", port
    ) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
