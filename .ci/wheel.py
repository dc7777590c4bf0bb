"""Build the wheel, install it into an empty environment for each given interpreter, and use its commands and its proxy.

    .ci/wheel.py [--newest PACKAGE] PYTHON...

The dependencies are the newest ones that the wheel allows. With ``--newest``, the newest release of a package replaces
the allowed one, and the script only reports the result. Without the network it prints one line and passes. If uv is on
PATH, it runs the wheel's command once, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 900
NETWORK = re.compile(
    r"NewConnectionError|Max retries exceeded|Read timed out|ConnectionResetError|ProxyError|SSLError"
    r"|Temporary failure in name resolution|HTTPError: (?:403|429|5\d\d)"
)
CHECKOUT = re.compile(r"(?<![\w/.])(?:docs|deploy|scripts|proxy)/[\w./-]+|(?<!/)\b(?:README|CONTRIBUTING|CHANGELOG)\b")
"""Names of files that an installed package doesn't have."""
UPSTREAMS = {"native": None, "chat": ["chat"], "responses": ["responses"], "messages": ["messages"]}
"""The APIs that the upstream of each model speaks."""
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "responses": {"input": "hello"},
    "messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
}
ENDS = {"chat/completions": b"[DONE]", "responses": b"response.completed", "messages": b"message_stop"}


def run(*command: str | Path, **more: object) -> str:
    """Return the output of a command. Raises ``CalledProcessError`` with it."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, **more)  # type: ignore[call-overload]
    return str(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--newest")
    parser.add_argument("--inside", action="store_true", help="send the requests with this interpreter's packages")
    parser.add_argument("pythons", nargs="*")
    chosen = parser.parse_args()
    if chosen.inside:
        run_commands()
        send_requests()
        return
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        try:
            faults = list(checked(folder, chosen.pythons, chosen.newest))
        except subprocess.CalledProcessError as error:
            if not NETWORK.search(error.stderr):
                raise SystemExit(error.stderr[-2000:]) from error
            print("The wheel isn't checked: no package index can be reached", file=sys.stderr)
            return
    if faults and chosen.newest is None:
        sys.exit("\n".join(faults))
    print("\n".join(faults), file=sys.stderr)


def checked(folder: Path, pythons: list[str], newest: str | None) -> list[str]:
    """Return the faults of the wheel with each interpreter."""
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    source = folder / "source"
    run("git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), source)
    run(sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    faults = []
    for number, python in enumerate(pythons):
        environment = folder / str(number)
        run(python, "-m", "venv", environment)
        inside = environment / "bin/python"
        run(inside, *pip, "install", wheel)
        if newest is not None:
            run(inside, *pip, "install", "--upgrade", newest)
        freeze = run(inside, *pip, "freeze")
        version = re.search(r"^litellm==(\S+)", freeze, re.MULTILINE)
        label = f"{Path(python).name} with {len(freeze.splitlines())} packages, LiteLLM {version and version[1]}"
        done = subprocess.run(
            [inside, Path(__file__).absolute(), "--inside"], cwd=folder, capture_output=True, text=True, check=False
        )
        size = sum(path.lstat().st_size for path in environment.glob("lib/*/site-packages/**/*")) / 1e6
        print(f"wheel: {label}, {size:.0f} MB: {done.stdout.strip() or 'failed'}")
        if done.returncode:
            faults.append(f"The wheel fails on {label}:\n{done.stderr[-3000:]}")
    if (uv := shutil.which("uv")) and pythons and newest is None:
        told = run(
            uv, "tool", "run", "--no-config", "--python", pythons[0], "--from", wheel, "compaction-proxy", "--version"
        )
        print(f"wheel: uv tool run: {told.strip()}")
    return faults


def run_commands() -> None:
    """Run each command's help, and the first steps of a newcomer, in an empty folder. Exit with the faults."""
    from proxy.cli.commands import main as group

    program = Path(sys.executable).parent / "compaction-proxy"
    helps = [[*name, "--help"] for name in _names(group)]
    steps = [["check", "first.yaml"], ["check", "wrong.yaml"], ["models", "gpt-4o"], ["demo"]]
    environment = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "test", "ANTHROPIC_API_KEY": "test"}
    faults = []
    with tempfile.TemporaryDirectory() as name:
        Path(name, "wrong.yaml").write_text("model_list: []\n")
        Path(name, "first.yaml").write_text("upstreams: {main: {provider: openai}}\n")
        for arguments in [*helps, *steps]:
            done = subprocess.run(
                [program, *arguments],
                cwd=name,
                env={**environment, "HOME": name},
                capture_output=True,
                text=True,
                check=False,
            )
            shown = done.stdout + done.stderr
            if done.returncode != int("wrong.yaml" in arguments):
                faults.append(f"{arguments}: status {done.returncode}\n{shown[-1000:]}")
            faults += [f"{arguments}: names {file}, which packages don't have" for file in CHECKOUT.findall(shown)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(helps)} helps and {len(steps)} steps,", end=" ")


def _names(command: object) -> list[list[str]]:
    """Return the words of a group of commands, and of each command below it."""
    below = getattr(command, "commands", {})
    return [[], *([name, *rest] for name, each in below.items() for rest in _names(each))]


def send_requests() -> None:
    """Start the installed proxy in front of a stand-in, and send a request of each API to each upstream."""
    from proxy.demo.apis import EveryApi
    from proxy.server.loopback import serve

    with serve(EveryApi().app) as upstream, tempfile.TemporaryDirectory() as name:
        configuration = Path(name) / "config.yaml"
        upstreams = {
            model: {"base_url": f"{upstream}/v1", **({"speaks": speaks} if speaks else {})}
            for model, speaks in UPSTREAMS.items()
        }
        models = [{"match": model, "upstream": model, "profile": {"context_window": 16_000}} for model in UPSTREAMS]
        settings = {"store": {"url": "sqlite://"}, "upstreams": upstreams, "models": models}
        configuration.write_text(json.dumps(settings))
        log = Path(name) / "log"
        command = [Path(sys.executable).parent / "compaction-proxy", "serve", "--port", "0", "--config", configuration]
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
            try:
                address = _address(server, log)
                failed = [fault for model in UPSTREAMS for path in BODIES for fault in _answers(address, model, path)]
            finally:
                server.terminate()
        if failed:
            sys.exit("\n".join([*failed, log.read_text()[-2000:]]))
        print(f"{len(UPSTREAMS) * len(BODIES) * 2} requests answered")


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise SystemExit(f"The proxy doesn't start:\n{log.read_text()[-2000:]}")


def _answers(address: str, model: str, path: str) -> list[str]:
    """Return the faults of an answer, whole and streamed."""
    faults = []
    for stream in (False, True):
        body = json.dumps({**BODIES[path], "model": model, "stream": stream}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer test"}
        request = urllib.request.Request(f"{address}/v1/{path}", body, headers)  # noqa: S310 - the proxy's address
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                answer = response.read()
            good = ENDS[path] in answer if stream else "error" not in {k for k, v in json.loads(answer).items() if v}
        except urllib.error.HTTPError as error:
            answer, good = error.read(), False
        if not good:
            faults.append(f"{path} to {model}, stream {stream}: {answer[-300:]!r}")
    return faults


if __name__ == "__main__":
    main()
