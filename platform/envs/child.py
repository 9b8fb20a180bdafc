"""The child process of `processes`: many sessions, each on a thread of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from vla_platform.envs import wire
from vla_platform.envs.failures import Failure, printable
from vla_platform.envs.harnesses import load_plugins
from vla_platform.envs.runners import Call, Op, SessionThread
from vla_platform.errors import SimulatorError
from vla_platform.stack.child import die_with_parent
from vla_storage.errors import CodedError

HOLD_S = 0.02


class Server:
    """Replies wait until no call is under way, or `HOLD_S`, and go together in one message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sessions: dict[str, SessionThread] = {}
        self._lock = threading.Lock()
        self._num_running = 0
        self._replies: list[list[Any]] = []
        self._wake = threading.Event()
        threading.Thread(target=self._send_late, name="late-replies", daemon=True).start()

    def run(self) -> None:
        """Until the parent closes its end."""
        while True:
            try:
                message = wire.decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            with self._lock:
                self._num_running += len(message["calls"])
            for session, number, op, arguments in message["calls"]:
                self._take(session, number, Op(op), arguments)

    def _take(self, name: str, number: int, op: Op, arguments: dict[str, Any]) -> None:
        thread = self._sessions.get(name)
        if thread is None:
            thread = self._sessions[name] = SessionThread(name)
        if op is Op.CLOSE:
            del self._sessions[name]

        def done(result: Any, error: BaseException | None) -> None:
            reply = [number, result, None if error is None else _coded(error)]
            with self._lock:
                self._replies.append(reply)
                self._num_running -= 1
                if self._num_running == 0:
                    self._send()
                    return
            self._wake.set()

        thread.submit(Call(op, arguments, done))

    def _send(self) -> None:
        replies, self._replies = self._replies, []
        self._connection.send_bytes(wire.encode({"replies": replies}))

    def _send_late(self) -> None:
        """What is done beside a call that takes long."""
        while self._wake.wait():
            time.sleep(HOLD_S)
            with self._lock:
                self._wake.clear()
                if self._replies:
                    self._send()


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
