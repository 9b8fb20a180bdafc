"""`vla env`, `vla demos`: simulators and demonstrations, each in its harness's interpreter."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_platform.cli.output import Format, Var, console, emit, table_of
from vla_platform.envs.harnesses import HARNESSES, check_request, split_id
from vla_platform.envs.installs import RECIPES, install, installed, interpreter_for
from vla_platform.envs.sessions import EnvironmentRequest
from vla_platform.errors import PlatformError, SimulatorError, SpecError, to_error

app = typer.Typer(no_args_is_help=True, help="Simulators: install, check, list.")

Options = Annotated[
    str, typer.Option("--options", help='JSON of the harness\'s options, such as {"image_size":64}')
]
SHOWN = {"tabletop": "tabletop/reach", "maniskill": "maniskill/PushCube-v1",
         "libero": "libero/libero_object/0", "gymnasium": "gymnasium/CartPole-v1"}  # fmt: skip
"""What `vla env check HARNESS` plays."""


@app.command("install")
def install_harness(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(RECIPES)}")],
    var: Var = Path("var"),
    system_packages: Annotated[
        bool,
        typer.Option(
            "--system-packages", help="also install the drivers that Debian 12 lacks (needs root)"
        ),
    ] = False,
) -> None:
    """Make the Python environment of a harness from its lock file."""
    python = install(name, var, say=console.print, system_packages=system_packages)
    console.print(f"{name} is ready: {python}")


@app.command("list")
def list_harnesses(var: Var = Path("var"), format: Format = "table") -> None:
    """The harnesses and where they run."""
    rows = [
        {
            "harness": name,
            "environments": len(harness.known) or "any",
            "installed": name not in RECIPES or installed(name, var) is not None,
        }
        for name, harness in HARNESSES.items()
    ]
    emit(rows, format, table_of(rows))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="a harness, or an environment: harness/name")],
    var: Var = Path("var"),
    options: Options = "{}",
    picture: Annotated[Path | None, typer.Option(help="where the picture goes")] = None,
    steps: Annotated[int, typer.Option(help="random steps at most", min=1)] = 100,
    format: Format = "table",
) -> None:
    """Play a random and a scripted episode: spaces, steps a second, memory, and a picture."""
    env_id = SHOWN.get(name, name)
    request = EnvironmentRequest(env_id=env_id, options=_parsed(options))
    harness, _, _ = check_request(request)
    target = picture or var / "checks" / f"{env_id.replace('/', '-')}.png"
    shown = _run(
        "vla_platform.envs.probe",
        [env_id, "--options", options, "--picture", str(target), "--steps", str(steps)],
        interpreter_for(harness.name, var),
    )
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    found["picture"] = str(target) if target.exists() else None
    emit(found, format, table_of([{"property": key, "value": found[key]} for key in found]))


def demos(
    name: Annotated[str, typer.Argument(help="an environment: harness/name")],
    out: Annotated[Path, typer.Option("--out", help="a new folder for the dataset")],
    episodes: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    options: Options = "{}",
    planner: Annotated[
        bool, typer.Option("--planner", help="the package's motion planner (ManiSkill)")
    ] = False,
    noise: Annotated[float, typer.Option(help="of the executed actions", min=0.0)] = 0.0,
    var: Var = Path("var"),
) -> None:
    """Record demonstrations of an expert as a LeRobot v3.0 dataset."""
    _parsed(options)
    harness, _ = split_id(name)
    if planner and harness.name != "maniskill":
        raise SpecError(f"{harness.name} has no motion planner; leave --planner out", problems=[])
    given = ["--episodes", str(episodes), "--seed", str(seed), "--options", options]
    given += ["--noise", str(noise), *(["--planner"] if planner else [])]
    python = interpreter_for(harness.name, var)
    _run("vla_platform.envs.demonstrate", [name, str(out.resolve()), *given], python)
    console.print(f"{episodes} episodes of {name} in {out}")


def _parsed(options: str) -> dict[str, Any]:
    try:
        found = json.loads(options)
    except json.JSONDecodeError as error:
        raise SpecError(f"--options is no JSON: {error}", problems=[]) from error
    if not isinstance(found, dict):
        raise SpecError("--options is a JSON object", problems=[])
    return found


def _run(module: str, arguments: Sequence[str], python: Path) -> str:
    """What the module prints. Raises the error that it reports."""
    done = subprocess.run(
        (str(python), "-m", module, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout
    last = (done.stderr.strip().splitlines() or [""])[-1]
    try:
        raise to_error(json.loads(last))
    except json.JSONDecodeError:
        if done.returncode < 0:
            raise SimulatorError(
                f"{arguments[0]}: the process ended with signal {-done.returncode}",
                env_id=arguments[0], failure="crashed",
            ) from None  # fmt: skip
        raise PlatformError(f"{module}: {done.stderr[-1000:]}") from None
