"""The stack's plain functions: ports, secrets, users, configuration, the exec wrapper."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vla_platform.stack import ports
from vla_platform.stack.credentials import load_or_create, signing_key_file, user_of, write_acl
from vla_platform.stack.layout import as_user
from vla_platform.stack.roles import ROLES
from vla_platform.stack.servers import guarded


def test_ports_are_free_distinct_and_kept() -> None:
    names = [f"n{i}" for i in range(40)]
    chosen = ports.free_ports(names)

    assert len(set(chosen.values())) == 40
    assert all(ports.is_free(port) for port in chosen.values())
    assert chosen == ports.free_ports(names, previous=chosen)


def test_a_port_that_is_taken_is_chosen_anew() -> None:
    chosen = ports.free_ports(["a", "b"])
    with socket.create_server((ports.LOOPBACK, chosen["a"])):
        again = ports.free_ports(["a", "b"], previous=chosen)

    assert chosen["a"] != again["a"]
    assert chosen["b"] == again["b"]


def test_secrets_are_made_once_and_grow_with_the_roles(tmp_path: Path) -> None:
    first = load_or_create(tmp_path, ["gpu"])
    second = load_or_create(tmp_path, ["gpu", "beat"])

    assert first.redis.items() <= second.redis.items()
    assert {user_of(name) for name in ("admin", "gpu", "beat")} == set(second.redis)
    assert first.s3_secret_key == second.s3_secret_key
    assert signing_key_file(tmp_path).read_text() == signing_key_file(tmp_path).read_text()
    assert (tmp_path / "credentials.json").stat().st_mode & 0o777 == 0o600


def test_the_acl_keeps_users_of_others_and_no_password(tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    path.write_text("user default on nopass ~* +@all\nuser tenant on #00 ~t:* +get\n\n")
    write_acl(path, {user_of("admin"): "secret", user_of("gpu"): "other"})
    lines = path.read_text().splitlines()

    assert "user default off" in lines
    assert "user tenant on #00 ~t:* +get" in lines
    assert [line.split()[1] for line in lines] == ["default", "role.admin", "role.gpu", "tenant"]
    assert "secret" not in path.read_text()


def test_a_url_gets_another_user() -> None:
    assert as_user("redis://admin:x@h:1/0", "gpu", "p/w") == "redis://gpu:p%2Fw@h:1/0"


def test_roles_are_distinct_and_take_one_environment() -> None:
    environment = {"VLA_PORT": "1"}
    names = [role.name for role in ROLES]

    assert len(names) == len(set(names))
    assert all(role.command(environment)[0] == sys.executable for role in ROLES)
    assert not any("basic" in part for role in ROLES for part in role.command(environment))


class TestChild:
    def test_it_becomes_the_command_with_the_files_variables(self, tmp_path: Path) -> None:
        variables, stale = tmp_path / "env.json", tmp_path / "ready"
        variables.write_text(json.dumps({"SECRET": "s3cr3t"}))
        stale.touch()
        code = "import os; print(os.environ['SECRET'])"
        command = guarded(
            (sys.executable, "-c", code), "--environment", str(variables), "--clear", str(stale)
        )
        done = subprocess.run(command, capture_output=True, text=True, check=True)

        assert done.stdout == "s3cr3t\n"
        assert not stale.exists()

    def test_it_waits_for_addresses(self) -> None:
        (port,) = ports.free_ports(["x"]).values()
        command = guarded((sys.executable, "-c", "print('on')"), "--wait", f"127.0.0.1:{port}")
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child,
            socket.create_server((ports.LOOPBACK, port)),
        ):
            output, _ = child.communicate(timeout=20)
        assert output == "on\n"

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
    def test_it_dies_with_its_parent(self) -> None:
        grandchild = guarded((sys.executable, "-c", "print('up', flush=True); input()"))
        code = (
            "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); "
            "print(child.pid, flush=True); child.wait()"
        )
        with subprocess.Popen(
            (sys.executable, "-c", code, *grandchild),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdout is not None
            lines = {parent.stdout.readline().strip() for _ in range(2)}
            parent.kill()
            parent.wait(10)
            # The pipe ends when the last process that holds it is gone.
            started = time.monotonic()
            rest = parent.stdout.read()

        assert "up" in lines
        assert (rest, time.monotonic() - started < 10) == ("", True)
