"""Count what a request costs whose path the proxy only forwards."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import unquote, unquote_to_bytes

import msgspec
from starlette.types import Scope

from proxy.access.spending import limit_of
from proxy.compaction.format import TextCounter
from proxy.config import Route
from proxy.dialects.answers import AnswerTail
from proxy.dialects.apis import CHAT, MESSAGES, RESPONSES
from proxy.dialects.request import leniently
from proxy.errors import ConfigurationError
from proxy.http.decompression import Unpacking
from proxy.http.request_body import header
from proxy.limits.profiles.prices import Price, price_from
from proxy.overflow.silent import Finished
from proxy.pipeline.billing import BYTES_A_TOKEN, EXPECTED_OUTPUT
from proxy.pipeline.context import RequestContext
from proxy.pipeline.costs import price_for, pricing
from proxy.pipeline.services import Services
from proxy.telemetry.model_names import shown_model
from proxy.telemetry.record import Usage
from proxy.upstream.transport import MESSAGES_PATH, RESPONSES_PATH

WHOLE_BYTES = 1_000_000
"""A body with at most this Content-Length is read before the proxy contacts the upstream."""

INLINE_BYTES = 65_536
"""Bytes of a body that Python's parser reads on the event loop."""

SAMPLE_BYTES = 8_192
"""Bytes of a body that are kept to find its model and to count its tokens."""

_FORM_FIELD = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,200})\r\n')
_FORM_VALUE = re.compile(rb"(?:^|&)model=([^&]{1,200})")
_FIELD = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')

_FREE = frozenset({"conversations", "files", "moderations", "tokenize", "detokenize", "uploads", "vector_stores"})
_FREE_ENDS = frozenset({"cancel", "count_tokens", "input_tokens"})
_READS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


class PaidCall:
    """Counts what a forwarded request costs."""

    def __init__(self, service: Services, context: RequestContext, upstream: str, body: bytes) -> None:
        """``body`` is empty if it hasn't arrived yet."""
        self._service = service
        self._context = context
        self._upstream = upstream
        encoding = header(context.scope, b"content-encoding")
        if encoding is not None:
            unpacking = Unpacking(encoding, WHOLE_BYTES)
            unpacking.feed(body)
            body = bytes(unpacking.beginning)
        self._kind = (header(context.scope, b"content-type") or "").lower()
        self._model = model_in(body, self._kind)
        self._size = len(body)
        # A stream may take hours, so a part of a large body represents it.
        self._body = body[:SAMPLE_BYTES]
        self._count: TextCounter | None = None

    async def begin(self, model: str | None, *, reserves: bool) -> None:
        """Find the price of the request, and reserve its probable cost. Raises ``BudgetExceeded``."""
        context = self._context
        self._model = model or self._model
        context.bill.price_of = pricing(await self._price())
        if reserves:
            usage = Usage(self._size // BYTES_A_TOKEN, EXPECTED_OUTPUT)
            await self._service.spending.reserve(context.caller, context.record.id, context.bill.amount(usage))

    async def settle(self, sent: int, head: bytes) -> Finished | None:
        """Add the cost to the record, and return the end of the answer.

        ``sent`` is the bytes of the body, and ``head`` its beginning.
        """
        context, meter = self._context, self._context.bill.last
        if meter is None or meter.free:
            return None
        if is_json(context.scope):
            meter.sent = sent
        if not self._model:
            await meter.unpack()
            guess = _FIELD.search(head)
            guessed = "" if guess is None else guess[1].decode("utf-8", "replace")
            self._model = model_in(head, self._kind) or meter.model or guessed
            if self._model:
                context.bill.price_of = pricing(await self._price())
        context.record.model = shown_model(self._model) if self._model else None
        context.record.upstream = self._upstream
        await context.bill.settle(context.record, self._tokens, self._count)
        return meter.end

    async def _price(self) -> Price | None:
        """Return the price of the model. If it's unknown and the team has a budget in US dollars, take the highest."""
        limit = limit_of(self._context.caller)
        if not self._model and limit is not None and limit.usd is not None:
            return await self._highest()
        return await self._price_of(self._model)

    async def _price_of(self, model: str) -> Price | None:
        configuration = self._context.configuration
        route = configuration.route(model, CHAT.name)
        if route is None or route.upstream != self._upstream:
            route = Route(self._upstream, model, None)
        try:
            profile = await self._service.profile(route, configuration)
            counter = await self._service.measures.usable(profile, CHAT)
        except ConfigurationError:  # logged once, and reported by `/readyz`
            return None
        self._count = None if counter is None else counter.text
        return price_for(configuration, route, profile)

    async def _highest(self) -> Price | None:
        """Return the highest price that the configuration states, or that its models have."""
        settings = self._context.configuration.settings
        prices = [price_from(fields) for fields in settings.prices.values()]
        prices += [await self._price_of(model) for model in sorted(settings.model_names)]
        known = [price for price in prices if price is not None]
        return max(known, key=lambda price: price.base.input + price.base.output, default=None)

    async def _tokens(self) -> int | None:
        if self._count is None or not self._body or not is_json(self._context.scope):
            return None
        value = leniently(self._body) if len(self._body) == self._size else None
        if value is not None:
            return await asyncio.to_thread(_tokens_of, value, self._count)
        part = await asyncio.to_thread(self._count, self._body.decode("utf-8", "replace"))
        return part * self._size // len(self._body)


class _Named(msgspec.Struct):
    model: str = ""


def model_in(body: bytes, kind: str) -> str:
    """Return the model that a body of a content type names; empty if that isn't certain."""
    if "multipart" in kind or "urlencoded" in kind:
        found = (_FORM_FIELD if "multipart" in kind else _FORM_VALUE).search(body)
        return "" if found is None else unquote_to_bytes(found[1].replace(b"+", b" ")).decode("utf-8", "replace")
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Python's parser reads other encodings, for example, but it's slower.
        value = leniently(body) if len(body) <= INLINE_BYTES else None
    name = value.get("model") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def tail_of(path: str) -> AnswerTail:
    """Return what reads the usage in answers of a path."""
    path = "/" + "/".join(_names(path))
    if path.startswith(RESPONSES_PATH):
        return RESPONSES.answers.tail()
    return (MESSAGES if path.startswith(MESSAGES_PATH) else CHAT).answers.tail()


def _tokens_of(value: object, count: TextCounter) -> int:
    """Return the tokens of all texts in a body, and of a prompt in the form of tokens."""
    if isinstance(value, str):
        return count(value)
    if isinstance(value, list):
        return sum(1 if isinstance(one, int) else _tokens_of(one, count) for one in value)
    if isinstance(value, dict):
        return sum(_tokens_of(part, count) for name, part in value.items() if name != "model")
    return 0


def _names(path: str) -> list[str]:
    """Return the names of a path. Servers read percent-encoded letters as letters."""
    return [unquote(name) for name in path.split("/") if name]


def may_cost(method: str, path: str) -> bool:
    """Return whether a request below /v1 may cost something. Reads are free, and so is the management of files."""
    names = _names(path)
    if method in _READS or not names or names[-1] in _FREE_ENDS:
        return False
    return names[0] not in _FREE


def reads_response(method: str, path: str) -> str | None:
    """Return the id of the stored response that a request reads or cancels, or ``None``."""
    match _names(path):
        case ["responses", id] if method == "GET":
            return id
        case ["responses", id, "cancel"] if method == "POST":
            return id
    return None


def is_json(scope: Scope) -> bool:
    """Return whether a request's body is JSON by its content type, or has no content type."""
    kind = header(scope, b"content-type")
    return has_body(scope) and (kind is None or "json" in kind.lower())


def has_body(scope: Scope) -> bool:
    """Return whether the request has a body."""
    return header(scope, b"content-length") not in (None, "0") or header(scope, b"transfer-encoding") is not None
