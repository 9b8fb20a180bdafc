"""Make the project's virtual environment: `python3 deploy/bootstrap.py .venv`.

Standard library only. Debian and Ubuntu ship Python without `ensurepip` unless `python3-venv` is
installed; then pip is fetched as a wheel from the package index, so that no root is needed.
"""

from __future__ import annotations

import argparse
import html.parser
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def fetch_pip(folder: Path) -> Path:
    """Download the newest pip wheel from the configured index. A wheel of pip can run itself."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    with urllib.request.urlopen(index, timeout=60) as answer:
        links = _Links()
        links.feed(answer.read().decode())
    wheels = [
        href
        for href in links.hrefs
        if urllib.parse.urlparse(href).path.endswith("-py3-none-any.whl")
        and not any(mark in href for mark in ("a1-", "b1-", "b2-", "rc"))
    ]
    url = urllib.parse.urljoin(index, wheels[-1])
    target = folder / Path(urllib.parse.urlparse(url).path).name
    with urllib.request.urlopen(url, timeout=120) as answer:
        target.write_bytes(answer.read())
    return target


def create(target: Path) -> Path:
    """Create the environment with pip in it. Returns its interpreter."""
    python = target / "bin" / "python"
    try:
        import ensurepip  # noqa: F401  (absent on Debian without python3-venv)

        venv.create(target, with_pip=True)
    except (ImportError, subprocess.CalledProcessError):
        venv.create(target, with_pip=False, clear=True)
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetch_pip(Path(folder))
            subprocess.run([python, f"{wheel}/pip", "install", "-q", str(wheel)], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target", type=Path, help="folder of the environment, such as .venv")
    target = parser.parse_args().target
    if sys.version_info < (3, 11):  # noqa: UP036  (this file is what checks it)
        sys.exit("vla-platform needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")
    python = target / "bin" / "python"
    if not python.exists():
        print(f"creating {target}", flush=True)
        python = create(target)
    print("installing (about 1.5 GB with PyTorch; a few minutes the first time)", flush=True)
    constraints = ["-c", str(ROOT / "constraints" / "cpu.txt")]
    install = [python, "-m", "pip", "install", "-q", *constraints]
    # torch first and pinned: with it in place nothing else pulls a larger build.
    subprocess.run([*install, "torch"], check=True)
    subprocess.run([*install, "-e", f"{ROOT}[dev]"], check=True)
    (target / ".ready").touch()


if __name__ == "__main__":
    main()
