"""Every path under /v1 but chat completions: the request and its answer travel as streams, untouched."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.types import Receive, Scope, Send

from proxy.answering import send_answer
from proxy.door import ClientLeft, answer_error, header, leaving, read_body
from proxy.errors import ModelNotAllowed, ProxyError
from proxy.headers import VIA, for_upstream
from proxy.hops import checked_hops
from proxy.service import Service
from proxy.teams import Caller, may_use
from proxy.upstream.opening import Opening

PREFIX = "/v1"


class PassThrough:
    """Any method, any path under /v1, to the first upstream."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            await self._serve(scope, receive, send)
        except ClientLeft:
            return
        except ProxyError as error:
            await answer_error(send, error)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        hops = checked_hops(scope, service.instance)
        caller = service.teams.identify(header(scope, b"authorization"), header(scope, b"api-key"))
        lane = await service.upstreams.relay(next(iter(service.settings.upstreams)))
        headers = for_upstream(scope["headers"])
        encoding = header(scope, b"content-encoding")
        body: bytes | AsyncIterator[bytes] | None
        if caller.models is not None and has_body(scope):
            body = await self._judged(scope, receive, caller)
        elif has_body(scope):
            body = body_chunks(receive)
            if encoding is not None:
                headers.append(("content-encoding", encoding))
            if (length := header(scope, b"content-length")) is not None:
                headers.append(("content-length", length))
        else:
            body = None
        url = lane.url(upstream_path(scope), scope["query_string"].decode("latin-1"))
        headers = lane.headers([*headers, (VIA, hops)], caller.credential)
        timeout = service.settings.server.deadline
        if body is None or isinstance(body, bytes):
            if body is None:
                await drained(receive)
            async with leaving(receive):
                answer = await lane.connections.send(scope["method"], url, headers, body, timeout)
                await send_answer(send, Opening(answer, b"", False, None), [])
            return
        # While the body is still coming, reading it is what notices that the client has left.
        answer = await lane.connections.send(scope["method"], url, headers, body, timeout)
        async with leaving(receive):
            await send_answer(send, Opening(answer, b"", False, None), [])

    async def _judged(self, scope: Scope, receive: Receive, caller: Caller) -> bytes:
        """The body of a caller who may use some models only, once it is seen to ask for one of them."""
        raw = await read_body(scope, receive, self._service.settings.server.body_limit)
        try:
            asked = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            asked = None
        model = asked.get("model") if isinstance(asked, dict) else None
        if not isinstance(model, str) or not may_use(caller, model):
            raise ModelNotAllowed(
                "This key may use some models only, and this request names none of them in a JSON body. "
                "Name one of them, or ask the operator of this proxy.",
                param="model",
            )
        return raw


def has_body(scope: Scope) -> bool:
    """Whether the request announces a body."""
    return header(scope, b"content-length") not in (None, "0") or header(scope, b"transfer-encoding") is not None


def upstream_path(scope: Scope) -> str:
    """The path below /v1, spelled as the client spelled it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.split(b"?")[0].decode("latin-1")[len(PREFIX) :]


async def drained(receive: Receive) -> None:
    """Read the empty body of a request that has none, so that what comes next is the client's leaving."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if not message.get("more_body", False):
            return


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ``ClientLeft`` if it breaks off, which ends the upstream's request too."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if chunk := message.get("body", b""):
            yield chunk
        if not message.get("more_body", False):
            return
