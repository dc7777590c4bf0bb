"""Create the servers' environments. Their dependencies conflict with each other and with the proxy's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from soak.processes import ROOT

FOLDER = ROOT / ".venv-soak"


class NotMade(Exception):
    """An environment can't be created."""


def python(name: str) -> Path:
    """Return the interpreter of an environment with the packages of ``soak/servers/NAME.lock``.

    Creates the environment if it's missing or outdated, which takes minutes. Raises ``NotMade``.
    """
    lock = ROOT / "soak" / "servers" / f"{name}.lock"
    folder = FOLDER / name
    mark = folder / "made-from.lock"
    interpreter = folder / "bin" / "python"
    if mark.exists() and mark.read_bytes() == lock.read_bytes():
        return interpreter
    print(f"Creating {folder.relative_to(ROOT)} from {lock.relative_to(ROOT)} (takes minutes) ...", file=sys.stderr)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(lock)]
    _run(str(interpreter), "-m", "pip", "install", *options)
    mark.write_bytes(lock.read_bytes())
    return interpreter


def _run(*command: str) -> None:
    try:
        subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - fixed commands
    except subprocess.CalledProcessError as error:
        raise NotMade(
            "Cannot create the environment; see pip's output above. If pip can't find torch: its CPU builds aren't on "
            "PyPI. Fix: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds."
        ) from error
