"""Sessions in a child process: a simulator that crashes, hangs or leaks takes only it along.

    python -m vla_platform.envs.child FD PLUGINS

Calls go over a socket pair as messages of `wire`; nothing that the child sends is unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from vla_platform.envs import wire
from vla_platform.envs.failures import Failure
from vla_platform.envs.runners import Call, Done, Op, Runner
from vla_platform.errors import DataError, SimulatorError

_NO_REPLY = (KeyError, TypeError, ValueError)


class ChildProcess:
    """A process for sessions. Thread-safe."""

    def __init__(self, plugins: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", "vla_platform.envs.child", str(theirs.fileno()))
            # A session of its own: a signal to the host's group must not end it in mid-call.
            self._process = subprocess.Popen(
                (*command, *plugins),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._numbers = itertools.count()
        self._pending: dict[int, Done] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._why: Failure | None = None
        self.worn = False  # a thread in it hangs: no more sessions, and an end with the last one
        self._reader = threading.Thread(target=self._read, name="session-replies", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._reader.is_alive()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        """Resident memory; 0 once it has ended."""
        return resident_bytes(self._process.pid)

    def submit(self, calls: Sequence[tuple[str, Call]]) -> None:
        """Send calls of some sessions, named first, in one message."""
        entries = []
        with self._lock:
            for session, call in calls:
                number = next(self._numbers)
                self._pending[number] = call.done
                entries.append([session, number, str(call.op), dict(call.arguments)])
        try:
            with self._sending:
                self._connection.send_bytes(wire.encode({"calls": entries}))
        except OSError:
            self._fail_all()

    def kill(self, why: Failure = Failure.CRASHED) -> None:
        """End it at once; calls under way fail with `why`."""
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, DataError, *_NO_REPLY):
            while True:
                message = wire.decode(self._connection.recv_bytes(wire.MAX_BYTES))
                for number, result, error in message["replies"]:
                    with self._lock:
                        done = self._pending.pop(number, None)
                    if done is not None:
                        done(result, error)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it closed its end, or sent what is no message
        self._process.wait()
        self._connection.close()
        self._fail_all()

    def _fail_all(self) -> None:
        self._process.wait()
        with self._lock:
            lost, self._pending = self._pending, {}
        failure = self._why or Failure.CRASHED
        for done in lost.values():
            done(None, SimulatorError(
                f"the process of the session ended: {failure}, {_ending(self._process.returncode)}",
                failure=str(failure), ending=_ending(self._process.returncode),
            ))  # fmt: skip


class ProcessRunner(Runner):
    """One session of a child process. `alone`: the process ends with the session."""

    def __init__(self, child: ChildProcess, session: str, *, alone: bool) -> None:
        self.child = child
        self._session = session
        self._alone = alone

    def submit(self, call: Call) -> None:
        self.child.submit([(self._session, call)])

    @classmethod
    def submit_all(cls, calls: Sequence[tuple[ProcessRunner, Call]]) -> None:
        by_child: dict[ChildProcess, list[tuple[str, Call]]] = {}
        for runner, call in calls:
            by_child.setdefault(runner.child, []).append((runner._session, call))
        for child, of_child in by_child.items():
            child.submit(of_child)

    def abandon(self) -> None:
        if self._alone:
            self.child.kill()
        else:
            self.submit(Call(Op.CLOSE, {}, lambda result, error: None))

    @property
    def memory_bytes(self) -> int:
        return self.child.memory_bytes if self._alone else 0

    @property
    def usable(self) -> bool:
        return self.child.alive and not self.child.worn


def resident_bytes(pid: int) -> int:
    """Resident memory of a process from /proc; 0 where there is none."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-returncode).name
    return f"exit status {returncode}"
