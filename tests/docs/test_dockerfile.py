"""The Dockerfile builds an image that runs the proxy without root, as docs/container.md states."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from proxy.config import Settings
from proxy.server.loopback import serve
from tests.kit.program import program
from tests.kit.scripted import chat, client
from tests.kit.upstream import StandIn
from tests.kit.waiting import until

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines()) if name]


def last(name: str) -> str:
    """The argument of the last instruction of a name."""
    return [rest for found, rest in instructions() if found == name][-1]


def excluded(path: str) -> bool:
    """Whether .dockerignore keeps a path out: of the patterns that match it or a folder above, the last one decides."""
    above = [path, *(str(folder) for folder in Path(path).parents)]
    out = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        assert line.startswith("#") or "/" not in pattern, "only single names are understood here"
        names = [Path(name).name for name in above] if "**/" in line else [path.split("/")[0]]
        if not line.startswith("#") and any(fnmatchcase(name, pattern) for name in names):
            out = not line.startswith("!")
    return out


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(last("ENV")))


def locked(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    """The packages of a lock file: version and condition, and hashes."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.lstrip().startswith("#"):
            package, _, rest = line.partition("==")
            pin, *hashes = rest.split("--hash=")
            found[package] = (pin.strip(), frozenset(map(str.strip, hashes)))
            assert hashes, package
    return found


def test_the_image_gets_what_the_proxy_needs_and_nothing_for_development() -> None:
    whole, runtime = locked("requirements.lock"), locked("requirements-runtime.lock")
    assert runtime.items() < whole.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {re.split(r"[<>=!; ]", line)[0].lower() for line in project["project"]["dependencies"]}
    assert needed <= set(runtime)
    development = {name.lower() for name in project["dependency-groups"]["dev"]}
    assert development & set(runtime) == {"jsonschema"}, "LiteLLM needs it too"
    assert not [line for line in (ROOT / "requirements-runtime.lock").read_text().splitlines() if "://" in line]


def test_nothing_private_gets_into_the_image() -> None:
    private = [".git/config", ".venv/bin/python", "state/compaction.db", "config.yaml", "proxy/__pycache__/app.pyc"]
    assert [path for path in private if not excluded(path)] == []


def test_the_grace_period_of_documented_commands_is_longer_than_the_drain() -> None:
    texts = [(ROOT / "Dockerfile").read_text(encoding="utf-8")]
    texts += [path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]]
    commands = [found for text in texts for found in re.findall(r"docker run (?!--rm)[^\n]*", text)]
    assert commands
    for command in commands:
        (seconds,) = re.findall(r"--stop-timeout (\d+)", command)
        assert int(seconds) > Settings().server.drain


READ_ONLY = """
mount --bind "$WRITABLE" "$WRITABLE" && mount --bind "$ROOT" "$ROOT" || exit 8
mount -o remount,ro,bind "$ROOT" && mount -o remount,ro,bind / || exit 8
cd "$HOME"
exec unshare --user --map-user="$UID_GID" --map-group="$UID_GID" sh -c '
touch "$ROOT/x" || touch /tmp/x || test "$(id -u)" != "$UID_GID" || exec "$@"; exit 9' sh "$@"
"""
"""Run a command with a read-only file system, except ``WRITABLE``, as the user ``UID_GID`` without capabilities."""


@pytest.fixture(scope="module")
def isolating() -> list[str]:
    """A command that runs its arguments by ``READ_ONLY``."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--map-root-user", "--mount", "true"], check=False).returncode:
        pytest.skip("needs user namespaces: sysctl -w kernel.unprivileged_userns_clone=1")
    return [unshare, "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh"]


@pytest.mark.long
def test_it_serves_with_a_read_only_root_as_a_user_without_rights(isolating: list[str], tmp_path: Path) -> None:
    """As the containers in deploy: only the volume and the temporary folder are writable."""
    writable = tmp_path / "writable"
    volume, temporary = writable / "compaction-proxy", writable / "tmp"
    volume.mkdir(parents=True)
    temporary.mkdir()
    user, group = last("USER").split(":")
    assert user == group
    own = {name: value.replace(last("VOLUME"), str(volume)) for name, value in environment().items()}
    own |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    own |= {"XDG_STATE_HOME": str(writable), "WRITABLE": str(writable), "ROOT": str(ROOT), "UID_GID": user}
    # The image contains the compiled modules.
    own |= {name: value for name, value in os.environ.items() if name == "PYTHONPYCACHEPREFIX"}
    main = {"provider": "openai", "api_key": "sk-test"}
    config = tmp_path / "config.yaml"
    with serve(StandIn(window=16_000).app) as url:
        config.write_text(yaml.safe_dump({"upstreams": {"main": {**main, "base_url": f"{url}/v1"}}}))
        with program(config, within=isolating, env=own) as running, client(running.url) as openai:
            raw = openai.chat.completions.with_raw_response.create(model="gpt-5", messages=chat(30, 400))
            assert raw.headers["x-compaction"] == "compacted"
            assert until(lambda: any(volume.iterdir()))
    assert {"compaction.db"} <= {file.name for file in volume.iterdir()}


def test_the_health_check_tells_a_proxy_that_serves_from_none(entrance: str) -> None:
    code = json.loads(last("HEALTHCHECK").partition("CMD")[2])
    assert code[:2] == ["python", "-c"]
    port = Settings().server.port
    assert f"http://127.0.0.1:{port}/readyz" in code[2]

    def status(url: str) -> int:
        here = code[2].replace(f"http://127.0.0.1:{port}", url)
        environ = {**os.environ, "http_proxy": "http://127.0.0.1:9"}  # the machine's own must not matter
        return subprocess.run([sys.executable, "-c", here], env=environ, capture_output=True, check=False).returncode

    assert status(entrance) == 0
    assert status(f"{entrance}/nothing") != 0
    assert status("http://127.0.0.1:9") != 0
