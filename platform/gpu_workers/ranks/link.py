"""What passes between rank 0 and a follower beside gradients: metadata, one message at a time."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vla_platform.errors import RankLostError
from vla_platform.gpu_workers.ranks.commands import Command
from vla_platform.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Rank 0: become a rank."""

    rank: int
    num_ranks: int
    device: str
    settings: Settings


@dataclass(frozen=True)
class Loaded:
    """Follower: the base models are there. Digests by name."""

    digests: dict[str, str]


@dataclass(frozen=True)
class Meet:
    """Rank 0: all have loaded. The folder is where the process group finds together."""

    folder: Path


@dataclass(frozen=True)
class Do:
    """Rank 0: a command for the policies on one base model."""

    base_model: str
    command: Command


@dataclass(frozen=True)
class Told:
    """Either, within a command: what was to be exchanged; from rank 0, what all have told."""

    value: Any


@dataclass(frozen=True)
class Done:
    """Follower: a command is through."""

    answer: Any


class Link:
    """One end of the connection between rank 0 and a follower."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Raises `RankLostError` where the other end is gone."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise RankLostError(f"a rank is gone: {error}") from error

    def receive(self, kind: type[Any], *, timeout_s: float | None) -> Any:
        """The next message, which has to be of this kind. Raises `RankLostError`."""
        try:
            if not self._connection.poll(timeout_s):
                raise RankLostError(f"a rank has been silent for {timeout_s:g} s")
            message = self._connection.recv()
        except (OSError, EOFError) as error:
            raise RankLostError(f"a rank is gone: {error!r}") from error
        if not isinstance(message, kind):
            raise RankLostError(f"the ranks are out of step: {message!r} in place of {kind}")
        return message

    def close(self) -> None:
        self._connection.close()
