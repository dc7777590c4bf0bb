"""S18: the installed packages are the locked ones, and importing them has no side effects."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from proxy import __version__
from proxy.litellm_package import TESTED, untested_version

ROOT = Path(__file__).parents[2]
POISONED = ("1.82.7", "1.82.8")

LOCKS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.glob("**/*.lock")
    if not any(part.startswith(".venv") for part in path.parts)
)


def test_the_locks_are_these() -> None:
    assert set(LOCKS) >= {"requirements.lock", "requirements-runtime.lock", "bench/quality/requirements.lock"}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_locked_with_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    entries = re.split(r"\n(?=[a-zA-Z0-9])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert len(entries) >= len(pinned(lock)) > 0
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+(\[[\w,-]+\])?==[0-9][^\s;]*", entry), entry[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]
    assert "http://" not in text
    assert "git+" not in text
    assert not re.search(r"--(?:extra-)?index-url|--find-links|--trusted-host", text)


def pinned(lock: str) -> dict[str, tuple[str, set[str]]]:
    """Version and hashes of each package in a lock file, by its name."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in (ROOT / lock).read_text().splitlines():
        if line[:1].isalnum():
            name, _, rest = line.partition("==")
            hashes: set[str] = set()
            found[name.partition("[")[0].lower()] = (rest.split()[0], hashes)
        elif "--hash=" in line:
            hashes.add(line.split("sha256:")[1].split()[0])
    return found


def test_what_it_runs_with_is_part_of_what_was_tested() -> None:
    tested = pinned("requirements.lock")
    assert {name: tested[name] for name in pinned("requirements-runtime.lock")} == pinned("requirements-runtime.lock")


def bill(folder: Path, *arguments: str, more: str = "") -> subprocess.CompletedProcess[str]:
    """The script, in a place of its own without any package, with some more in the lock file."""
    for name in ("scripts", "proxy"):
        (folder / name).mkdir()
    for name in (
        "scripts/sbom",
        "scripts/sbom.py",
        "proxy/constants.py",
        "pyproject.toml",
        "requirements-runtime.lock",
    ):
        shutil.copy(ROOT / name, folder / name)
    with (folder / "requirements-runtime.lock").open("a") as lock:
        lock.write(more)
    command = [str(folder / "scripts" / "sbom"), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def test_the_bill_of_materials_has_each_package_with_its_hashes(tmp_path: Path) -> None:
    done = bill(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert (listed["bomFormat"], listed["specVersion"], listed["version"]) == ("CycloneDX", "1.6", 1)
    assert (listed["metadata"]["component"]["name"], listed["metadata"]["component"]["version"]) == (
        "compaction-proxy",
        __version__,
    )
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", listed["serialNumber"])
    parts = listed["components"]
    assert {part["name"]: (part["version"], {h["content"] for h in part["hashes"]}) for part in parts} == pinned(
        "requirements-runtime.lock"
    )
    assert len(parts) == len({part["bom-ref"] for part in parts}) > 50
    for part in parts:
        assert part["type"] == "library"
        assert part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}"
        assert {h["alg"] for h in part["hashes"]} == {"SHA-256"}
    (loop,) = [part for part in parts if part["name"] == "uvloop"]
    assert loop["properties"] == [{"name": "python:marker", "value": "sys_platform != 'win32'"}]
    # Only the schema's host, so no reader installs from another index.
    assert re.findall(r"[a-z]+://[^\s\"]*", done.stdout) == ["http://cyclonedx.org/schema/bom-1.6.schema.json"]
    again = tmp_path / "again"
    again.mkdir()
    assert bill(again, "bom.json").stdout == ""
    assert (again / "bom.json").read_text() == done.stdout


@pytest.mark.parametrize(
    "line", ["evil==1.0", "evil @ https://evil.example/evil.whl", "--index-url https://evil.example"]
)
def test_no_bill_is_made_of_what_is_not_locked(tmp_path: Path, line: str) -> None:
    done = bill(tmp_path, more=f"{line}\n")
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"not a package with hashes: {line}" in done.stderr


def test_poisoned_releases_cannot_be_chosen() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [entry for entry in project["dependencies"] if entry.startswith("litellm")]
    found = re.search(r"^litellm==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] not in POISONED
    for version in POISONED:
        assert f"!={version}" in wanted


def test_only_the_tested_line_of_litellm_can_be_chosen() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [entry for entry in project["dependencies"] if entry.startswith("litellm")]
    major, minor = map(int, TESTED.split("."))
    assert f">={TESTED},<{major}.{minor + 1}" in wanted
    assert untested_version() is None


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
    installs = [
        line for line in text.replace("\\\n", " ").splitlines() if re.search("pip .*install", line) and "-r" in line
    ]
    assert installs
    for line in installs:
        assert "--require-hashes" in line
        assert "--no-deps" in line


def test_the_wheel_holds_the_package_and_no_start_up_hook() -> None:
    """A ``.pth`` file runs whenever Python starts; that is how a poisoned release worked."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setup["packages"] == {"find": {"include": ["proxy*"]}}
    assert setup.keys() == {"dynamic", "packages", "package-data"}, (
        "no data files, no scripts, no modules beside the package"
    )
    assert setup["package-data"] == {"proxy": ["py.typed", "config/*.json", "endpoints/pages/*", "limits/*.toml"]}
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
