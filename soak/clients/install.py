"""Install clients into a folder, each at its newest version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MINUTES = 10


class NotInstalled(Exception):
    """A client can't be installed."""


def pip(packages: Sequence[str], folder: Path) -> str:
    """Create an environment with packages. Return the version of the first. Raises ``NotInstalled``."""
    if not (folder / "bin").exists():
        _run(folder.parent, sys.executable, "-m", "venv", str(folder))
    interpreter = str(folder / "bin" / "python")
    _run(folder, interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    name = packages[0].partition("[")[0]
    return _run(folder, interpreter, "-c", f"import importlib.metadata as m; print(m.version({name!r}))").strip()


def npm(packages: Sequence[str], folder: Path) -> str:
    """Install packages. Return the version of the first. Raises ``NotInstalled``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps({"name": "soak-client", "private": True, "type": "module"}))
    _run(folder, "npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages)
    manifest = json.loads((folder / "node_modules" / packages[0] / "package.json").read_text())
    return str(manifest["version"])


def _run(folder: Path, *command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=MINUTES * 60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NotInstalled(f"{' '.join(command[:4])}: {done.stderr.strip()[-500:]}")
    return done.stdout
