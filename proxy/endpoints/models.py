"""``GET /v1/models``: the upstream's list, with the configured names and their limits."""

from __future__ import annotations

import asyncio
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from proxy.access.authenticator import may_use
from proxy.endpoints.passthrough import drained, upstream_url
from proxy.endpoints.paths import error_shape, is_anthropic
from proxy.endpoints.reply import send_answer
from proxy.errors import ConfigurationError, NotFound, ProxyError, UpstreamError
from proxy.http.headers import VIA, for_upstream
from proxy.http.request_body import ClientLeft, Sent, answer_error, answer_json, leaving
from proxy.pipeline.exchange import RequestContext, begin_request
from proxy.pipeline.response_start import ResponseStart, read_start, readable
from proxy.pipeline.runtime import Runtime
from proxy.telemetry.record import with_trace

log = structlog.get_logger(__name__)

_WILD = "*?["

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError)

LIST_BYTES = 4_000_000  # bytes that an upstream's list can have, compressed or not


class ModelList:
    """The models that a caller may name."""

    def __init__(self, service: Runtime) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        try:
            await drained(receive)
            with leaving(receive, send):
                await self._serve(scope, send)
        except ClientLeft:
            return
        except ProxyError as error:
            await answer_error(send, error, shape=error_shape(scope))

    async def _serve(self, scope: Scope, send: Send) -> None:
        context = begin_request(self._service, scope)
        async with self._service.access.quotas.admit(context.caller):
            await self._listed(context, send)

    async def _listed(self, context: RequestContext, send: Send) -> None:
        scope, caller, configuration = context.scope, context.caller, context.configuration
        settings = configuration.settings
        first = configuration.upstreams.first(anthropic=is_anthropic(scope))
        if not settings.models and caller.models is None:
            await send_answer(send, await self._ask(context, first), [])
            return
        listed: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(route.upstream for route in settings.models) or [first]:
            listed.update(await self._routed(context, name))
        for route in settings.models:
            if not any(mark in route.match for mark in _WILD):
                entry = {"id": route.match, "object": "model", "created": 0, "owned_by": route.upstream}
                listed.setdefault(route.match, entry)
        data = [await self._sized(context, entry) for model, entry in listed.items() if may_use(caller, model)]
        body = msgspec.json.encode(_page(data) if is_anthropic(scope) else {"object": "list", "data": data})
        await answer_json(send, body)

    async def _sized(self, context: RequestContext, entry: dict[str, Any]) -> dict[str, Any]:
        """Return an entry with the limits of its model, unless the upstream states them, in names that clients read.

        vLLM's clients read ``max_model_len``, Cline ``context_window``, LangChain ``max_input_tokens``, and opencode
        ``context_length``.
        """
        route = context.configuration.settings.route(entry["id"])
        if route is None:
            return entry
        try:
            profile = await self._service.limits.profile(route, context.configuration)
        except ConfigurationError:  # logged once, and reported by ``/readyz``
            return entry
        names = {
            **dict.fromkeys(("context_window", "context_length", "max_model_len"), profile.context_window),
            "max_input_tokens": profile.max_input_tokens or profile.context_window,
            "max_output_tokens": profile.max_output_tokens,
        }
        return {**{name: size for name, size in names.items() if size is not None}, **entry}

    async def _ask(self, context: RequestContext, upstream: str) -> ResponseStart:
        scope = context.scope
        relay = await context.configuration.upstreams.relay(upstream)
        url = upstream_url(scope, relay, "/models", None)
        forwarded = with_trace([*for_upstream(scope["headers"]), (VIA, context.via)], context.record.trace)
        headers = relay.headers(forwarded, context.caller.credential, anthropic=is_anthropic(scope))
        answer = await relay.request("GET", url, headers, None, context.configuration.settings.server.deadline)
        try:
            return await read_start(answer)
        except BaseException:
            await answer.close()
            raise

    async def _list(self, context: RequestContext, upstream: str) -> bytes:
        start = await self._ask(context, upstream)
        try:
            chunks, size = [start.first], len(start.first)
            async for chunk in start.answer.body:
                chunks.append(chunk)
                size += len(chunk)
                if size > LIST_BYTES:
                    raise UpstreamError("The upstream's list of models is too long.")
        finally:
            await start.answer.close()
        return await readable(start.answer, b"".join(chunks), LIST_BYTES)

    async def _routed(self, context: RequestContext, upstream: str) -> dict[str, dict[str, Any]]:
        """Return the models in an upstream's list that are routed to it, or none if it doesn't have a list."""
        try:
            async with asyncio.timeout(context.configuration.settings.server.deadline):
                entries = _entries(await self._list(context, upstream))
        except NotFound:
            return {}  # a translated provider has no such list
        except (UpstreamError, TimeoutError, *_UNREADABLE) as error:
            log.warning("models.no_list", upstream=upstream, reason=type(error).__name__)
            return {}
        routes = context.configuration.settings.models
        if not routes:
            return entries
        found = {model: next((r for r in routes if fnmatchcase(model, r.match)), None) for model in entries}
        return {model: entries[model] for model, route in found.items() if route and route.upstream == upstream}


def _page(data: list[dict[str, Any]]) -> dict[str, Any]:
    page = [{"type": "model", "display_name": entry["id"], **entry} for entry in data]
    ids = [entry["id"] for entry in page]
    return {"data": page, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}


def _entries(listed: bytes) -> dict[str, dict[str, Any]]:
    data = msgspec.json.decode(listed)["data"]
    return {entry["id"]: entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
