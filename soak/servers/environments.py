"""The servers' own environments: their dependencies clash with each other's and with the proxy's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from soak.processes import ROOT

FOLDER = ROOT / ".venv-soak"


class NotMade(Exception):
    """An environment could not be made."""


def python(name: str) -> Path:
    """The interpreter of an environment with what is in ``soak/servers/NAME.lock``; made where it is missing or out of
    date, which takes minutes. Raises ``NotMade``."""
    lock = ROOT / "soak" / "servers" / f"{name}.lock"
    folder = FOLDER / name
    mark = folder / "made-from.lock"
    interpreter = folder / "bin" / "python"
    if mark.exists() and mark.read_bytes() == lock.read_bytes():
        return interpreter
    print(f"Making {folder.relative_to(ROOT)} from {lock.relative_to(ROOT)} (once, minutes) ...", file=sys.stderr)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(lock)]
    _run(str(interpreter), "-m", "pip", "install", *options)
    mark.write_bytes(lock.read_bytes())
    return interpreter


def _run(*command: str) -> None:
    try:
        subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - commands of our own
    except subprocess.CalledProcessError as error:
        raise NotMade(
            "An environment could not be made; what pip says is above. Where it finds no torch: its CPU builds are not "
            "at PyPI. PIP_EXTRA_INDEX_URL has to name PyTorch's own index of them."
        ) from error
