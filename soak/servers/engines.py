"""The servers, their models, and their commands."""

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
    """A server to check."""

    def serve(self, folder: Path, window: int) -> AbstractContextManager[int]:
        """Start a server with this window in tokens, and yield its port on loopback. Its files are in ``folder``."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A server.

    ``lock`` names its environment, and ``form`` its model format, as in ``soak.servers.tiny``. ``arguments`` contains
    ``{model}``, ``{port}``, and ``{window}``. The server must start ``starts_within`` this number of seconds.
    """

    lock: str
    form: str
    arguments: Sequence[str]
    starts_within: float
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def serve(self, folder: Path, window: int) -> Iterator[int]:
        """Create a model, start the server, and yield its port on loopback. Raises ``NotStarted``."""
        interpreter = str(environments.python(self.lock))
        model, port = folder / f"model-{self.form}", free_port()
        make = [interpreter, "-m", "soak.servers.tiny", self.form, str(model), str(window)]
        subprocess.run(make, cwd=ROOT, check=True)  # noqa: S603 - a fixed command
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
    # By default, llama-cpp-python ends a stream when another request arrives, including the proxy's for a summary.
    "llama.cpp, interrupting": Engine("llama", "gguf", LLAMA, 120),
}
USUAL = ("llama.cpp", "vLLM")
"""The default servers."""
