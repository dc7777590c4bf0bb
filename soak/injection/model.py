"""Serve a model file with llama-cpp-python, or find the model of a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.servers import free_port
from soak.processes import running
from soak.servers import environments

SEED = 1

STARTS_WITHIN = 120.0
"""Seconds."""


class NoModel(Exception):
    """The running server doesn't list a model."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind an OpenAI-compatible server: the server's URL without ``/v1``, and the model's name there."""

    url: str
    name: str


@contextlib.contextmanager
def serving(file: Path, window: int, folder: Path) -> Iterator[Served]:
    """Serve a GGUF file on loopback with ``window`` tokens of context. The server's log is in the folder.

    Raises ``environments.NotMade`` or ``processes.NotStarted``.
    """
    port = free_port()
    name = file.stem
    options = {
        "model": file.absolute(),
        "model_alias": name,
        "n_ctx": window,
        "seed": SEED,
        # Two threads wait for each other at every layer, which takes seconds per token when the cores are busy.
        "n_threads": 1,
        "n_threads_batch": 1,
        "cache": "true",  # The conversations have a common prefix.
        "interrupt_requests": "false",
        "host": "127.0.0.1",
        "port": port,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [str(environments.python("llama")), "-m", "llama_cpp.server", *arguments]
    url = f"http://127.0.0.1:{port}"
    with running(command, folder / "llama.log", f"{url}/v1/models", STARTS_WITHIN):
        yield Served(url, name)


def listed(url: str) -> Served:
    """Return the first model that a running server lists. ``url`` may end in ``/v1``. Raises ``NoModel``."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=30)
        answer.raise_for_status()
        return Served(url, str(answer.json()["data"][0]["id"]))
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise NoModel(
            f"{url}/v1/models lists no model ({type(error).__name__}). Start the server, or correct --url."
        ) from error
