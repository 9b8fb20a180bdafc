"""Free loopback ports for the embedded servers."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

LOOPBACK = "127.0.0.1"
# Below the kernel's ephemeral range (32768 and up), so that an outgoing connection of some other
# process cannot take a port between the choice and the server's bind.
_FIRST, _LAST = 20000, 22700
# The workers of `weed mini` dial the admin port + 10000.
GRPC_OFFSET = 10000


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_ports(names: Iterable[str], *, previous: dict[str, int] | None = None) -> dict[str, int]:
    """One free port per name, none twice; `previous` choices are kept where they are still free.

    Each port's companion `port + 10000` is free too.
    """
    chosen: dict[str, int] = {}
    known = previous or {}
    for name in names:
        port = known.get(name, 0)
        while port in chosen.values() or not (
            port and is_free(port) and is_free(port + GRPC_OFFSET)
        ):
            port = random.SystemRandom().randint(_FIRST, _LAST)
            if port in known.values():
                port = 0  # a later name may keep that one
        chosen[name] = port
    return chosen
