"""Simulators behind the WebSocket protocol: the reference server, and ones that misbehave."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from vla_platform.envs import wire
from vla_platform.envs.base import Observation
from vla_platform.envs.failures import Failure, failure_of
from vla_platform.envs.harnesses import open_session
from vla_platform.envs.host import EnvironmentHost
from vla_platform.envs.sessions import EnvironmentRequest, Session
from vla_platform.envs.tabletop import Tabletop
from vla_platform.envs.turnstile import turnstile
from vla_platform.errors import ConfigurationError, SimulatorError


def session_on(place: str, **options: Any) -> Session:
    given = {"url": f"ws://{place}", "timeout_s": 5.0, **options}
    return open_session(EnvironmentRequest(env_id="external/cart", options=given))


@pytest.fixture
def reference(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the example server, in a process of its own."""
    command = [sys.executable, str(repository / "examples" / "external_simulator.py")]
    with subprocess.Popen(
        [*command, "--port", "0", "--token", "secret"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        place = process.stdout.readline().split()[-1]
        monkeypatch.setenv("VLA_EXTERNAL_HOSTS", place)
        yield place
        process.kill()


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Servers whose every answer is given."""
    servers = []

    def start(*answers: Any) -> str:
        def answer(connection: ServerConnection) -> None:
            for reply in answers:
                message = msgpack.unpackb(connection.recv(), ext_hook=lambda code, raw: None)
                if reply is None:
                    connection.recv(timeout=20)
                raw = reply if isinstance(reply, bytes) else msgpack.packb(
                    {"call": message["call"], **reply})  # fmt: skip
                connection.send(raw)

        server = serve(answer, "127.0.0.1", 0)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        place = f"127.0.0.1:{server.socket.getsockname()[1]}"
        monkeypatch.setenv("VLA_EXTERNAL_HOSTS", place)
        return place

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(5)


def test_the_reference_server_is_played_to_its_end(reference: str) -> None:
    session = session_on(reference, token="secret")
    assert dict(session.info.cameras) == {"side": (32, 32)}
    first = session.reset(7)
    same = session.reset(7)
    np.testing.assert_array_equal(first.images["side"], same.images["side"])
    seen, count = same, 0
    while True:
        force = np.clip(-2 * seen.state[:1] - 6 * seen.state[1:], -1, 1).astype(np.float32)
        outcome = session.step(np.tile(force, (2, 1)))
        seen, count = outcome.observation, count + outcome.num_steps
        if outcome.done:
            break
    assert outcome.success and count < 40
    assert seen.task == "push the cart to the middle"
    session.close()


def test_a_wrong_token_is_refused_by_the_server(reference: str) -> None:
    with pytest.raises(SimulatorError, match="wrong token"):
        session_on(reference, token="guess")


def test_b19_only_hosts_of_the_operators_list_are_connected_to() -> None:
    for place in ("127.0.0.1:1", "localhost:22", "169.254.169.254"):
        with pytest.raises(ConfigurationError, match="VLA_EXTERNAL_HOSTS"):
            session_on(place)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_EXTERNAL_HOSTS", "127.0.0.1:1")
    with pytest.raises(SimulatorError) as caught:
        session_on("127.0.0.1:1")
    assert failure_of(caught.value) == Failure.NOT_BUILT


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"\x80\x04N.", Failure.BAD_OUTPUT),
        ({"result": {"no": "info"}}, Failure.BAD_OUTPUT),
        ({"call": 99, "result": None}, Failure.BAD_OUTPUT),
        ({"error": {"code": "x", "message": "no\nsuch\x1b[0m"}}, Failure.RAISED),
    ],
)
def test_b73_bad_answers_are_named(
    serving: Callable[..., str], answer: Any, failure: Failure
) -> None:
    with pytest.raises(SimulatorError) as caught:
        session_on(serving(answer))
    assert failure == failure_of(caught.value)
    assert "\x1b" not in caught.value.message


def test_f50_a_silent_server_is_given_up(serving: Callable[..., str]) -> None:
    with pytest.raises(SimulatorError) as caught:
        session_on(serving(None), timeout_s=0.5)
    assert failure_of(caught.value) == Failure.HUNG


def test_sessions_that_wait_for_other_machines_do_not_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer comes once all have asked: none may wait for another's to return."""
    monkeypatch.setattr(turnstile, "_grace_s", 60.0)
    together = threading.Barrier(4)
    env = Tabletop(image_size=16)

    def answer(connection: ServerConnection) -> None:
        for raw in connection:
            assert isinstance(raw, bytes)
            message = wire.decode(raw)
            if message["op"] == "reset":
                together.wait(10)
            seen = env.info if message["op"] == "open" else env.reset(3)
            connection.send(wire.encode({"call": message["call"], "result": seen}))

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.socket.getsockname()[1]}"
        monkeypatch.setenv("VLA_EXTERNAL_HOSTS", place)
        request = EnvironmentRequest(env_id="external/x", options={"url": f"ws://{place}"})
        host = EnvironmentHost()
        names = [host.call(host.open("a", request)).result(20)[0] for _ in range(4)]
        resets = [(name, 3, None) for name in names]
        seen = host.call(host.batch_reset("a", resets)).result(20)
        assert [type(one) for one in seen] == [Observation] * 4
        host.shut_down()
        server.shutdown()
