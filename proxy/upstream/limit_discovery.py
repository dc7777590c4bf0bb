"""Ask upstreams for their models' limits in the background, at first use and at intervals. No request waits for it.

The window of a self-hosted server depends on how it was started, so no table lists it. Most servers report it, some in
the list of models and others on an endpoint of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog

from proxy.config import UpstreamSettings
from proxy.config.providers import SPEAKS_OPENAI
from proxy.errors import NotFound, ProxyError
from proxy.http.headers import VIA
from proxy.limits.profiles.litellm_table import as_tokens
from proxy.upstream.relay import RelayTransport

log = structlog.get_logger(__name__)

EVERY = 900.0
"""Seconds until the proxy asks an upstream again."""

SOON = 60.0
"""Seconds until the proxy asks again if a model may not be loaded yet, because its window isn't known until then."""

WITHIN = 5.0
"""Timeout for each response, in seconds."""

MOST_BYTES = 1_000_000
MOST_NAMES = 64
"""Model names kept before the upstream has listed its models. Clients choose these names, so there is a limit."""

SMALLEST, LARGEST = 256, 20_000_000
"""Tokens. Other figures aren't windows."""

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


@dataclass(frozen=True, slots=True)
class StatedLimit:
    """A window in tokens, input and output together, and the field that reports it."""

    context_window: int
    source: str


@dataclass(slots=True)
class UpstreamModels:
    """The limits that one upstream reported. ``due`` is when to ask again, ``names`` are the requested models."""

    due: float = 0.0
    names: set[str] = field(default_factory=set)
    ids: frozenset[str] = frozenset()
    listed: dict[str, StatedLimit] = field(default_factory=dict)
    shown: dict[str, StatedLimit | None] = field(default_factory=dict)
    loaded: dict[str, StatedLimit] = field(default_factory=dict)
    everywhere: StatedLimit | None = None
    shows: bool = False
    complained: bool = False
    task: asyncio.Task[None] | None = None

    def find(self, model: str) -> StatedLimit | None:
        name = _listed_as(model, self.ids)
        return self.listed.get(name) or self.loaded.get(name) or self.shown.get(name) or self.everywhere

    @property
    def waits(self) -> bool:
        """Return whether a requested model isn't known to be loaded."""
        return self.shows and any(name not in self.loaded for name in self.shown)

    def wants(self, model: str, now: float) -> bool:
        """Return whether to ask the upstream now. Adds the model to ``names``."""
        if len(self.names) < MOST_NAMES:
            self.names.add(model)
        if self.task is not None:
            return False
        name = _listed_as(model, self.ids)
        unseen = self.shows and model in self.names and name in self.ids and name not in self.shown
        return now >= self.due or unseen


class LimitDiscovery:
    """Asks upstreams in the background, with their configured key or none, and keeps the reported limits."""

    def __init__(
        self,
        upstreams: Mapping[str, UpstreamSettings],
        relay: Callable[[str], Awaitable[RelayTransport]],
        instance: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        before: LimitDiscovery | None = None,
        kept: Collection[str] = (),
    ) -> None:
        """``before`` belongs to the previous configuration. The limits of the upstreams in ``kept`` stay valid."""
        known = {} if before is None else {name: book for name, book in before._books.items() if name in kept}
        self._books: dict[str, UpstreamModels] = {
            name: known.get(name) or UpstreamModels(due=clock())
            for name, settings in upstreams.items()
            if name in known or may_tell(settings)
        }
        self._relay = relay
        self._instance = instance
        self._clock = clock

    def told(self, upstream: str, model: str) -> StatedLimit | None:
        """Return the known limit. If it is time to ask, start a background task."""
        book = self._books.get(upstream)
        if book is None:
            return None
        if book.wants(model, self._clock()):
            book.task = asyncio.create_task(self._round(upstream, book))
        return book.find(model)

    async def settled(self) -> None:
        """Wait for the running tasks."""
        running = [book.task for book in self._books.values() if book.task is not None]
        await asyncio.gather(*running, return_exceptions=True)

    async def retire(self, successor: LimitDiscovery) -> None:
        """Stop asking upstreams that the successor doesn't share. Keep their reported limits."""
        mine = [book for name, book in self._books.items() if successor._books.get(name) is not book]
        running = [book.task for book in mine if book.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def aclose(self) -> None:
        """Stop asking."""
        for book in self._books.values():
            if book.task is not None:
                book.task.cancel()
        await self.settled()

    async def _round(self, upstream: str, book: UpstreamModels) -> None:
        try:
            await self._ask(upstream, book)
        except NotFound:
            self._books.pop(upstream, None)  # LiteLLM translates for this provider, so there is no endpoint to ask
        except Exception as error:  # no request depends on it
            log.exception("limits.asking_failed", upstream=upstream, error=type(error).__name__)
        finally:
            book.due = self._clock() + (SOON if book.waits else EVERY)
            book.task = None

    async def _ask(self, upstream: str, book: UpstreamModels) -> None:
        """Ask once. Keep earlier limits if the upstream reports none now."""
        lane = await self._relay(upstream)
        root = lane.base_url.removesuffix("/v1")
        reasons: list[str] = []

        async def answer(method: str, url: str, body: bytes | None = None) -> dict[str, Any]:
            try:
                return await self._answer(lane, method, url, body)
            except _NoAnswerError as error:
                reasons.append(f"{method} {url.removeprefix(root)}: {error}")
                return {}

        entries = _entries(await answer("GET", f"{lane.base_url}/models"))
        book.ids = frozenset(entry["id"] for entry in entries) or book.ids
        found = windows(entries, "/models")
        if not found and len(book.ids) <= 1:
            book.everywhere = props(await answer("GET", f"{root}/props")) or book.everywhere
            found = {} if book.everywhere is None else {"": book.everywhere}
        if not found:
            found = windows(_entries(await answer("GET", f"{root}/api/v0/models")), "/api/v0/models")
        book.listed = found or book.listed
        if not found:
            found = await self._shown(book, answer, root)
        if not found and not book.complained:
            book.complained = True
            log.info("limits.not_told", upstream=upstream, reasons=reasons)
        book.complained = book.complained and not found

    async def _shown(
        self, book: UpstreamModels, answer: Callable[[str, str, bytes | None], Awaitable[dict[str, Any]]], root: str
    ) -> dict[str, StatedLimit]:
        """Return the windows that Ollama reports for the requested models that it has."""
        book.names = {name for name in book.names if _listed_as(name, book.ids) in book.ids}
        for name in sorted(book.names):
            shown = await answer("POST", f"{root}/api/show", msgspec.json.encode({"model": name}))
            if not shown:
                break
            book.shows = True
            book.shown[_listed_as(name, book.ids)] = show(shown)
        if book.shows:
            for name, told in loaded(await answer("GET", f"{root}/api/ps", None)).items():
                book.loaded[_listed_as(name, book.ids)] = told
        return {name: told for name, told in book.shown.items() if told is not None}

    async def _answer(self, lane: RelayTransport, method: str, url: str, body: bytes | None) -> dict[str, Any]:
        """Return the JSON object at an address. Raises ``_NoAnswerError``."""
        headers = [("accept", "application/json"), (VIA, self._instance)]
        if body is not None:
            headers.append(("content-type", "application/json"))
        try:
            async with asyncio.timeout(WITHIN):
                answer = await lane.connections.send(method, url, lane.headers(headers, None), body, WITHIN)
                try:
                    if answer.status != 200:
                        raise _NoAnswerError(f"status {answer.status}")
                    content = b""
                    async for chunk in answer.body:
                        content += chunk
                        if len(content) > MOST_BYTES:
                            raise _NoAnswerError(f"over {MOST_BYTES:,} bytes")
                finally:
                    await answer.close()
            value = msgspec.json.decode(content)
        except (ProxyError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _NoAnswerError(type(error).__name__) from error
        if isinstance(value, list):
            return {"data": value}  # Together returns a plain array
        return value if isinstance(value, dict) else {}


class _NoAnswerError(Exception):
    """An address returns no response, or one that isn't readable."""


def may_tell(settings: UpstreamSettings) -> bool:
    """Return whether to ask an upstream: it is relayed to, and its API may report limits."""
    if not settings.ask_limits:
        return False
    address = settings.base_url or SPEAKS_OPENAI.get(settings.provider)
    if address is None or settings.lane == "translate" or settings.provider in ("anthropic", "azure"):
        return False
    host = (urlsplit(address).hostname or "").lower()
    return not any(host == silent or host.endswith(f".{silent}") for silent in _SILENT_HOSTS)


def windows(entries: list[dict[str, Any]], where: str) -> dict[str, StatedLimit]:
    """Return the windows in a list of models, by model id."""
    found = {}
    for entry in entries:
        for name in _WINDOW_FIELDS:
            if tokens := _window(entry.get(name)):
                found[entry["id"]] = StatedLimit(tokens, f"upstream: {name} in {where}")
                break
    for entry in entries:
        # vLLM lists adapters without a window, but with their base model.
        parent = entry.get("parent")
        if entry["id"] not in found and isinstance(parent, str) and parent in found:
            found[entry["id"]] = found[parent]
    return found


def props(answer: Mapping[str, Any]) -> StatedLimit | None:
    """Return the window of each llama.cpp slot."""
    generation = answer.get("default_generation_settings")
    tokens = _window(generation.get("n_ctx")) if isinstance(generation, Mapping) else None
    return None if tokens is None else StatedLimit(tokens, "upstream: n_ctx in /props")


def show(answer: Mapping[str, Any]) -> StatedLimit | None:
    """Return an Ollama model's window: the configured one, or else the model's maximum."""
    parameters = answer.get("parameters")
    for line in parameters.splitlines() if isinstance(parameters, str) else ():
        name, _, value = line.strip().partition(" ")
        if name == "num_ctx" and (tokens := _window(value)):
            return StatedLimit(tokens, "upstream: num_ctx in /api/show")
    about = answer.get("model_info")
    for key, value in about.items() if isinstance(about, Mapping) else ():
        if key.endswith(".context_length") and (tokens := _window(value)):
            return StatedLimit(tokens, "upstream: context_length in /api/show")
    return None


def loaded(answer: Mapping[str, Any]) -> dict[str, StatedLimit]:
    """Return the windows of Ollama's loaded models, by name. Only this endpoint shows the server's default window.

    Source: https://docs.ollama.com/api/ps
    """
    models = answer.get("models")
    entries = [entry for entry in models if isinstance(entry, Mapping)] if isinstance(models, list) else []
    found = {}
    for entry in entries:
        name, tokens = entry.get("model") or entry.get("name"), _window(entry.get("context_length"))
        if isinstance(name, str) and tokens is not None:
            found[name] = StatedLimit(tokens, "upstream: context_length in /api/ps")
    return found


def _window(value: object) -> int | None:
    tokens = as_tokens(value)
    return tokens if tokens is not None and SMALLEST <= tokens <= LARGEST else None


def _entries(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(_named(answer.get("data")))


def _named(data: object) -> Iterator[dict[str, Any]]:
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            yield entry


def _listed_as(model: str, ids: frozenset[str]) -> str:
    """Return the name that lists a model. Ollama's names have a tag, which requests may omit."""
    return f"{model}:latest" if model not in ids and f"{model}:latest" in ids else model
