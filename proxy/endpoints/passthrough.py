"""Every path under /v1 but chat completions: the request and its response are forwarded as streams, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message, Receive, Scope

from proxy.access.admission import BodyLease
from proxy.access.authenticator import Caller
from proxy.access.spending import limit_of
from proxy.dialects.apis import CHAT
from proxy.dialects.chat.request import ChatRequest
from proxy.endpoints.forwarded_costs import (
    SAMPLE_BYTES,
    WHOLE_BYTES,
    PaidCall,
    has_body,
    is_json,
    may_cost,
    reads_response,
    tail_of,
)
from proxy.endpoints.paths import AZURE, DEPLOYMENT, PREFIX, error_shape, is_anthropic
from proxy.endpoints.reply import send_answer
from proxy.endpoints.restrictions import check_body, check_path
from proxy.errors import NotFound, ProxyError
from proxy.http.headers import VIA, Own, for_upstream
from proxy.http.request_body import ClientLeft, Sent, answer_error, arriving, header, leaving, read_body
from proxy.pipeline.context import RequestContext, begin_request
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.services import Services
from proxy.telemetry.trace_context import with_trace
from proxy.upstream.relay import RelayTransport, without_api_version

_OF_THE_BODY = ("content-encoding", "content-length")
_DOTS = frozenset({".", ".."})


class PassThrough:
    """Any method, any path under /v1, to the first upstream that speaks the client's API."""

    def __init__(self, service: Services) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        """Serve one request."""
        try:
            await self._serve(scope, receive, send)
        except ClientLeft:
            return
        except ProxyError as error:
            await answer_error(send, error, receive=receive, shape=error_shape(scope))

    async def _serve(self, scope: Scope, receive: Receive, send: Sent) -> None:
        service = self._service
        context = begin_request(service, scope)
        async with service.quotas.admit(context.caller):
            with service.bodies.lease() as held:
                await self._passed(context, receive, send, held)

    async def _passed(self, context: RequestContext, receive: Receive, send: Sent, held: BodyLease) -> None:
        scope, caller, configuration = context.scope, context.caller, context.configuration
        check_path(scope, caller)
        path = upstream_path(scope)
        anthropic = is_anthropic(scope)
        upstream = configuration.upstreams.first(anthropic=anthropic)
        relay = await configuration.upstreams.relay(upstream)
        headers = for_upstream(scope["headers"])
        upload = Upload(receive)
        model: str | None = scope.get(DEPLOYMENT)
        paid = may_cost(scope["method"], path)
        if paid:
            await self._service.spending.check(caller)
        body: bytes | AsyncIterator[bytes] | None
        if caller.models is not None or (is_json(scope) and (model is not None or relay.names_model(path))):
            body, model = await self._read(scope, upload, caller, held)
        else:
            body = await self._body(scope, upload, held)
            headers += [(name, value) for name in _OF_THE_BODY if (value := header(scope, name.encode())) is not None]
        url = upstream_url(scope, relay, path, model)
        read = reads_response(scope["method"], path)
        pending = None if read is None else await self._service.background.find(caller.tenant, read)
        call = PaidCall(self._service, context, upstream, body if isinstance(body, bytes) else b"")
        if paid or pending is not None:
            await call.begin(model if pending is None else pending.model, reserves=paid)
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
                    answer = await relay.request(scope["method"], url, headers, body, timeout)
                    if counts:
                        meter.watch(answer)
                # A stream may take hours, and the body can't be sent again.
                del body
                held.shrink(0)
                context.record.verdict = "unsupported"
                start = ResponseStart(answer, b"", False, None, CHAT.answers)
                headers = [(Own.VERDICT, "unsupported"), (Own.ID, context.record.id)]
                await send_answer(send, start, headers, shape=error_shape(scope))
        finally:
            end = await call.settle(upload.size, bytes(upload.head))
            if read is not None and pending is not None:
                ended = end is not None and end.finish_reason is not None
                await self._service.background.correct(caller.tenant, read, pending, context.record, ended=ended)

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
        """Return the next message of the connection."""
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
        with arriving() as body_in_time:
            async for chunk in self:
                body_in_time.came(len(chunk))
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
