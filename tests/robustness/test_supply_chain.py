"""S18: what is installed is what was locked, and importing it does nothing but import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
POISONED = ("1.82.7", "1.82.8")


@pytest.mark.parametrize("lock", ["requirements.lock", "bench/quality/requirements.lock"])
def test_every_package_is_locked_with_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    entries = re.split(r"\n(?=[a-zA-Z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+(\[[\w,-]+\])?==[0-9][^\s;]*", entry), entry[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]
    assert "http://" not in text
    assert "git+" not in text
    assert not re.search(r"--(?:extra-)?index-url|--find-links|--trusted-host", text)


def test_poisoned_releases_cannot_be_chosen() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [entry for entry in project["dependencies"] if entry.startswith("litellm")]
    found = re.search(r"^litellm==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] not in POISONED
    for version in POISONED:
        assert f"!={version}" in wanted


def test_every_dependency_is_in_the_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locked = {
        name.lower().replace("_", "-")
        for name in re.findall(
            r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==", (ROOT / "requirements.lock").read_text(), re.MULTILINE
        )
    }
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {re.match(r"[A-Za-z0-9._-]+", entry)[0].lower().replace("_", "-") for entry in wanted}  # type: ignore[index]
    assert names <= locked


@pytest.mark.parametrize("place", ["scripts/environment", "Dockerfile"])
def test_installing_checks_the_hashes(place: str) -> None:
    text = (ROOT / place).read_text()
    installs = [line for line in text.replace("\\\n", " ").splitlines() if "pip install" in line and "-r" in line]
    assert installs
    for line in installs:
        assert "--require-hashes" in line
        assert "--no-deps" in line


def test_the_wheel_holds_the_package_and_no_start_up_hook() -> None:
    """A ``.pth`` file runs whenever Python starts; that is how a poisoned release worked."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setup["packages"] == {"find": {"include": ["proxy*"]}}
    assert setup.keys() == {"packages", "package-data"}, "no data files, no scripts, no modules beside the package"
    assert setup["package-data"] == {"proxy": ["py.typed", "profiles/*.yaml", "config/*.json"]}
    assert not [*ROOT.glob("setup.*"), *ROOT.glob("MANIFEST.in")]
    hooks = [path for path in (ROOT / "proxy").rglob("*") if path.suffix in (".pth", ".so", ".pyd")]
    hooks += list((ROOT / "proxy").rglob("*customize.py"))
    assert hooks == []


IMPORTS = """
import sys, socket
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind")
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
def refuse(event, args):
    if event in NETWORK + PROGRAMS:
        raise RuntimeError(event + repr(args))
sys.addaudithook(refuse)
import pkgutil, importlib, asyncio
import proxy
for found in pkgutil.walk_packages(proxy.__path__, "proxy."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print("imported", "litellm" in sys.modules)
"""


def test_importing_reaches_for_no_network_and_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.strip() == "imported False", "LiteLLM is imported by whoever needs it, and nobody else"
