"""The clients: their packages, the stand-in behind the proxy, and their commands."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from soak.clients import install

DRIVERS = Path(__file__).parent / "drivers"
MODEL = "gpt-4.1"
CLAUDE = "claude-sonnet-4-5"
TASK = "Work through the whole task with the tool, please."
LOOKUP = "mcp__soak__lookup"
SERVERS = ("docs", "wiki")
"""MCP servers whose tools have the same name."""
LOOKUPS = [f"mcp__{name}__lookup" for name in SERVERS]
NUMBERS = "seq START END"
"""A command that prints other numbers for each call."""

Api = Literal["chat", "responses", "messages"]
Command = Callable[[Path, Path, str], list[str]]
"""Takes the folder of the installation, a folder to work in, and the proxy's address."""
Variables = Callable[[str], Mapping[str, str]]
"""Takes the proxy's address, and returns a client's environment variables."""


@dataclass(frozen=True, slots=True)
class Tool:
    """The call of an agent's tool: its name, and its arguments or input. ``loads`` is the call that loads it.

    Calls take the tool and the ``others`` in turn.
    """

    name: str
    arguments: Mapping[str, object] | str
    loads: Tool | None = None
    others: Sequence[Tool] = ()


SHELL = Tool("bash", {"command": NUMBERS, "description": "Print numbers"})
BASH = replace(SHELL, name="Bash")
EXEC = Tool("exec_command", {"cmd": NUMBERS, "max_output_tokens": 9_000})
LOOKUP_TOOLS = [Tool(name, {"number": "START"}) for name in LOOKUPS]


@dataclass(frozen=True, slots=True)
class Client:
    """A client.

    ``install`` puts the ``packages`` into a folder, and returns the version. ``tool`` is the tool of a command-line
    agent. Without one, a driver asks one question in each turn. ``windows`` multiplies the window, because an agent's
    own prompt and tools may fill most of it. ``recalls`` is false for requests that never get the proxy's tool.
    ``asks`` is how often the command asks, and ``keeps`` has texts that each compacted prompt must have. ``bridge``
    means that the upstream always has chat completions only.
    """

    install: Callable[[Sequence[str], Path], str]
    packages: Sequence[str]
    command: Command
    variables: Variables
    api: Api = "responses"
    tool: Tool | None = None
    windows: float = 1
    recalls: bool = True
    asks: int = 1
    keeps: Sequence[str] = ()
    bridge: bool = False


def _openai(url: str, api: str = "responses") -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "sk-soak", "SOAK_MODEL": MODEL, "SOAK_API": api}


def _anthropic(url: str, path: str = "") -> dict[str, str]:
    names = {"SOAK_MODEL": CLAUDE, "SOAK_API": "messages"}
    return {"ANTHROPIC_BASE_URL": f"{url}{path}", "ANTHROPIC_API_KEY": "sk-ant-soak", **names}


def _python(name: str, *packages: str, api: Api = "responses") -> Client:
    def command(folder: Path, work: Path, url: str) -> list[str]:
        return [str(folder / "bin" / "python"), str(DRIVERS / f"drive_{name}.py")]

    return Client(install.pip, packages, command, _anthropic if api == "messages" else _openai, api=api)


def _javascript(name: str, *packages: str, variables: Variables, **more: Any) -> Client:
    def command(folder: Path, work: Path, url: str) -> list[str]:
        for script in (f"drive_{name}.mjs", "soak_common.mjs"):  # node looks for packages next to the script
            (folder / script).write_text((DRIVERS / script).read_text())
        return ["node", str(folder / f"drive_{name}.mjs")]

    return Client(install.npm, (*packages, "zod"), command, variables, **more)


def _binary(folder: Path, name: str) -> str:
    return str(folder / "node_modules" / ".bin" / name)


RULE = "Never push to release-ZEBRA."
"""An instruction of the project, in a file that an agent reads once."""


def _twice(first: Sequence[str], second: Sequence[str]) -> list[str]:
    return ["sh", "-c", f"{shlex.join(first)} && exec {shlex.join(second)}"]


def _continued_codex(folder: Path, work: Path, url: str) -> list[str]:
    (work / "AGENTS.md").write_text(RULE)
    first = _codex(folder, work, url)
    return _twice(first, [*first[:-1], "resume", "--last", TASK])


def _continued_claude(folder: Path, work: Path, url: str) -> list[str]:
    (work / "CLAUDE.md").write_text(RULE)
    first = _claude_with_servers(folder, work, url, ["soak"])
    return _twice(first, [*first, "--continue"])


def _claude_with_servers(folder: Path, work: Path, url: str, names: Sequence[str] = SERVERS) -> list[str]:
    server = str(DRIVERS / "mcp_server.py")
    servers = {name: {"command": sys.executable, "args": [server, name]} for name in names}
    (work / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    allowed = ",".join([*(f"mcp__{name}__lookup" for name in names), "ToolSearch"])
    return [*_claude(folder, work, url), "--mcp-config", str(work / "mcp.json"), "--allowedTools", allowed]


def _codex(folder: Path, work: Path, url: str) -> list[str]:
    provider = {"name": '"soak"', "base_url": f'"{url}/v1"', "env_key": '"OPENAI_API_KEY"', "wire_api": '"responses"'}
    settings = [f"model_providers.soak.{name}={value}" for name, value in provider.items()]
    options = [part for setting in ['model_provider="soak"', *settings] for part in ("-c", setting)]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return [_binary(folder, "codex"), "exec", *flags, *options, TASK]


def _codex_with_servers(folder: Path, work: Path, url: str) -> list[str]:
    lines = ['model = "gpt-5.5"']  # it loads the servers' tools by a search
    for name in SERVERS:
        arguments = json.dumps([str(DRIVERS / "mcp_server.py"), name])
        lines += [f"[mcp_servers.{name}]", f"command = {json.dumps(sys.executable)}", f"args = {arguments}"]
    place = work / ".codex"
    place.mkdir(exist_ok=True)
    (place / "config.toml").write_text("\n".join(lines))
    return _codex(folder, work, url)


def _claude(folder: Path, work: Path, url: str) -> list[str]:
    return [_binary(folder, "claude"), "-p", TASK, "--allowedTools", "Bash", "--output-format", "json"]


def _claude_variables(url: str) -> dict[str, str]:
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "sk-ant-soak", "DISABLE_AUTOUPDATER": "1"}


def _claude_searching(url: str) -> dict[str, str]:
    # Otherwise, it may ask before its servers are connected, and then the tools are missing in its first turn.
    return {**_claude_variables(url), "ENABLE_TOOL_SEARCH": "true", "MCP_CONNECTION_NONBLOCKING": "false"}


def _opencode(folder: Path, work: Path, url: str) -> list[str]:
    provider = {"openai": {"options": {"baseURL": f"{url}/v1", "apiKey": "sk-soak"}}}
    settings = {"provider": provider, "autoupdate": False, "share": "disabled", "small_model": f"openai/{MODEL}"}
    (work / "opencode.json").write_text(json.dumps(settings))
    return [_binary(folder, "opencode"), "run", "--format", "json", "--model", f"openai/{MODEL}", TASK]


def _agent(package: str, command: Command, tool: Tool, variables: Variables = lambda url: {}, **more: Any) -> Client:
    """Return an agent with a command line, which calls one tool."""
    return Client(install.npm, (package,), command, variables, tool=tool, **{"windows": 2, **more})


def _copilot(api: Api) -> Client:
    return _agent("@github/copilot", _copilot_command, SHELL, partial(_copilot_variables, api=api), api=api)


def _copilot_command(folder: Path, work: Path, url: str) -> list[str]:
    return [_binary(folder, "copilot"), "-p", TASK, "--allow-all", "--no-auto-update", "--output-format", "json"]


def _copilot_variables(url: str, api: str) -> dict[str, str]:
    """Copilot's own models need an account, so it gets a provider."""
    wire = {"chat": "completions", "responses": "responses"}
    provider = {"TYPE": "openai", "WIRE_API": wire[api]} if api in wire else {"TYPE": "anthropic"}
    base = url if api == "messages" else f"{url}/v1"
    settings = {**provider, "BASE_URL": base, "API_KEY": "sk-soak"}
    return {"COPILOT_MODEL": MODEL, **{f"COPILOT_PROVIDER_{name}": value for name, value in settings.items()}}


def _qwen(folder: Path, work: Path, url: str) -> list[str]:
    flags = ["--yolo", "--output-format", "stream-json", "--auth-type", "openai", "--model", MODEL]
    return [_binary(folder, "qwen"), *flags, TASK]


def _pi(folder: Path, work: Path, url: str) -> list[str]:
    models = [{"id": MODEL}]
    provider = {"baseUrl": f"{url}/v1", "apiKey": "sk-soak", "api": "openai-completions", "models": models}
    place = work / ".pi" / "agent"
    place.mkdir(parents=True, exist_ok=True)
    (place / "models.json").write_text(json.dumps({"providers": {"soak": provider}}))
    return [_binary(folder, "pi"), "-p", "--mode", "json", "--provider", "soak", "--model", MODEL, TASK]


def _continue(folder: Path, work: Path, url: str) -> list[str]:
    model = {"name": "soak", "provider": "openai", "model": MODEL, "apiBase": f"{url}/v1", "apiKey": "sk-soak"}
    settings = {"name": "soak", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    (work / "continue.json").write_text(json.dumps(settings))
    return [_binary(folder, "cn"), "-p", TASK, "--auto", "--format", "json", "--config", str(work / "continue.json")]


def _cline(folder: Path, work: Path, url: str) -> list[str]:
    settings = ["--provider", "openai", "--apikey", "sk-soak", "--modelid", MODEL, "--baseurl", f"{url}/v1"]
    login = [_binary(folder, "cline"), "auth", *settings]
    command = f'{shlex.join(login)} && exec "$0" --json "$1"'
    return ["sh", "-c", command, _binary(folder, "cline"), TASK]


CLIENTS = {
    "Agents SDK": _python("agents_sdk", "openai-agents"),
    "Pydantic AI": _python("pydantic_ai", "pydantic-ai-slim[openai]"),
    "LangChain": _python("langchain", "langchain-openai"),
    "LlamaIndex": _python("llamaindex", "llama-index-llms-openai"),
    "AI SDK": _javascript("ai_sdk", "ai", "@ai-sdk/openai", variables=_openai, recalls=False),  # refers to items
    "Agents SDK for JavaScript": _javascript("agents_js", "@openai/agents", variables=_openai),
    "LangChain for JavaScript": _javascript(
        "langchain_js", "@langchain/openai", "@langchain/core", variables=partial(_openai, api="chat"), api="chat"
    ),
    "Pydantic AI, messages": _python("pydantic_ai", "pydantic-ai-slim[anthropic]", api="messages"),
    "LangChain, messages": _python("langchain", "langchain-anthropic", api="messages"),
    "AI SDK, messages": _javascript(
        "ai_sdk", "ai", "@ai-sdk/anthropic", variables=partial(_anthropic, path="/v1"), api="messages"
    ),
    "codex": _agent("@openai/codex", _codex, EXEC, _openai, windows=1),
    "Claude Code": _agent("@anthropic-ai/claude-code", _claude, BASH, _claude_variables, api="messages"),
    "codex, continued": _agent(
        "@openai/codex",
        _continued_codex,
        Tool("exec", f'text(await tools.exec_command({{cmd: "{NUMBERS}", max_output_tokens: 9000}}))'),
        _openai,
        windows=1,
        asks=2,
        keeps=('"additional_tools"', RULE, "<environment_context>"),
    ),
    "codex, MCP servers": _agent(
        "@openai/codex",
        _codex_with_servers,
        replace(EXEC, loads=Tool("tool_search", {"query": "lookup", "limit": 8}), others=LOOKUP_TOOLS),
        _openai,
        windows=1,
        bridge=True,
        keeps=[f'"{name}", "description"' for name in LOOKUPS],
    ),
    "Claude Code, continued": _agent(
        "@anthropic-ai/claude-code",
        _continued_claude,
        Tool(LOOKUP, {"number": "START"}, Tool("ToolSearch", {"query": f"select:{LOOKUP}", "max_results": 1})),
        _claude_searching,
        api="messages",
        asks=2,
        keeps=('"tool_reference"', RULE, "Available agent types", "skills are available"),
    ),
    "Claude Code, MCP servers": _agent(
        "@anthropic-ai/claude-code",
        _claude_with_servers,
        replace(
            BASH,
            loads=Tool("ToolSearch", {"query": f"select:{','.join(LOOKUPS)}", "max_results": len(LOOKUPS)}),
            others=LOOKUP_TOOLS,
        ),
        _claude_searching,
        api="messages",
        bridge=True,
        keeps=[f'"{name}", "description"' for name in LOOKUPS],
    ),
    "opencode": _agent("opencode-ai", _opencode, SHELL, _openai, windows=1),
    "Copilot": _copilot("chat"),
    "Copilot, responses": _copilot("responses"),
    "Copilot, messages": _copilot("messages"),
    "Qwen Code": _agent(
        "@qwen-code/qwen-code",
        _qwen,
        Tool("run_shell_command", {"command": NUMBERS, "is_background": False}),
        _openai,
        api="chat",
    ),
    "pi": _agent("@earendil-works/pi-coding-agent", _pi, Tool("bash", {"command": NUMBERS}), api="chat"),
    "Continue": _agent("@continuedev/cli", _continue, Tool("Bash", {"command": NUMBERS}), api="chat"),
    "Cline": _agent("cline", _cline, Tool("run_commands", {"commands": [NUMBERS]}), api="chat"),
}
