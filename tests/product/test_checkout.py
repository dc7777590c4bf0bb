"""Test the scripts of a checkout: they work in the caller's folder, and leave the caller's programs alone."""

import os
import shutil
import site
import subprocess
import venv
from pathlib import Path

import pytest

from tests.kit.program import ROOT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose environment is made. It has the packages of these tests. The script made the command."""
    folder = tmp_path_factory.mktemp("a checkout")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "proxy").symlink_to(ROOT / "proxy")
    venv.create(folder / ".venv", symlinks=True)
    (packages,) = (folder / ".venv/lib").glob("python3*/site-packages")
    (packages / "packages.pth").write_text(site.getsitepackages()[0])
    for place in (folder, folder / ".venv"):
        (place / "requirements.lock").write_text("")
    assert done(folder, folder / "scripts/compaction-proxy", "--version").returncode == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A caller's folder with a configuration, a relative store, and a module that has the package's name."""
    (tmp_path / "my.yaml").write_text("store: {url: 'sqlite:///rel.db'}\nupstreams: {main: {}}\n")
    (tmp_path / "proxy.py").write_text("raise SystemExit('the wrong module')\n")
    return tmp_path


def done(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    environment |= {name: value for name, value in os.environ.items() if name == "PYTHONPYCACHEPREFIX"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_works_in_the_folder_of_the_caller(checkout: Path, folder: Path) -> None:
    for script in ("scripts/compaction-proxy", ".venv/bin/compaction-proxy"):
        found = done(folder, checkout / script, "check", "my.yaml")
        assert (found.returncode, found.stdout, found.stderr) == (0, "my.yaml: fine\n", "")
    found = done(folder, checkout / "scripts/demo", "--help")
    assert (found.returncode, "--turns" in found.stdout) == (0, True), found.stderr


def test_serve_resolves_paths_against_the_folder_of_the_caller(checkout: Path, folder: Path) -> None:
    command = [checkout / "scripts/serve", "--config", "my.yaml", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        running.terminate()
        log = running.communicate(timeout=60)[1]
    assert line.startswith("Dashboard: http://127.0.0.1:"), log
    assert running.returncode == 0, log
    assert (folder / "rel.db").is_file()


def test_a_program_that_run_starts_keeps_its_environment(checkout: Path, folder: Path) -> None:
    (folder / "own.py").write_text(
        "import os; print(*(f'{name}={os.environ.get(name)}' for name in ('PATH', 'PYTHONPATH')))"
    )
    python = shutil.which("python3", path="/usr/bin:/bin") or os.path.realpath(shutil.which("python3") or "")
    found = done(folder, checkout / ".venv/bin/compaction-proxy", "run", "--", python, "own.py")
    assert (found.returncode, found.stdout) == (0, "PATH=/usr/bin:/bin PYTHONPATH=None\n"), found.stderr
