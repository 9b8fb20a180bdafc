"""Run one command so that it cannot outlive its supervisor.

    python -I -S child.py [--starts FILE] [--environment FILE] [--clear FILE]
                          [--wait HOST:PORT]... -- COMMAND...

Asks the kernel to kill this process when its parent dies (Linux), adds a byte to the file that
counts starts, adds the variables of a JSON file (so that secrets stay out of command lines and of
the supervisor's configuration), removes a stale ready file, waits until the named addresses accept
connections, and becomes COMMAND. Standard library only: it runs before, and without, the
environment of the command.
"""

import json
import os
import socket
import sys
import time

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_WAIT_S = 60.0


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent dies; kept across `exec`."""
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the request was in force: no signal would ever come.
        sys.exit(1)


def wait_for(address: str, deadline: float) -> bool:
    host, _, port = address.rpartition(":")
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            time.sleep(0.05)
    return False


def main(argv: list[str]) -> int:
    separator = argv.index("--")
    options, command = argv[:separator], argv[separator + 1 :]
    pairs = list(zip(options[::2], options[1::2], strict=True))
    die_with_parent()
    deadline = time.monotonic() + _WAIT_S
    for name, value in pairs:
        if name == "--starts":
            with open(value, "ab") as file:
                file.write(b".")
        if name == "--environment":
            with open(value, encoding="utf-8") as variables:
                os.environ.update(json.load(variables))
        if name == "--clear" and os.path.exists(value):
            os.unlink(value)
        if name == "--wait" and not wait_for(value, deadline):
            print(f"gave up: {value} does not accept connections", file=sys.stderr)
            return 1
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
