"""A simulator outside the platform, behind its WebSocket protocol: msgpack, no pickle.

    python examples/external_simulator.py --port 8765 --token SECRET

Needs `websockets`, `msgpack` and `numpy`, and nothing of the platform: copy it and put your own
simulator in place of `Cart`. A tenant then opens

    platform.environment("external/cart", options={"url": "ws://HOST:8765", "token": "SECRET"})

once the operator has listed HOST:8765 in VLA_EXTERNAL_HOSTS.
"""

from __future__ import annotations

import argparse
import hmac
from typing import Any

import msgpack
import numpy as np
from websockets.sync.server import ServerConnection, serve

SIZE = 32


class Cart:
    """Push a cart on a line to the middle. One number of action, two of state, one picture."""

    max_steps = 40

    def info(self) -> dict[str, Any]:
        return {
            "t": "info",
            "cameras": [["side", [SIZE, SIZE]]],
            "state_names": ["position", "speed"],
            "action_names": ["force"],
            "action_low": np.array([-1], np.float32),
            "action_high": np.array([1], np.float32),
            "fps": 10.0,
            "max_steps": self.max_steps,
            "robot_type": "cart",
        }

    def reset(self, seed: int) -> dict[str, Any]:
        self.position = float(np.random.default_rng(seed).uniform(-1, 1))
        self.speed, self.steps = 0.0, 0
        return self.observe(render=True)

    def step(self, action: np.ndarray, *, render: bool) -> dict[str, Any]:
        self.speed = 0.8 * self.speed + 0.1 * float(action[0])
        self.position = min(1.0, max(-1.0, self.position + self.speed))
        self.steps += 1
        success = abs(self.position) < 0.05 and abs(self.speed) < 0.05
        truncated = not success and self.steps >= self.max_steps
        return {
            "observation": self.observe(render=render or success or truncated),
            "reward": -abs(self.position) / self.max_steps + success,
            "terminated": success,
            "truncated": truncated,
            "info": {"success": success},
        }

    def observe(self, *, render: bool) -> dict[str, Any]:
        picture = np.full((SIZE, SIZE, 3), 40, np.uint8)
        column = round((self.position + 1) / 2 * (SIZE - 5))
        picture[20:26, column : column + 5] = (220, 60, 40)
        return {
            "t": "observation",
            "images": {"side": picture} if render else {},
            "state": np.array([self.position, self.speed], np.float32),
            "task": "push the cart to the middle",
        }


def pack(value: Any) -> Any:
    """Arrays as extension type 1: length of the header, header `[dtype, shape]`, bytes."""
    if isinstance(value, np.ndarray):
        header = msgpack.packb([value.dtype.newbyteorder("<").str, list(value.shape)])
        data = np.ascontiguousarray(value).tobytes()
        return msgpack.ExtType(1, bytes([len(header)]) + header + data)
    raise TypeError(f"{type(value)} cannot be sent")


def unpack(code: int, raw: bytes) -> np.ndarray:
    start = 1 + raw[0]
    dtype, shape = msgpack.unpackb(raw[1:start])
    return np.frombuffer(raw, np.dtype(dtype), offset=start).reshape(shape)


def serve_one(connection: ServerConnection, token: str) -> None:
    """One connection, one environment, until it is closed."""
    cart = Cart()
    opened = False
    for raw in connection:
        message = msgpack.unpackb(raw, ext_hook=unpack)
        arguments, reply = message["arguments"], {"call": message["call"]}
        try:
            if message["op"] == "open":
                if not hmac.compare_digest(arguments["token"].encode(), token.encode()):
                    raise PermissionError("wrong token")
                opened = True
                reply["result"] = cart.info()
            elif not opened:
                raise PermissionError("open first")
            elif message["op"] == "reset":
                reply["result"] = cart.reset(arguments["seed"])
            elif message["op"] == "step":
                reply["result"] = cart.step(arguments["action"], render=arguments["render"])
            else:
                return
        except Exception as error:
            reply["error"] = {"code": type(error).__name__, "message": str(error)}
        connection.send(msgpack.packb(reply, default=pack))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--token", default="")
    given = parser.parse_args()
    with serve(
        lambda connection: serve_one(connection, given.token), given.host, given.port
    ) as server:
        print(f"listening on {given.host}:{server.socket.getsockname()[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
