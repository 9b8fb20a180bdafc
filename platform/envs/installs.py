"""Python environments of harnesses whose dependencies clash with the platform's.

    <var>/envs/<harness>/       made from `locks/<harness>*.txt`, without resolving anything
    <var>/envs/<harness>/.lock  digest of the locks it was made from

The platform's own code is linked into it, so that both always run the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vla_platform.errors import ConfigurationError

TORCH = "torch==2.13.0"
_LOCKS = Path(__file__).parent / "locks"
_PACKAGES = ("vla_platform", "vla_storage")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one harness's environment is made."""

    harness: str
    probe: str  # the module whose presence shows that an interpreter can serve the harness
    torch: bool = False  # installed first: alone it would be drawn in as a larger build

    @property
    def locks(self) -> tuple[Path, ...]:
        return tuple(sorted(_LOCKS.glob(f"{self.harness}*.txt")))

    @property
    def system_script(self) -> Path:
        """What Debian lacks, as a shell script for root."""
        return _LOCKS / f"{self.harness}.debian.sh"

    @property
    def digest(self) -> str:
        content = b"".join(path.read_bytes() for path in self.locks)
        version = f"{sys.version_info[:2]}{TORCH if self.torch else ''}".encode()
        return hashlib.sha256(content + version).hexdigest()


RECIPES = {
    "maniskill": Recipe(harness="maniskill", probe="mani_skill", torch=True),
    "libero": Recipe(harness="libero", probe="libero"),
}
Say = Callable[[str], None]


def install(harness: str, var: Path, *, say: Say = print, system_packages: bool = False) -> Path:
    """Make or renew the environment; returns its interpreter. One that fits is kept.

    `system_packages` installs what Debian lacks (root only). Raises `ConfigurationError` with the
    end of what pip said.
    """
    recipe = _recipe(harness)
    if system_packages:
        say(f"{harness}: system packages")
        _run(("sh", str(recipe.system_script)))
    with _locked(var):
        ready = installed(harness, var)
        if ready is not None:
            _link_code(ready)
            return ready
        target = _folder(harness, var)
        shutil.rmtree(target, ignore_errors=True)
        # No ensurepip: Debian's Python has none. The pip of this environment fills the other.
        venv.create(target, with_pip=False, symlinks=True)
        python = target / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
        if recipe.torch:
            say(f"{harness}: {TORCH}")
            _run((*pip, TORCH))
        for lock in recipe.locks:
            say(f"{harness}: {lock.name}")
            _run((*pip, "--no-deps", "-r", str(lock)))
        _link_code(python)
        (target / ".lock").write_text(recipe.digest)
    return python


def installed(harness: str, var: Path) -> Path | None:
    """The interpreter of an environment that fits the locks, or None."""
    target = _folder(harness, var)
    try:
        fits = (target / ".lock").read_text() == _recipe(harness).digest
    except FileNotFoundError:
        return None
    return target / "bin" / "python" if fits else None


def interpreter_for(harness: str, var: Path) -> Path:
    """Which Python serves a harness: its own environment, or this one where it can.

    Raises `ConfigurationError` naming the command that makes it.
    """
    if harness not in RECIPES:
        return Path(sys.executable)
    found = installed(harness, var)
    if found is not None:
        return found
    if importlib.util.find_spec(RECIPES[harness].probe) is not None:
        return Path(sys.executable)
    raise ConfigurationError(
        f"{harness} is not installed here; `vla env install {harness}` makes its environment"
    )


def _recipe(harness: str) -> Recipe:
    try:
        return RECIPES[harness]
    except KeyError:
        raise ConfigurationError(
            f"{harness} needs no environment of its own; those that do: {', '.join(RECIPES)}"
        ) from None


def _folder(harness: str, var: Path) -> Path:
    return var.resolve() / "envs" / harness


def _link_code(python: Path) -> None:
    packages = next((python.parent.parent / "lib").glob("python3*")) / "site-packages"
    import vla_storage

    folders = (Path(__file__).parent.parent, Path(vla_storage.__path__[0]))
    for name, folder in zip(_PACKAGES, folders, strict=True):
        link = packages / name
        link.unlink(missing_ok=True)
        link.symlink_to(folder, target_is_directory=True)


@contextlib.contextmanager
def _locked(var: Path) -> Iterator[None]:
    """Two installations at a time would spoil each other."""
    folder = var.resolve() / "envs"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".installing").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: tuple[str, ...]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise ConfigurationError(f"{' '.join(command[:6])} ...: {done.stdout[-2000:]}")
