"""The frame holds: names map to folders, layers point one way, tenants need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"vla_platform": ROOT / "platform", "vla_storage": ROOT / "storage"}


def test_platform_folder_never_hides_the_standard_library():
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_every_sub_package_is_listed_and_so_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"vla_platform"}
    for name, folder in FOLDERS.items():
        for init in folder.rglob("__init__.py"):
            parts = init.parent.relative_to(folder).parts
            found.add(".".join((name, *parts)))
    assert found == set(listed)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_storage_never_imports_the_platform():
    offenders = {
        str(path)
        for path in FOLDERS["vla_storage"].rglob("*.py")
        if any(name.split(".")[0] == "vla_platform" for name in imports_of(path))
    }
    assert set() == offenders


def test_only_gpu_workers_and_asset_scripts_import_torch():
    heavy = {"torch", "transformers", "accelerate"}
    allowed = {"gpu_workers", "assets"}
    offenders = {
        str(path)
        for folder in FOLDERS.values()
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0] not in allowed
        and any(name.split(".")[0] in heavy for name in imports_of(path))
    }
    assert set() == offenders


@pytest.mark.parametrize(
    "module", ["vla_platform.client", "vla_platform.specs", "vla_platform.schema"]
)
def test_a_tenants_import_loads_no_torch(module: str):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() == "False"
