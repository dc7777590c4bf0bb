"""Serve ``GET /compaction/archive/{id}``: the messages that a compaction removed, for the caller that sent them."""

from __future__ import annotations

import asyncio
import re

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from proxy.errors import ArchiveUnavailable, MethodNotAllowed, NotFound, ProxyError
from proxy.http.headers import encoded
from proxy.http.request_body import answer_error
from proxy.pipeline.exchange import begin_request
from proxy.pipeline.services import Services
from proxy.store import StoreFailed
from proxy.store.archive import Found

log = structlog.get_logger(__name__)

PATH = "/compaction/archive/{id:path}"

_ID = re.compile(r"[0-9a-f]{20}")
_REQUEST_ID = re.compile(r"[0-9a-f]{16}")
_FIX = "Copy the archive id from the note in the conversation that replaces the removed text. No header contains it."

_PRIVATE = ("cache-control", "private, no-store")


class ArchiveEndpoint:
    """The archive of the caller's own tenant."""

    def __init__(self, service: Services) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await self._body(scope)
        except MethodNotAllowed as error:
            await answer_error(send, error, [("allow", "GET")])
        except ProxyError as error:
            await answer_error(send, error, [_PRIVATE])
        else:
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), _PRIVATE]
            await send({"type": "http.response.start", "status": 200, "headers": encoded(headers)})
            await send({"type": "http.response.body", "body": body})

    async def _body(self, scope: Scope) -> bytes:
        if scope["method"] != "GET":
            raise MethodNotAllowed(f"This path doesn't support {scope['method']}. Use GET.")
        context = begin_request(self._service, scope, forwarded=False)
        async with self._service.quotas.admit(context.caller):
            return await self._entry(context.caller.tenant, scope["path_params"]["id"])

    async def _entry(self, tenant: str, id: str) -> bytes:
        if not _ID.fullmatch(id):
            if _REQUEST_ID.fullmatch(id):
                raise NotFound(f"This is the id of a request, from the header x-compaction-id. {_FIX}")
            raise NotFound(f"This isn't an archive id. An archive id has 20 lowercase hexadecimal digits. {_FIX}")
        try:
            found = await self._service.archive.fetch(tenant, id)
        except StoreFailed as failure:
            log.warning("store.read_failed", reason=str(failure))
            raise ArchiveUnavailable("The proxy can't read its archive at the moment. Try again.") from failure
        if found is None:
            raise NotFound(
                "Your key has no archive entry with this id. It may have expired, or belong to another key or team. "
                "Use the key that sent the conversation, or read the messages from the application's own history."
            )
        # Encoding megabytes takes too long for the event loop.
        return await asyncio.to_thread(_answer, id, found)


def _answer(id: str, found: Found) -> bytes:
    """Return the body of the response. The messages keep their original bytes."""
    return msgspec.json.encode(
        {
            "object": "compaction.archive",
            "id": id,
            "complete": found.complete,
            "messages": [msgspec.Raw(message) for message in found.messages],
        }
    )
