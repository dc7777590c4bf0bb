"""The program: the server in a process of its own, and the other commands in one of their own or in this process."""

import contextlib
import fcntl
import io
import os
import pty
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from proxy.cli.commands import main
from tests.kit.forks import ROOT, Fork, fork
from tests.kit.waiting import until


class Program(NamedTuple):
    """A running server. ``log`` has its output."""

    url: str
    process: subprocess.Popen[bytes] | Fork
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def link(self) -> str:
        """Return the current one-time link, from the file that the output names."""
        (file,) = re.findall(
            r"^Dashboard: \S+ \(a link that works once is in (.+)\)$", self.log.read_text(), re.MULTILINE
        )
        return Path(file).read_text().strip()

    def refuses(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except ConnectionRefusedError:
            return True
        return False


def free_port() -> int:
    """Return a free port outside the range from which the system assigns ports to the other servers of the tests."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def write_config(settings: Mapping[str, Any], folder: Path, name: str = "config.yaml") -> Path:
    """Write settings as YAML. Unless they name a store, it's in the folder."""
    file = folder / name
    file.write_text(yaml.safe_dump({"store": {"url": f"sqlite:///{folder}/store.db"}, **settings}))
    return file


@contextlib.contextmanager
def program(
    config: Path, *options: str, log: Path | None = None, within: Sequence[str] = (), **process: Any
) -> Iterator[Program]:
    """Run ``serve`` with a configuration until the block ends.

    ``within`` is a command that replaces itself by its arguments. ``process`` are further arguments of ``Popen``.
    """
    port = free_port()
    log = log or config.with_name("log")
    arguments = ["serve", "--config", str(config), "--port", str(port), *options]
    command = [*within, sys.executable, "-m", "proxy", *arguments]
    with (
        log.open("wb") as output,
        (None if within else _fork(arguments, output.fileno(), **process))
        or subprocess.Popen(command, stdout=output, stderr=output, **{"cwd": ROOT, **process}) as running,
        httpx.Client(trust_env=False) as http,
    ):
        started = Program(f"http://127.0.0.1:{port}", running, log)

        def ready() -> bool:
            assert running.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return http.get(f"{started.url}/readyz").status_code == 200
            return False

        try:
            assert until(ready, 60), log.read_text()
            yield started
        finally:
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(30)
            running.kill()


def _fork(
    arguments: Sequence[str], output: int, *, env: Mapping[str, str] = os.environ, cwd: Path = ROOT, umask: int = -1
) -> Fork | None:
    with Path(os.devnull).open("rb") as nothing:
        return fork(arguments, env, cwd, [nothing.fileno(), output, output], umask)


def relaying(upstream: str, folder: Path, **server: object) -> contextlib.AbstractContextManager[Program]:
    """Run the server in front of an upstream, with these settings of the section ``server``."""
    main = {"provider": "openai", "base_url": f"{upstream}/v1", "api_key": "sk-canary"}
    return program(write_config({"server": server, "upstreams": {"main": main}}, folder))


@contextlib.contextmanager
def served(settings: Mapping[str, Any], folder: Path) -> Iterator[str]:
    with program(write_config(settings, folder)) as running:
        yield running.url


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, in a process of its own, with nothing of the machine's own environment."""
    own = {**_environment(folder), "PYTHONPATH": str(ROOT), **environment}
    with Path(os.devnull).open("rb") as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        running = fork(arguments, own, folder, [file.fileno() for file in (nothing, out, err)])
        if running is None:
            command = [sys.executable, "-m", "proxy", *arguments]
            running = subprocess.Popen(command, cwd=folder, env=own, stdout=out, stderr=err)
        with running:
            status = running.wait(120)
        texts = [os.pread(file.fileno(), 10**9, 0).decode() for file in (out, err)]
    return subprocess.CompletedProcess(arguments, status, *texts)


def call(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as ``run`` does, but in this process, which saves a second. Not for ``serve``."""
    out, err = io.StringIO(), io.StringIO()
    own = {**_environment(folder), **environment}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in list(os.environ):
            patch.delenv(name)
        for name, value in own.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(list(arguments), prog_name="python -m proxy")
    status = ended.value.code
    assert isinstance(status, int), status
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def terminal(folder: Path, *arguments: str, columns: int) -> str:
    """Run a command on a terminal of this width, in a process of its own. Return what it shows."""
    controller, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**_environment(folder), "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    del environment["COLUMNS"]
    with _on_terminal(arguments, folder, environment, device) as running:
        os.close(device)
        shown = b""
        with contextlib.suppress(OSError):  # Linux reports the end as an error
            while part := os.read(controller, 4_096):
                shown += part
        os.close(controller)
    assert running.returncode == 0, shown
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


def _on_terminal(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], device: int
) -> subprocess.Popen[bytes] | Fork:
    if (running := fork(arguments, environment, folder, [device, device, 2])) is not None:
        return running
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=device, stdout=device)


def _environment(folder: Path) -> dict[str, str]:
    # Without the compiled modules, a command takes seconds of CPU to compile all it imports.
    compiled = {name: os.environ[name] for name in ("PYTHONPYCACHEPREFIX",) if name in os.environ}
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "120", **compiled}
