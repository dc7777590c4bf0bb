"""The servers: how each is started, and with which model."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.servers import free_port
from soak.processes import ROOT, running
from soak.servers import environments

MODEL = "tiny"


class Serving(Protocol):
    """What can be checked."""

    def serve(self, folder: Path, window: int) -> AbstractContextManager[int]:
        """The port on loopback of a server with such a window, in tokens; ``folder`` is for its files."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A server. ``lock`` names its environment, ``form`` the form in which it reads a model, as ``soak.servers.tiny``
    has it; in ``arguments`` stand ``{model}``, ``{port}`` and ``{window}``. It has ``starts_within`` seconds."""

    lock: str
    form: str
    arguments: Sequence[str]
    starts_within: float
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def serve(self, folder: Path, window: int) -> Iterator[int]:
        """The running server's port on loopback, with a model made for it. Raises ``NotStarted``."""
        interpreter = str(environments.python(self.lock))
        model, port = folder / f"model-{self.form}", free_port()
        make = [interpreter, "-m", "soak.servers.tiny", self.form, str(model), str(window)]
        subprocess.run(make, cwd=ROOT, check=True)  # noqa: S603 - a command of our own
        values = {"model": model, "port": port, "window": window}
        command = [interpreter, *(argument.format(**values) for argument in self.arguments)]
        ready = f"http://127.0.0.1:{port}/v1/models"
        with running(command, folder / f"{self.lock}.log", ready, self.starts_within, self.environment):
            yield port


LLAMA = [
    "-m", "llama_cpp.server", "--model", "{model}", "--model_alias", MODEL, "--n_ctx", "{window}",
    "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip
VLLM = [
    "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", MODEL,
    "--max-model-len", "{window}", "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip

ENGINES = {
    "llama.cpp": Engine("llama", "gguf", [*LLAMA, "--interrupt_requests", "false"], 120),
    "vLLM": Engine(
        "vllm",
        "folder",
        VLLM,
        600,
        {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    ),
    # As it comes, llama-cpp-python ends a stream as soon as another request arrives, the proxy's own for a summary too.
    "llama.cpp, interrupting": Engine("llama", "gguf", LLAMA, 120),
}
USUAL = ("llama.cpp", "vLLM")
"""Those that are checked where none is named."""
