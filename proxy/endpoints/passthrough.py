"""Every path under /v1 but those of conversations: forward requests and responses as streams, unchanged.

The proxy counts what these requests cost, and charges it to the caller's team.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from urllib.parse import unquote, unquote_to_bytes

import msgspec
from starlette.types import Message, Receive, Scope

from proxy.access.authenticator import Caller
from proxy.access.quotas import BodyLease
from proxy.access.spending import limit_of
from proxy.compaction.format import TextCounter
from proxy.config import Route
from proxy.constants import UNDECODABLE
from proxy.dialects.answers import AnswerTail
from proxy.dialects.apis import CHAT, MESSAGES, RESPONSES
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.counting import Counter
from proxy.dialects.request import leniently
from proxy.endpoints.paths import AZURE, DEPLOYMENT, PREFIX, error_shape, is_anthropic
from proxy.endpoints.reply import send_answer
from proxy.endpoints.restrictions import check_body, check_budget, check_path
from proxy.errors import ConfigurationError, NotFound, ProxyError
from proxy.http.decompression import Unpacking
from proxy.http.headers import VIA, Own, for_upstream
from proxy.http.request_body import ClientLeft, Sent, answer_error, body_time, header, leaving, read_body
from proxy.limits.prices import Price, price_from
from proxy.overflow.silent import Finished
from proxy.pipeline.billing import BYTES_A_TOKEN, EXPECTED_OUTPUT, pricing
from proxy.pipeline.exchange import RequestContext, begin_request
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.runtime import Runtime
from proxy.telemetry.record import Usage, record_of, shown_model, with_trace
from proxy.upstream.relay import RelayTransport, without_api_version
from proxy.upstream.transport import MESSAGES_PATH, RESPONSES_PATH

_OF_THE_BODY = ("content-encoding", "content-length")
_DOTS = frozenset({".", ".."})


class PassThrough:
    """Any method, any path under /v1, to the first upstream that speaks the client's API."""

    def __init__(self, service: Runtime) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        try:
            await self._serve(scope, receive, send)
        except ClientLeft:
            return
        except ProxyError as error:
            extra = [(Own.VERDICT, "none"), (Own.ID, record_of(scope).id)]
            await answer_error(send, error, extra, receive=receive, shape=error_shape(scope))

    async def _serve(self, scope: Scope, receive: Receive, send: Sent) -> None:
        service = self._service
        context = begin_request(service, scope)
        async with service.access.quotas.admit(context.caller):
            with service.access.bodies.lease() as held:
                await self._passed(context, receive, send, held)

    async def _passed(self, context: RequestContext, receive: Receive, send: Sent, held: BodyLease) -> None:
        scope, caller, configuration = context.scope, context.caller, context.configuration
        check_path(scope, caller)
        path = upstream_path(scope)
        anthropic = is_anthropic(scope)
        upstream = context.record.upstream = configuration.upstreams.first(anthropic=anthropic)
        relay = await configuration.upstreams.relay(upstream)
        headers = for_upstream(scope["headers"])
        upload = Upload(receive)
        model: str | None = scope.get(DEPLOYMENT)
        paid = may_cost(scope["method"], path, body=has_body(scope)) or b"_method" in scope["query_string"].lower()
        body: bytes | AsyncIterator[bytes] | None
        if caller.models is not None or (is_json(scope) and (model is not None or relay.names_model(path))):
            body, model = await self._read(scope, upload, caller, held)
        else:
            body = await self._body(scope, upload, held)
            headers += [(name, value) for name in _OF_THE_BODY if (value := header(scope, name.encode())) is not None]
        url = upstream_url(scope, relay, path, model)
        read = reads_response(scope["method"], path)
        pending = None if read is None else await self._service.money.background.find(caller.tenant, read)
        call = ForwardedCall(self._service, context, upstream, body if isinstance(body, bytes) else b"")
        if paid or pending is not None:
            # A variable would keep the body until the end of the answer.
            named = model if pending is None else pending.model
            await call.begin(named, body if isinstance(body, bytes) else b"", reserves=paid)
            if context.bill.price_of is not None or limit_of(caller) is not None:
                headers = [pair for pair in headers if pair[0] != "accept-encoding"]
        headers = with_trace([*headers, (VIA, context.via)], context.record.trace)
        headers = relay.headers(headers, caller.credential, anthropic=anthropic)
        timeout = configuration.settings.server.deadline
        counts = paid or pending is not None
        try:
            # While the body is arriving, reading it detects a disconnect.
            with leaving(upload.after, send):
                with context.bill.call(tail_of(path), 0) as meter:
                    meter.free, meter.writes = not counts, not path.startswith("/embeddings")
                    meter.draws = path.startswith("/images")
                    answer = await relay.request(scope["method"], url, headers, body, timeout)
                    if counts:
                        meter.watch(answer)
                # A stream may take hours, and the body can't be sent again.
                del body
                held.shrink(0)
                context.record.verdict = "unsupported"
                start = ResponseStart(answer, b"", False, None, CHAT.answers)
                headers = [(Own.VERDICT, "unsupported"), (Own.ID, context.record.id)]
                linger = context.bill.drain if counts and limit_of(caller) is not None else None
                await send_answer(send, start, headers, shape=error_shape(scope), linger=linger)
        finally:
            end = await call.settle(upload.size, bytes(upload.head))
            if read is not None and pending is not None:
                ended = end is not None and end.finish_reason is not None
                await self._service.money.background.correct(caller.tenant, read, pending, context.record, ended=ended)

    async def _body(self, scope: Scope, upload: Upload, held: BodyLease) -> bytes | AsyncIterator[bytes] | None:
        """Return the body to send: ``None``, the whole body, or an iterator over a body that is still arriving."""
        if not has_body(scope):
            await upload.whole()
            return None
        # A small body is read first, so that a slow client doesn't hold a connection to the upstream.
        announced = header(scope, b"content-length")
        if announced is None or int(announced) > WHOLE_BYTES:
            return aiter(upload)
        await held.more(int(announced))
        return await upload.whole()

    async def _read(
        self, scope: Scope, upload: Upload, caller: Caller, held: BodyLease
    ) -> tuple[bytes | None, str | None]:
        """Return a whole body, unpacked, and the model it names. A deployment in the path replaces that model.

        Raises ``ModelNotAllowed`` if the caller may not use it, besides the errors of ``read_body``.
        """
        raw = await read_body(scope, upload.receive, self._service.settings.server.body_limit, held)
        if not raw and scope["method"] in ("GET", "HEAD"):
            return None, None
        body = await ChatRequest.read_any(raw)
        if (deployment := scope.get(DEPLOYMENT)) is not None:
            body = body.named(deployment)
        if caller.models is not None:
            await check_body(scope, caller, body.raw)
        return body.raw, body.model


def upstream_url(scope: Scope, relay: RelayTransport, path: str, model: str | None) -> str:
    """Return the upstream's address for a request. Raises ``NotFound`` if that needs a model and there is none."""
    query = quoted(scope["query_string"])
    if scope.get(AZURE) and not relay.azure:
        query = without_api_version(query)
    if model is None and relay.names_model(path):
        raise NotFound("The upstream needs a deployment for this path. Send /openai/deployments/NAME/… instead.")
    return relay.url(path, query, model=model)


def upstream_path(scope: Scope) -> str:
    """Return the path below /v1, spelled as the client spelled it. Raises ``NotFound`` if it leads out of there.

    Some servers ignore everything after a semicolon in a name, so they read `..;` as two dots.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    names = scope["path"].replace("\\", "/").split("/")
    if not raw.startswith(PREFIX.encode() + b"/") or not _DOTS.isdisjoint(name.partition(";")[0] for name in names):
        raise NotFound("The path contains '.' or '..' as a name, or an encoded /v1. Send it without them.")
    return quoted(raw.split(b"?")[0])[len(PREFIX) :]


def quoted(part: bytes) -> str:
    """Return a part of a URL with invalid characters percent-encoded."""
    return "".join(chr(byte) if 0x20 < byte < 0x7F else f"%{byte:02X}" for byte in part)


class Upload:
    """A body that is arriving. Raises ``ClientLeft`` if it breaks off, which also ends the upstream's request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size = 0
        self.head = bytearray()
        """The beginning of the body."""
        self._finished = asyncio.Event()

    async def receive(self) -> Message:
        message = await self._receive()
        body = message.get("body", b"")
        self.size += len(body)
        if len(self.head) < SAMPLE_BYTES:
            self.head += body[: SAMPLE_BYTES - len(self.head)]
        if not message.get("more_body", False):
            self._finished.set()
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._finished.is_set():
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            if chunk := message.get("body", b""):
                yield chunk

    async def whole(self) -> bytes:
        """Return the whole body. Raises ``BodyTooSlow``."""
        chunks = []
        async with body_time() as came:
            async for chunk in self:
                came(self.size)
                chunks.append(chunk)
        return b"".join(chunks)

    async def after(self) -> Message:
        """Return the message after the body, which can only be a disconnect."""
        await self._finished.wait()
        return await self._receive()


async def drained(receive: Receive) -> None:
    """Read and discard a body, so that the next message can only be a disconnect."""
    async for _ in Upload(receive):
        pass


WHOLE_BYTES = 1_000_000  # a body with at most this Content-Length is read before the proxy contacts the upstream
INLINE_BYTES = 65_536  # bytes of a body that Python's parser reads on the event loop
SAMPLE_BYTES = 8_192  # bytes of a body that are kept to find its model and to count its tokens

# A few further headers may come before the value. Their number is bounded, so that the search takes linear time.
_FORM_FIELD = re.compile(rb'name="?model"?\r\n(?:[^\r\n]{1,200}+\r\n){0,4}+\r\n([^\r\n]{1,200})\r\n')
_FORM_VALUE = re.compile(rb"(?:^|&)model=([^&]{1,200})")
_FIELD = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')

_FREE = frozenset({"conversations", "files", "moderations", "tokenize", "detokenize", "uploads", "vector_stores"})
_FREE_PATHS = (
    ("messages", "count_tokens"),
    ("responses", "input_tokens"),
    ("responses", "*", "cancel"),
    ("batches", "*", "cancel"),
    ("messages", "batches", "*", "cancel"),
    ("fine_tuning", "jobs", "*", "cancel"),
    ("threads", "*", "runs", "*", "cancel"),
)
_PLAIN_PATH = re.compile(r"(?:/[\w.:~@-]+)+/?", re.ASCII)
"""A path that all servers read alike: without encodings, parameters, and empty names."""

_READS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


class ForwardedCall:
    """Counts what a forwarded request costs."""

    def __init__(self, service: Runtime, context: RequestContext, upstream: str, body: bytes) -> None:
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
        self._counter: Counter | None = None

    async def begin(self, model: str | None, raw: bytes, *, reserves: bool) -> None:
        """Find the price of the request, and reserve its probable cost. ``raw`` is the body if it's there.

        Raises ``SpendingExceeded``, and ``ModelNotAllowed`` for a model without a price.
        """
        context = self._context
        self._model = model or self._model
        context.bill.price_of = pricing(await self._price())
        if reserves:
            spending = self._service.money.spending
            await check_budget(spending, context.scope, context.caller, context.bill, self._model, raw)
            usage = Usage(self._size // BYTES_A_TOKEN, EXPECTED_OUTPUT)
            await spending.reserve(context.caller, context.record.id, context.bill.amount(usage))

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
            guess = _FIELD.search(head)
            guessed = "" if guess is None else guess[1].decode("utf-8", "replace")
            self._model = model_in(head, self._kind) or meter.model or guessed
            if self._model:
                context.bill.price_of = pricing(await self._price()) or context.bill.price_of
        context.record.model = shown_model(self._model) if self._model else None
        if self._counter is not None and not self._counter.ready:
            await asyncio.to_thread(self._counter.text, "")  # loads the encoding
        await context.bill.settle(context.record, self._tokens, self._count)
        return meter.end

    async def _price(self) -> Price | None:
        """Return the price of the model. If it's unknown and the team has a limit in US dollars, take the highest."""
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
            profile = await self._service.limits.profile(route, configuration)
            counter = await self._service.limits.measures.usable(profile, CHAT)
        except ConfigurationError:  # logged once, and reported by `/readyz`
            return None
        self._counter = counter
        return configuration.price(route, profile)

    async def _highest(self) -> Price | None:
        """Return the highest price that the configuration states, or that its models have."""
        settings = self._context.configuration.settings
        prices = [price_from(fields) for fields in settings.prices.values()]
        prices += [await self._price_of(model) for model in sorted(settings.model_names)]
        known = [price for price in prices if price is not None]
        return max(known, key=lambda price: price.base.input + price.base.output, default=None)

    @property
    def _count(self) -> TextCounter | None:
        return None if self._counter is None else self._counter.text

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
    except UNDECODABLE:
        # Python's parser reads other encodings, for example, but it's slower.
        value = leniently(body) if len(body) <= INLINE_BYTES else None
    name = value.get("model") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def tail_of(path: str) -> AnswerTail:
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


def may_cost(method: str, path: str, *, body: bool) -> bool:
    """Return whether a request below /v1 may cost something. Reads are free, and so is the management of files.

    Some servers generate for every method, so a read with a ``body`` counts as if the client had posted it.
    """
    if method in _READS and not body:
        return False
    names = path.strip("/").split("/")
    if not _PLAIN_PATH.fullmatch(path):
        return names != [""]
    return names[0] not in _FREE and not any(
        len(free) == len(names) and all(map(fnmatchcase, names, free)) for free in _FREE_PATHS
    )


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
    return header(scope, b"content-length") not in (None, "0") or header(scope, b"transfer-encoding") is not None
