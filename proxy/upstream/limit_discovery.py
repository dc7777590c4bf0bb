"""Ask upstreams for their models' limits in the background, at first use and at intervals. No request waits for it.

The window of a self-hosted server depends on how it was started, so no table lists it. Most servers report it, some in
the list of models and others on an endpoint of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import structlog

from proxy.config import UpstreamSettings
from proxy.config.upstreams import SPEAKS_OPENAI
from proxy.errors import NotFound, ProxyError
from proxy.http.headers import VIA
from proxy.limits.profiles import ReportedWindow
from proxy.limits.tables import as_tokens
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import read_most

log = structlog.get_logger(__name__)

EVERY = 900.0  # seconds until the proxy asks an upstream again
SOON = 20.0  # seconds until the proxy asks again if a model may not be loaded: its window isn't known until then
WITHIN = 5.0  # timeout for each response, in seconds

MOST_BYTES = 1_000_000
MOST_NAMES = 64  # model names, which clients choose, that are kept before the upstream has listed its models

SMALLEST, LARGEST = 256, 20_000_000  # Tokens. Other figures aren't windows.

# Their APIs don't report limits, and the tables list their models.
_SILENT_HOSTS = (
    "api.openai.com",
    "azure.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "api.deepseek.com",
    "api.perplexity.ai",
    "api.x.ai",
)

# In order of authority: the limit in force comes before the model's maximum.
_WINDOW_FIELDS = (
    "max_model_len",  # vLLM, SGLang
    "loaded_context_length",  # LM Studio
    "context_length",  # OpenRouter, Together, LM Studio
    "context_window",  # Groq
    "max_context_length",  # Mistral, LM Studio
)


@dataclass(slots=True)
class UpstreamModels:
    """The limits that one upstream reported. ``due`` is when to ask again, ``names`` are the requested models."""

    due: float = 0.0
    names: set[str] = field(default_factory=set)
    ids: frozenset[str] = frozenset()
    listed: dict[str, ReportedWindow] = field(default_factory=dict)
    shown: dict[str, ReportedWindow | None] = field(default_factory=dict)
    loaded: dict[str, ReportedWindow] = field(default_factory=dict)
    everywhere: ReportedWindow | None = None
    shows: bool = False
    routes: bool = False
    unloaded: bool = False
    complained: bool = False
    task: asyncio.Task[None] | None = None

    def find(self, model: str) -> ReportedWindow | None:
        name = _listed_as(model, self.ids)
        return self.listed.get(name) or self.loaded.get(name) or self.shown.get(name) or self.everywhere

    @property
    def waits(self) -> bool:
        """Return whether a requested model isn't known to be loaded."""
        return self.unloaded or (self.shows and any(name not in self.loaded for name in self.shown))

    def wants(self, model: str, now: float) -> bool:
        """Return whether to ask the upstream now. Adds the model to ``names``."""
        if len(self.names) < MOST_NAMES:
            self.names.add(model)
        if self.task is not None:
            return False
        name = _listed_as(model, self.ids)
        unseen = (self.shows or self.routes) and model in self.names and name in self.ids and name not in self.shown
        return now >= self.due or unseen


class LimitDiscovery:
    """Asks upstreams in the background, with their configured key or none, and keeps the reported limits."""

    def __init__(
        self,
        upstreams: Mapping[str, UpstreamSettings],
        relay: Callable[[str], Awaitable[RelayTransport]],
        instance: str,
        *,
        before: LimitDiscovery | None = None,
        kept: Collection[str] = (),
    ) -> None:
        """``before`` belongs to the previous configuration. The limits of the upstreams in ``kept`` stay valid."""
        known = {} if before is None else {name: models for name, models in before._upstreams.items() if name in kept}
        self._upstreams: dict[str, UpstreamModels] = {
            name: known.get(name) or UpstreamModels(due=time.monotonic())
            for name, settings in upstreams.items()
            if name in known or reports_limits(settings)
        }
        self._relay = relay
        self._instance = instance
        self._clock = time.monotonic

    def window(self, upstream: str, model: str) -> ReportedWindow | None:
        """Return the known limit. If it is time to ask, start a background task."""
        models = self._upstreams.get(upstream)
        if models is None:
            return None
        if models.wants(model, self._clock()):
            models.task = asyncio.create_task(self._ask_safely(upstream, models))
        return models.find(model)

    async def settled(self) -> None:
        """Wait for the running tasks."""
        running = [models.task for models in self._upstreams.values() if models.task is not None]
        await asyncio.gather(*running, return_exceptions=True)

    async def retire(self, successor: LimitDiscovery) -> None:
        """Stop asking upstreams that the successor doesn't share. Keep their reported limits."""
        mine = [models for name, models in self._upstreams.items() if successor._upstreams.get(name) is not models]
        running = [models.task for models in mine if models.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def aclose(self) -> None:
        for models in self._upstreams.values():
            if models.task is not None:
                models.task.cancel()
        await self.settled()

    async def _ask_safely(self, upstream: str, models: UpstreamModels) -> None:
        try:
            await self._ask(upstream, models)
        except NotFound:
            self._upstreams.pop(upstream, None)  # LiteLLM translates for this provider, so there is no endpoint to ask
        except Exception as error:  # no request depends on it
            log.exception("limits.asking_failed", upstream=upstream, error=type(error).__name__)
        finally:
            models.due = self._clock() + (SOON if models.waits else EVERY)
            models.task = None

    async def _ask(self, upstream: str, models: UpstreamModels) -> None:
        """Ask once. Keep earlier limits if the upstream reports none now."""
        relay = await self._relay(upstream)
        root = relay.base_url.removesuffix("/v1")
        reasons: list[str] = []

        async def answer(method: str, url: str, body: bytes | None = None) -> dict[str, Any]:
            value = await self._answer(relay, method, url, body)
            if isinstance(value, str):
                reasons.append(f"{method} {url.removeprefix(root)}: {value}")
                return {}
            return value

        entries = _entries(await answer("GET", f"{relay.base_url}/models"))
        models.ids = frozenset(entry["id"] for entry in entries) or models.ids
        found = windows(entries, "/models")
        models.unloaded = False
        about = {} if found else await answer("GET", f"{root}/props")
        if about.get("role") == "router":
            # Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md, "Using multiple models"
            for name in sorted(models.names & models.ids):
                url = f"{root}/props?model={quote(name, safe='')}&autoload=false"
                models.shown[name] = props(await answer("GET", url))
            found = {name: limit for name, limit in models.shown.items() if limit is not None}
            models.routes, models.unloaded = True, len(found) < len(models.shown)
        elif about and len(models.ids) <= 1:
            models.everywhere = props(about) or models.everywhere
            found = {} if models.everywhere is None else {"": models.everywhere}
        if not found and not models.unloaded:
            entries = _entries(await answer("GET", f"{root}/api/v0/models"))
            found = windows(entries, "/api/v0/models")
            # LM Studio loads a model at its first request, often with less than the largest window.
            models.unloaded = any(one["id"] in models.names and one.get("state") == "not-loaded" for one in entries)
        models.listed = found or models.listed
        if not found:
            found = await self._ask_ollama(models, answer, root)
        if not found and not models.complained:
            models.complained = True
            log.info("limits.not_told", upstream=upstream, reasons=reasons)
        models.complained = models.complained and not found

    async def _ask_ollama(
        self, models: UpstreamModels, answer: Callable[[str, str, bytes | None], Awaitable[dict[str, Any]]], root: str
    ) -> dict[str, ReportedWindow]:
        models.names = {name for name in models.names if _listed_as(name, models.ids) in models.ids}
        for name in sorted(models.names):
            shown = await answer("POST", f"{root}/api/show", msgspec.json.encode({"model": name}))
            if not shown:
                break
            models.shows = True
            models.shown[_listed_as(name, models.ids)] = show(shown)
        if models.shows:
            for name, limit in loaded(await answer("GET", f"{root}/api/ps", None)).items():
                models.loaded[_listed_as(name, models.ids)] = limit
        return {name: limit for name, limit in models.shown.items() if limit is not None}

    async def _answer(self, relay: RelayTransport, method: str, url: str, body: bytes | None) -> dict[str, Any] | str:
        """Return the JSON object at an address, or the reason why there is none."""
        headers = [("accept", "application/json"), (VIA, self._instance)]
        if body is not None:
            headers.append(("content-type", "application/json"))
        try:
            async with asyncio.timeout(WITHIN):
                answer = await relay.connections.send(method, url, relay.headers(headers, None), body, WITHIN)
                try:
                    if answer.status != 200:
                        return f"status {answer.status}"
                    content, whole = await read_most(answer.body, MOST_BYTES)
                finally:
                    await answer.close()
            if not whole:
                return f"over {MOST_BYTES:,} bytes"
            value = msgspec.json.decode(content)
        except (ProxyError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return type(error).__name__
        if isinstance(value, list):
            return {"data": value}  # Together returns a plain array
        return value if isinstance(value, dict) else {}


def reports_limits(settings: UpstreamSettings) -> bool:
    """Return whether to ask an upstream: it is relayed to, and its API may report limits."""
    if not settings.ask_limits:
        return False
    address = settings.base_url or SPEAKS_OPENAI.get(settings.provider)
    if address is None or settings.lane == "translate" or settings.provider in ("anthropic", "azure"):
        return False
    host = (urlsplit(address).hostname or "").lower()
    return not any(host == silent or host.endswith(f".{silent}") for silent in _SILENT_HOSTS)


def windows(entries: list[dict[str, Any]], where: str) -> dict[str, ReportedWindow]:
    found = {}
    for entry in entries:
        limits = (_stated(entry.get(name), f"{name} in {where}") for name in _WINDOW_FIELDS)
        if limit := next(filter(None, limits), None):
            found[entry["id"]] = limit
    for entry in entries:
        # vLLM lists adapters without a window, but with their base model.
        parent = entry.get("parent")
        if isinstance(parent, str) and parent in found:
            found.setdefault(entry["id"], found[parent])
    return found


def props(answer: Mapping[str, Any]) -> ReportedWindow | None:
    """Return the window of each llama.cpp slot."""
    generation = answer.get("default_generation_settings")
    return _stated(generation.get("n_ctx"), "n_ctx in /props") if isinstance(generation, Mapping) else None


def show(answer: Mapping[str, Any]) -> ReportedWindow | None:
    """Return an Ollama model's window: the configured one, or else the model's maximum."""
    parameters = answer.get("parameters")
    for line in parameters.splitlines() if isinstance(parameters, str) else ():
        name, _, value = line.strip().partition(" ")
        if name == "num_ctx" and (limit := _stated(value, "num_ctx in /api/show")):
            return limit
    about = answer.get("model_info")
    for key, value in about.items() if isinstance(about, Mapping) else ():
        if key.endswith(".context_length") and (limit := _stated(value, "context_length in /api/show")):
            return limit
    return None


def loaded(answer: Mapping[str, Any]) -> dict[str, ReportedWindow]:
    """Return the windows of Ollama's loaded models, by name. Only this endpoint shows the server's default window.

    Source: https://docs.ollama.com/api/ps
    """
    models = answer.get("models")
    found = {}
    for entry in models if isinstance(models, list) else ():
        if isinstance(entry, Mapping) and isinstance(name := entry.get("model") or entry.get("name"), str):
            found[name] = _stated(entry.get("context_length"), "context_length in /api/ps")
    return {name: limit for name, limit in found.items() if limit is not None}


def _stated(value: object, field: str) -> ReportedWindow | None:
    tokens = as_tokens(value)
    return ReportedWindow(tokens, f"upstream: {field}") if tokens and SMALLEST <= tokens <= LARGEST else None


def _entries(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    data = answer.get("data")
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _listed_as(model: str, ids: frozenset[str]) -> str:
    """Return the name that lists a model. Ollama's names have a tag, which requests may omit."""
    return f"{model}:latest" if model not in ids and f"{model}:latest" in ids else model
