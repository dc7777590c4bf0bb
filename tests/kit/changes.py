"""Make a change in a copy of the project, and check that it works there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("proxy", "tests", "docs", "scripts", "pyproject.toml", "config.example.yaml", "README.md", "CHANGELOG.md")
GENERATED = ("proxy/config/schema.json",)


@dataclass(frozen=True)
class Edit:
    """One edit of a file: ``old``, which must be there exactly once, becomes ``new``. Without ``old``, a new file."""

    path: str
    new: str
    old: str | None = None

    def make(self, folder: Path) -> None:
        """Edit the file in a copy of the project."""
        file = folder / self.path
        if self.old is None:
            assert not file.exists(), f"{self.path} exists"
            file.parent.mkdir(exist_ok=True)
            file.write_text(self.new, encoding="utf-8")
            return
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.path} has {text.count(self.old)} times: {self.old}"
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


def before(path: str, old: str, new: str) -> Edit:
    """Return an edit that inserts a text before another one."""
    return Edit(path, new + old, old)


def after(path: str, old: str, new: str) -> Edit:
    """Return an edit that inserts a text after another one."""
    return Edit(path, old + new, old)


@dataclass(frozen=True)
class Change:
    """A change: its edits, the most files that it may touch, and a script that fails without it.

    ``generators`` are modules that write generated files. ``tests`` are tests that must pass, with pytest's selection.
    """

    most: int
    edits: Sequence[Edit]
    check: str
    generators: Sequence[str] = ()
    tests: Sequence[str] = ()

    @property
    def files(self) -> set[str]:
        """Return the files that it touches, without tests and generated files."""
        return {edit.path for edit in self.edits if not edit.path.startswith("tests/") and edit.path not in GENERATED}

    def fails(self, folder: Path) -> bool:
        """Return whether the script fails in a copy of the project, by its own judgment and not by a missing name."""
        try:
            run(folder, "-c", self.check)
        except AssertionError as error:
            return not any(name in str(error) for name in ("ImportError", "ModuleNotFoundError", "SyntaxError"))
        return False

    def make(self, folder: Path) -> None:
        """Make the change in a copy of the project, and run its script and its tests."""
        for edit in self.edits:
            edit.make(folder)
        for generator in self.generators:
            run(folder, "-m", generator)
        run(folder, "-c", self.check)
        if self.tests:
            run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *self.tests)


def copied(folder: Path) -> Path:
    """Return a copy of the project."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    return folder


def run(folder: Path, *arguments: str) -> None:
    """Run Python in a copy of the project. Copies in one folder share the bytecode of libraries."""
    command = [sys.executable, "-P", *arguments]
    bytecode = str(folder.parent / "bytecode")
    environment = {"PYTHONPATH": str(folder), "PYTHONPYCACHEPREFIX": bytecode, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments[:2]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
