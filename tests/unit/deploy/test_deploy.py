"""What `deploy/` holds is valid by its own tools, and starts what the stack starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from celery.utils.nodenames import host_format

from vla_platform.broker import environment_queues
from vla_platform.envs.installs import RECIPES, TORCH
from vla_platform.envs.worker import host_id_of
from vla_platform.settings import Settings
from vla_platform.stack.roles import ROLES
from vla_platform.stack.servers import redis_binary
from vla_storage.names import check_id


def compose(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / "deploy/compose/compose.yaml").read_text())
    return found


def queues_of(command: list[str]) -> set[str]:
    for flag in ("-Q", "--queues"):
        if flag in command:
            return set(command[command.index(flag) + 1].split(","))
    return set()


def charted(repository: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents that the chart becomes as `demo`."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(repository / "deploy/helm/vla-platform")) as chart:
        rendered = chart.render(values, name="demo", namespace="vla")
    return [one for text in rendered.values() for one in yaml.safe_load_all(text) if one]


def stack_queues() -> set[str]:
    found: set[str] = set()
    for role in ROLES:
        found |= queues_of(list(role.command({"VLA_PORT": "1"})))
    return found


def test_compose_holds_to_its_schema(repository: Path) -> None:
    pytest.importorskip("check_jsonschema")
    done = subprocess.run(
        (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
         str(repository / "deploy/compose/compose.yaml")),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_compose_starts_every_role_with_its_queues(repository: Path) -> None:
    services = compose(repository)["services"]
    assert {role.name for role in ROLES} <= set(services)
    served = {queue for one in services.values() for queue in queues_of(one.get("command", []))}
    host = set(environment_queues("tabletop"))
    assert served == stack_queues() | host
    known = {f"VLA_{name.upper()}" for name in Settings.model_fields}
    for service in services.values():
        variables = {name for name in service.get("environment", {}) if name.startswith("VLA_")}
        assert variables <= known
    volumes = compose(repository)["volumes"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            there = (repository / "deploy/compose" / source).exists() or "secrets/" in source
            assert source in volumes or there, volume
    for name in ("flower", "page", "grafana", "prometheus"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])


def test_every_variable_that_compose_asks_for_is_in_the_example(repository: Path) -> None:
    text = (repository / "deploy/compose/compose.yaml").read_text()
    asked = set(re.findall(r"\$\{(\w+)", text))
    example = (repository / "deploy/compose/.env.example").read_text()
    assert asked == {line.partition("=")[0] for line in example.splitlines()}


def hosts_of(command: list[str], machines: tuple[str, ...]) -> set[str]:
    """What environment hosts of one command on these machines (pods, containers) are called."""
    (name,) = [command[at + 1] for at, part in enumerate(command) if part in ("-n", "--hostname")]
    return {check_id("host", host_id_of(host_format(name, host=one))) for one in machines}


def test_replicas_of_an_environment_host_have_names_of_their_own(repository: Path) -> None:
    """They would take each other's calls."""
    machines = ("demo-env-tabletop-5d8f-abcde", "demo-env-tabletop-5d8f-fghij")
    services = compose(repository)["services"].values()
    commands = [one["command"] for one in services if "VLA_HARNESS" in one.get("environment", {})]
    commands += [
        one["spec"]["template"]["spec"]["containers"][0]["args"]
        for one in charted(repository, {})
        if one["metadata"]["name"].startswith("demo-env-")
    ]
    assert [len(hosts_of(command, machines)) for command in commands] == [2, 2]


@pytest.mark.parametrize("changes", [{}, {"autoscaling": True}, {"off": True}])
def test_the_chart_renders_to_valid_kubernetes(repository: Path, changes: dict[str, bool]) -> None:
    """Rendered by Helm's own engine, checked against Kubernetes' own schemas."""
    validate = pytest.importorskip("kubernetes_validate")
    values: dict[str, Any] = {
        "s3": {"endpoint": "http://s3:8333"},
        "settings": {"VLA_DEVICE": "cuda"},
    }
    if changes.get("autoscaling"):
        values["workers"] = {"training": {"autoscaling": {"enabled": True}}}
    if changes.get("off"):
        values |= {name: {"enabled": False} for name in ("flower", "page", "metrics")}
    documents = charted(repository, values)
    kinds = [one["kind"] for one in documents]
    for one in documents:
        if not one["apiVersion"].startswith("keda.sh"):
            validate.validate(one, "1.31", strict=True)
    deployments = {one["metadata"]["name"]: one for one in documents if one["kind"] == "Deployment"}
    assert kinds.count("ScaledObject") == int(changes.get("autoscaling", False))
    assert ("demo-page" in deployments) is not changes.get("off", False)
    served: set[str] = set()
    known = {f"VLA_{name.upper()}" for name in Settings.model_fields} | {"FLOWER_BASIC_AUTH"}
    for one in deployments.values():
        (container,) = one["spec"]["template"]["spec"]["containers"]
        served |= queues_of(container["args"])
        assert {variable["name"] for variable in container["env"]} <= known
    assert served == stack_queues() | set(environment_queues("tabletop"))


@pytest.mark.parametrize("harness", sorted(RECIPES))
def test_an_image_of_a_harness_has_all_that_its_environment_has(
    repository: Path, tmp_path: Path, harness: str
) -> None:
    """What the Dockerfile runs, but for the installers that it starts, on a bare Python."""
    text = (repository / "deploy/images/harness.Dockerfile").read_text()
    (code,) = re.findall(r'python -c "(.*)"', text)
    code = code.replace("${HARNESS}", harness).replace("/opt/vla", str(tmp_path / "opt"))
    for package, folder in (("vla_platform", "platform"), ("vla_storage", "storage")):
        (tmp_path / package).symlink_to(repository / folder)
    only_say = (
        f"import subprocess, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "subprocess.run = lambda command, **_: ("
        "print(*command), subprocess.CompletedProcess(command, 0, ''))[1]; "
    )
    done = subprocess.run(
        (sys.executable, "-I", "-S", "-c", only_say + code),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recipe = RECIPES[harness]
    wanted = [recipe.system_script.name, *(lock.name for lock in recipe.locks)]
    wanted += [TORCH] if recipe.torch else []
    commands = [line.split("/")[-1].split()[-1] for line in done.stdout.splitlines() if "/" in line]
    assert set(wanted) <= set(commands)
    assert "PATH=/opt/vla/envs/${HARNESS}/bin:" in text


@pytest.mark.services
@pytest.mark.parametrize("name", ["control", "payload"])
def test_redis_takes_its_configuration(repository: Path, tmp_path: Path, name: str) -> None:
    text = (repository / f"deploy/redis/{name}.conf").read_text()
    acl = tmp_path / "users.acl"
    acl.write_text((repository / "deploy/redis/users.acl").read_text())
    here = text.replace("/etc/vla/users.acl", str(acl)).replace("bind 0.0.0.0", "bind 127.0.0.1")
    conf = tmp_path / "redis.conf"
    conf.write_text(f"{here}\nport 0\nunixsocket {tmp_path}/s\ndir {tmp_path}\n")
    process = subprocess.Popen(
        (str(redis_binary()), str(conf)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "ready to accept connections" in line.lower():
                break
        assert "ready to accept connections" in lines[-1].lower(), "".join(lines)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_systemd_takes_its_units(repository: Path, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd on this machine")
    for name in ("vla@.service", "vla.target"):
        text = (repository / "deploy/systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/vla/bin/python", "/bin/true"))
    done = subprocess.run(
        (tool, "verify", "--recursive-errors=no", str(tmp_path / "vla@control.service")),
        capture_output=True, text=True, check=False, env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    mine = [line for line in (done.stdout + done.stderr).splitlines() if "vla" in line]
    assert mine == []


def test_systemd_runs_what_the_stack_runs(repository: Path) -> None:
    for role in ("control", "sft", "gpu", "beat", "metrics", "page"):
        text = (repository / f"deploy/systemd/{role}.env").read_text()
        command = text.removeprefix("VLA_COMMAND=").split()
        (known,) = (one for one in ROLES if one.name == role)
        ours = list(known.command({"VLA_PORT": "1"}))[2:]
        assert command[0] == ours[0]
        assert queues_of(command) == queues_of(ours)


def test_grafana_finds_the_dashboard(repository: Path) -> None:
    folder = repository / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/vla.yml").read_text())["providers"]
    mounts = compose(repository)["services"]["grafana"]["volumes"]
    assert any(provider["options"]["path"] in mount for mount in mounts)
    assert json.loads((repository / "deploy/grafana/vla-platform.json").read_text())["uid"]
