"""Every path under /v1 but chat completions: the request and its answer travel as streams, untouched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message, Receive, Scope

from proxy.admission import Holding
from proxy.answering import send_answer
from proxy.body import parse
from proxy.configuration import Configuration
from proxy.door import ClientLeft, Sent, answer_error, arriving, header, leaving, read_body
from proxy.errors import ModelNotAllowed, NotFound, ProxyError
from proxy.headers import VIA, for_upstream
from proxy.hops import checked_hops
from proxy.service import Service
from proxy.teams import Caller, may_use
from proxy.upstream.opening import Opening

PREFIX = "/v1"

WHOLE_BYTES = 1_000_000
"""A body that says it is at most so large is read before it is sent on."""

_OF_THE_BODY = ("content-encoding", "content-length")
_DOTS = frozenset({".", ".."})


class PassThrough:
    """Any method, any path under /v1, to the first upstream."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Sent) -> None:
        """Serve one request."""
        try:
            await self._serve(scope, receive, send)
        except ClientLeft:
            return
        except ProxyError as error:
            await answer_error(send, error, receive=receive)

    async def _serve(self, scope: Scope, receive: Receive, send: Sent) -> None:
        service = self._service
        configuration = service.configuration
        hops = checked_hops(scope, service.instance)
        caller = configuration.teams.identify(header(scope, b"authorization"), header(scope, b"api-key"))
        async with service.quotas.admitted(caller):
            with service.bodies.holding() as held:
                await self._passed(configuration, scope, receive, send, caller, hops, held)

    async def _passed(
        self,
        configuration: Configuration,
        scope: Scope,
        receive: Receive,
        send: Sent,
        caller: Caller,
        hops: str,
        held: Holding,
    ) -> None:
        lane = await configuration.upstreams.relay(next(iter(configuration.settings.upstreams)))
        headers = for_upstream(scope["headers"])
        url = lane.url(upstream_path(scope), quoted(scope["query_string"]))
        upload = Upload(receive)
        body = await self._body(scope, upload, caller, held)
        if caller.models is None:
            headers += [(name, value) for name in _OF_THE_BODY if (value := header(scope, name.encode())) is not None]
        headers = lane.headers([*headers, (VIA, hops)], caller.credential)
        timeout = configuration.settings.server.deadline
        # While the body is still coming, reading it is what notices that the client has left.
        with leaving(upload.after, send):
            answer = await lane.connections.send(scope["method"], url, headers, body, timeout)
            await send_answer(send, Opening(answer, b"", False, None), [])

    async def _body(
        self, scope: Scope, upload: Upload, caller: Caller, held: Holding
    ) -> bytes | AsyncIterator[bytes] | None:
        """What to send: nothing, a body that is there, or one that is still coming."""
        if not has_body(scope):
            await upload.whole()
            return None
        if caller.models is not None:
            return await self._judged(scope, upload, caller, held)
        # A small body is read first, so that a slow client doesn't hold a connection to the upstream.
        announced = header(scope, b"content-length")
        if announced is None or int(announced) > WHOLE_BYTES:
            return aiter(upload)
        if not held.grown(int(announced)):
            await held.wait(int(announced))
        return await upload.whole()

    async def _judged(self, scope: Scope, upload: Upload, caller: Caller, held: Holding) -> bytes:
        """The body of a caller who may use some models only, once it is seen to ask for one of them."""
        raw = await read_body(scope, upload.receive, self._service.settings.server.body_limit, held)
        model = parse(raw).model
        if model is None or not may_use(caller, model):
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
    """The path below /v1, spelled as the client spelled it. Raises ``NotFound`` for one that leads out of it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    names = scope["path"].replace("\\", "/").split("/")
    # Java servers cut a name at its semicolon first.
    if any(name.partition(";")[0] in _DOTS for name in names):
        raise NotFound("A path with dots in the place of a name leads nowhere. Write the path without them.")
    return quoted(raw.split(b"?")[0])[len(PREFIX) :]


def quoted(part: bytes) -> str:
    """A part of an address as it came; what no address may have is escaped."""
    return "".join(chr(byte) if 0x20 < byte < 0x7F else f"%{byte:02X}" for byte in part)


class Upload:
    """A body as it comes. Raises ``ClientLeft`` if it breaks off, which ends the upstream's request too."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._finished = asyncio.Event()

    async def receive(self) -> Message:
        """The next message of the connection."""
        message = await self._receive()
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
        """All of it. Raises ``BodyTooSlow``."""
        chunks = []
        with arriving() as body_in_time:
            async for chunk in self:
                body_in_time.came(len(chunk))
                chunks.append(chunk)
        return b"".join(chunks)

    async def after(self) -> Message:
        """What comes once the body is there, which can only be the client's leaving."""
        await self._finished.wait()
        return await self._receive()


async def drained(receive: Receive) -> None:
    """Read and throw away the body of a request that should have none: what comes next is the client's leaving."""
    async for _ in Upload(receive):
        pass
