"""The clients: their packages, the stand-in behind the proxy, and their commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from soak.clients import install

DRIVERS = Path(__file__).parent / "drivers"
MODEL = "gpt-4.1"
TASK = "Work through the whole task with the tool, please."
NUMBERS = "seq START END"
"""A command that prints other numbers for each call."""


@dataclass(frozen=True, slots=True)
class Tool:
    """The call of an agent's own tool: its name, and its arguments."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Client:
    """A client.

    ``command`` takes the folder of the installation, a folder to work in, and the proxy's address. ``tool`` is the tool
    of a command-line agent. Without one, a driver asks one question in each turn. ``windows`` multiplies the window,
    because an agent's own prompt and tools may fill most of it. ``recalls`` is false for requests that never get the
    proxy's tool.
    """

    manager: Literal["pip", "npm"]
    packages: Sequence[str]
    command: Callable[[Path, Path, str], list[str]]
    variables: Callable[[str], Mapping[str, str]]
    api: Literal["responses", "messages"] = "responses"
    tool: Tool | None = None
    windows: float = 1
    recalls: bool = True

    def installed(self, folder: Path) -> str:
        """Install the client. Return its version. Raises ``NotInstalled``."""
        return (install.pip if self.manager == "pip" else install.npm)(self.packages, folder)


def _openai(url: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "sk-soak", "SOAK_MODEL": MODEL}


def _python(name: str, *packages: str) -> Client:
    def command(folder: Path, work: Path, url: str) -> list[str]:
        return [str(folder / "bin" / "python"), str(DRIVERS / f"drive_{name}.py")]

    return Client("pip", packages, command, _openai)


def _ai_sdk(folder: Path, work: Path, url: str) -> list[str]:
    driver = folder / "drive.mjs"  # node looks for packages next to the script
    driver.write_text((DRIVERS / "drive_ai_sdk.mjs").read_text())
    return ["node", str(driver)]


def _binary(folder: Path, name: str) -> str:
    return str(folder / "node_modules" / ".bin" / name)


def _codex(folder: Path, work: Path, url: str) -> list[str]:
    provider = {"name": '"soak"', "base_url": f'"{url}/v1"', "env_key": '"OPENAI_API_KEY"', "wire_api": '"responses"'}
    settings = [f"model_providers.soak.{name}={value}" for name, value in provider.items()]
    options = [part for setting in ['model_provider="soak"', *settings] for part in ("-c", setting)]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return [_binary(folder, "codex"), "exec", *flags, *options, TASK]


def _claude(folder: Path, work: Path, url: str) -> list[str]:
    flags = ["--allowedTools", "Bash", "--output-format", "json"]
    return [_binary(folder, "claude"), "-p", TASK, *flags]


def _opencode(folder: Path, work: Path, url: str) -> list[str]:
    provider = {"openai": {"options": {"baseURL": f"{url}/v1", "apiKey": "sk-soak"}}}
    settings = {"provider": provider, "autoupdate": False, "share": "disabled", "small_model": f"openai/{MODEL}"}
    (work / "opencode.json").write_text(json.dumps(settings))
    return [_binary(folder, "opencode"), "run", "--format", "json", "--model", f"openai/{MODEL}", TASK]


CLIENTS = {
    "Agents SDK": _python("agents_sdk", "openai-agents"),
    "Pydantic AI": _python("pydantic_ai", "pydantic-ai-slim[openai]"),
    "LangChain": _python("langchain", "langchain-openai"),
    "LlamaIndex": _python("llamaindex", "llama-index-llms-openai"),
    "AI SDK": Client("npm", ("ai", "@ai-sdk/openai", "zod"), _ai_sdk, _openai, recalls=False),  # refers to items
    "codex": Client(
        "npm",
        ("@openai/codex",),
        _codex,
        _openai,
        tool=Tool("exec_command", {"cmd": NUMBERS, "max_output_tokens": 9_000}),
    ),
    "Claude Code": Client(
        "npm",
        ("@anthropic-ai/claude-code",),
        _claude,
        lambda url: {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "sk-ant-soak", "DISABLE_AUTOUPDATER": "1"},
        api="messages",
        windows=2,
        tool=Tool("Bash", {"command": NUMBERS, "description": "Print numbers"}),
    ),
    "opencode": Client(
        "npm", ("opencode-ai",), _opencode, _openai, tool=Tool("bash", {"command": NUMBERS, "description": "Print"})
    ),
}
