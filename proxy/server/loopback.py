"""Serve an application on a free port of loopback: during a ``with`` block, or while a program runs that uses it.

The table has how known programs get the proxy's address. Each row was found in the program's own help and documents, of
November 2026. Programs without a row get ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from proxy.errors import ConfigurationError
from proxy.server.http_protocol import BoundedProtocol

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


ADDRESS = "127.0.0.1"

SIGNALED = 128  # a shell adds this to the number of the signal that ended a command
END_WITHIN = 9.0  # seconds for a server to stop after its requests have ended or were canceled
TICK = 1.0  # seconds between updates of the `date` header
REST = 0.005  # seconds between checks for unfinished requests while the server stops


class NotStarted(RuntimeError):
    """The application didn't start. The log has the reason."""


class Server(uvicorn.Server):
    """A server that stops without delay. uvicorn's own server polls, and takes up to a fifth of a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Stop the server. Call this from another thread, after the server has started."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has already stopped, and its loop is closed
                self._loop.call_soon_threadsafe(self._ending.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(REST)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def serve(
    app: ASGIApp,
    *,
    http: type[asyncio.Protocol] | Literal["h11"] = BoundedProtocol,
    keepalive: int = 5,
    drain: int | None = 1,
    log_level: str | None = "error",
) -> Iterator[str]:
    """Serve an application on a free port of 127.0.0.1 in a thread. Yield the base URL without a trailing slash.

    ``http`` is the class that parses HTTP, or uvicorn's name for one. ``keepalive`` is the seconds until the server
    closes an idle connection. ``drain`` is the seconds that requests have to end after the block;
    ``None`` for no limit. ``log_level`` is that of uvicorn's own lines; ``None`` for the level of the proxy's log.

    Raises ``NotStarted``, and ``RuntimeError`` if the application doesn't stop.
    """
    config = uvicorn.Config(
        app,
        http=http,
        interface="asgi3",
        lifespan="on",
        ws="none",
        log_config=None,
        log_level=log_level,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=drain,
        timeout_keep_alive=keepalive,
    )
    server = Server(config)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((ADDRESS, 0))  # the system assigns the port, so servers don't race for one
        port = listener.getsockname()[1]
        thread = threading.Thread(target=_run, args=(server, listener), name=f"serve-{port}", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.005)
        if not server.started:
            raise NotStarted("The application did not start; its log says why.")
        try:
            yield f"http://{ADDRESS}:{port}"
        finally:
            server.end()
            thread.join(None if drain is None else drain + END_WITHIN)
            if thread.is_alive():
                raise RuntimeError("The server did not end in time.")


def _run(server: Server, listener: socket.socket) -> None:
    # uvicorn calls sys.exit if the application doesn't start. `serve` raises an error instead.
    with contextlib.suppress(SystemExit):
        server.run([listener])


def run_program(command: Sequence[str], config: Path | None) -> int:
    """Run a program that sends its requests to a proxy on a free port, and print a line about them.

    Return the program's status. Raises ``ConfigurationError``.
    """
    # ``serve`` also serves stand-ins, which don't need these modules.
    from proxy.config import Settings, read
    from proxy.server.app import Proxy
    from proxy.telemetry.logs import configure

    program = program_of(command)
    loaded = None if config is None else read(config.absolute(), os.environ)
    settings = (Settings() if loaded is None else loaded.settings).listening(ADDRESS)
    # The terminal is the program's. A level in the file applies.
    configure(settings.log.level if "level" in settings.log.model_fields_set else "warning", settings.log.format)
    before, umask = _figures(), os.umask(0o077)  # files that libraries make have content of requests, too
    try:
        with serve(Proxy(settings, loaded), drain=None, log_level=None) as url:
            status = _finished(*launch(command, url, os.environ), umask)
    except NotStarted as error:
        raise ConfigurationError("The proxy can't start. The log has the reason.") from error
    try:
        print(f"compaction-proxy: {_told(_figures() - before, program.hint)}", file=sys.stderr)
    except OSError:  # nobody can read it. Python would write it again at exit, and replace the status by its own.
        sys.stderr = None
    return status


def _figures() -> Counter[str]:
    """Return the conversation requests of this process, and the input tokens that compaction removed."""
    from proxy.telemetry.metrics import REQUESTS, TOKENS_REMOVED

    figures: Counter[str] = Counter()
    samples = [one for metric in (REQUESTS, TOKENS_REMOVED) for one in next(iter(metric.collect())).samples]
    for name, labels, value, *_ in samples:
        if name == "compaction_tokens_removed_total":
            figures["removed"] += int(value)
        elif name == "compaction_requests_total" and labels["api"] != "other":
            figures["requests"] += int(value)
            figures["failed"] += int(value) * (labels["status"] != "2xx")
            figures["compacted"] += int(value) * (labels["outcome"] == "compacted")
    return figures


def _told(figures: Counter[str], hint: str) -> str:
    if not figures["requests"]:
        return f"no request came through the proxy. {hint}."
    failed = f" ({figures['failed']:,} failed)" if figures["failed"] else ""
    requests, compacted, removed = (f"{figures[name]:,}" for name in ("requests", "compacted", "removed"))
    return f"requests: {requests}{failed}, compacted: {compacted}, input tokens saved: {removed}"


def _finished(command: Sequence[str], variables: Mapping[str, str], umask: int) -> int:
    try:
        program = subprocess.Popen(command, env=_environment(variables), umask=umask)  # noqa: S603 - the operator's own
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigurationError(f"{command[0]}: can't be started ({reason}). Fix: check its name") from error
    # The terminal sends Ctrl-C to the program, too, and it decides when to end.
    handlers = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    for ending in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if ending not in handlers and signal.getsignal(ending) is not signal.SIG_IGN:  # nohup ignores it
            handlers[ending] = signal.signal(ending, lambda number, _: program.send_signal(number))
    try:
        status = program.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status if status >= 0 else SIGNALED - status


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with these variables. Requests to loopback must not go to a proxy of the network."""
    names = ("NO_PROXY", "no_proxy")
    direct = {name: ",".join(filter(None, (os.environ.get(name), ADDRESS))) for name in names}
    return {**os.environ, **variables, **direct}
