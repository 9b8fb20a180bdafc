"""Rendered resets in one environment host, and its memory meanwhile: ENV_ID OPTIONS COUNT."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.processes import resident_bytes
from vla_platform.envs.sessions import EnvironmentRequest

EVERY = 25  # resets between two looks at the memory


def main(env_id: str, options: dict[str, Any], count: int) -> dict[str, Any]:
    host = EnvironmentHost()
    request = EnvironmentRequest(env_id=env_id, options=options)
    session, _ = host.call(host.open("a", request)).result(180)
    pictures, sizes = set(), []
    for seed in range(count):
        seen = host.call(host.reset("a", session, seed)).result(120)
        pictures |= {hashlib.sha256(image.tobytes()).digest() for image in seen.images.values()}
        if seed % EVERY == EVERY - 1:
            sizes.append(resident_bytes(os.getpid()))
    found = {"pictures": len(pictures), "cameras": len(seen.images), "sizes": sizes}
    host.shut_down()
    return found


print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
