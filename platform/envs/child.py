"""The child process of `processes`: many sessions, each on a thread of its own."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from vla_platform.envs import wire
from vla_platform.envs.failures import Failure, printable
from vla_platform.envs.harnesses import load_plugins
from vla_platform.envs.runners import Op, SessionThread
from vla_platform.errors import SimulatorError
from vla_platform.stack.child import die_with_parent
from vla_storage.errors import CodedError


class Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._sessions: dict[str, SessionThread] = {}

    def run(self) -> None:
        """Until the parent closes its end."""
        while True:
            try:
                message = wire.decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        name, call, op = message["session"], message["call"], Op(message["op"])
        thread = self._sessions.get(name)
        if thread is None:
            thread = self._sessions[name] = SessionThread(name)
        if op is Op.CLOSE:
            del self._sessions[name]

        def done(result: Any, error: BaseException | None) -> None:
            self._send({"call": call, "result": result} if error is None else
                       {"call": call, "error": _coded(error)})  # fmt: skip

        thread.submit(op, message["arguments"], done)

    def _send(self, reply: dict[str, Any]) -> None:
        raw = wire.encode(reply)
        with self._sending:
            self._connection.send_bytes(raw)


def _coded(error: BaseException) -> CodedError:
    if isinstance(error, CodedError):
        return error
    return SimulatorError(
        f"{type(error).__name__}: {printable(error)}", failure=str(Failure.RAISED)
    )


def main(arguments: list[str]) -> None:
    die_with_parent()
    load_plugins(arguments[1:])
    Server(Connection(int(arguments[0]))).run()
    os._exit(0)  # sessions may hang; nobody waits for them


if __name__ == "__main__":
    main(sys.argv[1:])
