"""How known programs get the proxy's address from `compaction-proxy run`.

Each row was found in the program's own help and documents, of November 2026. Programs without a row get
``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from proxy.errors import ConfigurationError

WRAPPERS = frozenset({"bunx", "env", "npx", "pipx", "pnpm", "uv", "uvx"})
"""Programs that run another one, which one of their arguments names."""

PACKAGES = {
    "@anthropic-ai/claude-code": "claude",
    "@github/copilot": "copilot",
    "@openai/codex": "codex",
    "@qwen-code/qwen-code": "qwen",
    "aider-chat": "aider",
    "opencode-ai": "opencode",
}
"""Programs by their packages, as for `npx`."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a program gets: ``variables`` of the environment, and ``options`` before its own arguments.

    Both are functions of the proxy's address, without ``/v1``, and of the environment or the program's arguments.
    ``hint`` says why a program with these may still use another address. ``file`` is set if the program reads its
    address from this file only.
    """

    variables: Callable[[str, Mapping[str, str]], Mapping[str, str]] = lambda url, environment: {}
    options: Callable[[str, Sequence[str]], Sequence[str]] = lambda url, arguments: ()
    hint: str = ""
    file: str = ""


def _claude(url: str, arguments: Sequence[str]) -> Sequence[str]:
    # The settings in files override the environment, and those of this option override the files.
    if any(argument.partition("=")[0] == "--settings" for argument in arguments):
        return ()
    return ("--settings", json.dumps({"env": {"ANTHROPIC_BASE_URL": url}}))


def _codex(url: str, arguments: Sequence[str]) -> Sequence[str]:
    own = 'env_key = "OPENAI_API_KEY"' if os.environ.get("OPENAI_API_KEY") else "requires_openai_auth = true"
    provider = f'{{name = "Compaction proxy", base_url = "{url}/v1", wire_api = "responses", {own}}}'
    return ("-c", 'model_provider="compaction_proxy"', "-c", f"model_providers.compaction_proxy={provider}")


def _opencode(url: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    try:
        own = json.loads(environment.get("OPENCODE_CONFIG_CONTENT") or "{}")
    except ValueError as error:
        raise ConfigurationError(f"OPENCODE_CONFIG_CONTENT: isn't JSON ({error}). Fix: unset it") from error
    providers = {name: {"options": {"baseURL": f"{url}/v1"}} for name in ("openai", "anthropic")}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({**own, "provider": {**own.get("provider", {}), **providers}})}


def _qwen(url: str, arguments: Sequence[str]) -> Sequence[str]:
    chosen = any(argument.partition("=")[0] == "--auth-type" for argument in arguments)
    return ("--openai-base-url", f"{url}/v1", *(() if chosen else ("--auth-type", "openai")))


def _copilot(url: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    key = environment.get("OPENAI_API_KEY")
    return {"COPILOT_PROVIDER_BASE_URL": f"{url}/v1", **({"COPILOT_PROVIDER_API_KEY": key} if key else {})}


PROGRAMS = {
    "aider": Program(
        lambda url, environment: {"OPENAI_API_BASE": f"{url}/v1", "ANTHROPIC_API_BASE": url},
        hint="aider uses it for models named openai/… and anthropic/…",
    ),
    "claude": Program(
        options=_claude,
        hint="Claude Code uses another address with CLAUDE_CODE_USE_BEDROCK, CLAUDE_CODE_USE_VERTEX, or --settings",
    ),
    "cline": Program(file="its own settings, written by `cline auth --baseurl ADDRESS`"),
    "cn": Program(file="apiBase in ~/.continue/config.yaml"),
    "codex": Program(options=_codex, hint="codex uses another address with --oss, --profile, or -c model_provider"),
    "copilot": Program(_copilot, hint="Copilot needs COPILOT_MODEL, too"),
    "crush": Program(file="base_url in crush.json"),
    "cursor-agent": Program(file="no setting: it sends requests to Cursor's servers"),
    "goose": Program(
        lambda url, environment: {"OPENAI_HOST": url, "ANTHROPIC_HOST": url},
        hint="goose uses it with GOOSE_PROVIDER openai or anthropic",
    ),
    "opencode": Program(_opencode, hint="opencode uses it with models named openai/… and anthropic/…"),
    "pi": Program(file="~/.pi/agent/models.json"),
    "qwen": Program(options=_qwen, hint="Qwen Code uses it with --auth-type openai"),
}

OTHER = Program(hint="The program may not read OPENAI_BASE_URL or ANTHROPIC_BASE_URL")


def place(command: Sequence[str]) -> tuple[int, str]:
    """Return the position of the program in a command, and the program's name in ``PROGRAMS``, if it's there."""
    named = [_name(part) for part in command]
    if named[0] in WRAPPERS:
        for position, name in enumerate(named):
            if name in PROGRAMS:
                return position, name
    return 0, named[0]


def _name(part: str) -> str:
    package = part[:1] + part[1:].partition("@")[0]  # without a version
    name = PurePath(package).name
    return PACKAGES.get(package, name.removesuffix(".exe").removesuffix(".cmd"))


def program_of(command: Sequence[str]) -> Program:
    """Return the row of the program in a command. Raises ``ConfigurationError`` if `run` can't give it an address."""
    _, name = place(command)
    program = PROGRAMS.get(name, OTHER)
    if program.file:
        raise ConfigurationError(
            f"{name}: can't use the proxy for one run, because it reads its address from {program.file}. "
            "Fix: start the proxy with compaction-proxy serve, and set the address there"
        )
    return program


def launch(command: Sequence[str], url: str, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command with its options, and further variables, for a proxy at an address without ``/v1``."""
    position, _ = place(command)
    program, after = program_of(command), command[position + 1 :]
    variables = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, **program.variables(url, environment)}
    return [*command[: position + 1], *program.options(url, after), *after], variables
