"""Serve ``POST /compaction/mcp``: tools that search and read the caller's archive, over MCP's streamable HTTP."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.types import Message, Receive, Scope, Send

from proxy.endpoints.records import PRIVATE
from proxy.errors import MethodNotAllowed, NotInstalled, ProxyError
from proxy.http.request_body import ClientLeft, Sent, answer_error, leaving, read_body
from proxy.pipeline.exchange import begin_request
from proxy.pipeline.runtime import Runtime

if TYPE_CHECKING:
    from proxy.endpoints.mcp_tools import McpTools

PATH = "/compaction/mcp"

BODY_BYTES = 1_000_000  # Maximum bytes of a message. Calls have a few hundred.


class McpEndpoint:
    """The MCP server. It has no sessions, so that any replica can serve any request."""

    def __init__(self, service: Runtime) -> None:
        self._service = service
        self._tools: McpTools | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ClientLeft:
            return
        except MethodNotAllowed as error:
            await answer_error(send, error, [("allow", "POST"), PRIVATE])
        except ProxyError as error:
            await answer_error(send, error, [PRIVATE], receive=receive)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        context = begin_request(service, scope, forwarded=False)
        if scope["method"] != "POST":
            # A GET would open a stream of the server's own messages, and a DELETE would end a session.
            raise MethodNotAllowed(f"This path doesn't support {scope['method']}. Use POST. It has no sessions.")
        caller = context.caller
        with service.access.bodies.lease() as held:
            async with service.access.quotas.admit(caller):
                limit = min(context.configuration.settings.server.body_limit, BODY_BYTES)
                body = await read_body(scope, receive, limit, held)
                with leaving(receive, send if isinstance(send, Sent) else None):
                    tools = await self._loaded()
                    most = caller.policy.recall.max_tokens
                    await tools.serve(caller.tenant, most, scope, body, receive, _private(send))

    async def _loaded(self) -> McpTools:
        """Return the tools. The first call imports the SDK, which takes most of a second and 25 MB."""
        if self._tools is None:
            if find_spec("mcp") is None:
                raise NotInstalled(
                    "This path needs the package mcp. Fix: have the operator run pip install 'mcp>=2.3'."
                )
            module = await asyncio.to_thread(import_module, "proxy.endpoints.mcp_tools")
            self._tools = module.McpTools(self._service.archive_reader)
        return self._tools


def _private(send: Send) -> Send:
    """Return a ``send`` that keeps responses out of caches."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], tuple(part.encode() for part in PRIVATE)]
            message = {**message, "headers": headers}
        await send(message)

    return marked
