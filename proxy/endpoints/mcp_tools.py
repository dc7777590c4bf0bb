"""The tools of the MCP server, on the official SDK. Only ``endpoints.mcp`` imports this module, at its first request.

See https://modelcontextprotocol.io/specification.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import structlog
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from proxy import __version__
from proxy.constants import UNDECODABLE
from proxy.recall.search import LONGEST_QUERY
from proxy.recall.tool import EXCHANGES, FAILED, Query, Reader
from proxy.store import StoreFailed
from proxy.telemetry.metrics import RECALLS

log = structlog.get_logger(__name__)

# The manager logs its start and end at INFO, here for each request.
logging.getLogger("mcp").setLevel(logging.WARNING)

NAME = "compaction-proxy"

INSTRUCTIONS = (
    "Use these tools when you need a detail of this conversation that was removed to save space. The text that "
    "replaces the removed messages names an archive id, as in "
    '"The complete earlier messages are in the archive as <id>".'
)

BYTES_PER_TOKEN = 3
"""UTF-8 bytes that count as one token. The tokenizer of the client's model isn't known; most texts have 3 to 5."""

Id = Annotated[
    str,
    msgspec.Meta(
        pattern="^[0-9a-f]{20}$",
        description="The archive id of 20 hexadecimal digits that the conversation names.",
    ),
]


class SearchArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    query: Annotated[
        str, msgspec.Meta(min_length=1, max_length=LONGEST_QUERY, description="Words that the messages contain.")
    ]
    id: Id
    limit: Annotated[int, msgspec.Meta(ge=1, le=20, description="The maximum number of exchanges to quote.")] = (
        EXCHANGES
    )


class ReadArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Id
    offset: Annotated[int, msgspec.Meta(ge=0, description="The character to continue reading from.")] = 0


class _Envelope(msgspec.Struct):
    """A request, a notification, or a response."""

    jsonrpc: Literal["2.0"]
    id: str | int | msgspec.UnsetType | None = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    result: Any = msgspec.UNSET
    error: Any = msgspec.UNSET


_ARGUMENTS: dict[str, type[SearchArguments | ReadArguments]] = {
    "search_earlier_messages": SearchArguments,
    "read_earlier_messages": ReadArguments,
}
_DESCRIPTIONS = {
    "search_earlier_messages": (
        "Search the messages of this conversation that were removed to save space, such as for an exact value, an "
        "error message, or the content of a file or a tool result. Returns quotes, the best first. The search covers "
        "the archive entry id and all messages before it."
    ),
    "read_earlier_messages": (
        "Read the messages of this conversation that were removed to save space, oldest first, from the character "
        "offset on. The result states where to continue. A quote of search_earlier_messages states its offset."
    ),
}
_INVALID = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"The body must be one JSON-RPC 2.0 message."}}'
_MISSING = (
    "Your key has no archive entry {id}. It may have expired. Copy the id from the text in the conversation that "
    "replaces the removed messages, or continue without it."
)


def _schema(arguments: type) -> dict[str, Any]:
    schema: dict[str, Any]
    (schema,) = msgspec.json.schema_components([arguments])[1].values()
    del schema["title"]
    return schema


_TOOLS = [
    Tool(
        name=name,
        description=_DESCRIPTIONS[name],
        input_schema=_schema(arguments),
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )
    for name, arguments in _ARGUMENTS.items()
]


class McpTools:
    """Both tools, for any tenant."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def serve(
        self, tenant: str, max_tokens: int, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Serve one message of a tenant, whose body has been read. A result has about ``max_tokens`` tokens at most.

        Raises ``TooManyRequests``.
        """
        method = _method(body)
        if method is None:
            # Before 2026-07-28, the SDK answers with -32602 and quotes the body.
            await Response(_INVALID, 400, media_type="application/json")(scope, receive, send)
            return

        async def call(context: ServerRequestContext[Any, Any], params: CallToolRequestParams) -> CallToolResult:
            try:
                text, failed = await self._called(tenant, max_tokens, params.name, params.arguments or {})
            except MCPError:
                raise
            except Exception as error:
                # The SDK would send the client the message of the exception.
                log.exception("request.crashed", error=type(error).__name__)
                raise MCPError(INTERNAL_ERROR, "The proxy failed to process this call. Try again.") from None
            RECALLS.labels(outcome="failed" if failed else "answered").inc()
            return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)

        server: Server[Any] = Server(
            NAME, version=__version__, instructions=INSTRUCTIONS, on_list_tools=_list, on_call_tool=call
        )
        # The proxy exports its own spans.
        server.middleware.clear()
        # The manager's tasks end with the request, so a disconnect or a shutdown ends them as well.
        manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
        with self._reader.slot(tenant) if method == "tools/call" else contextlib.nullcontext():
            async with manager.run():
                await manager.handle_request(scope, _replayed(body, receive), send)

    async def _called(self, tenant: str, most: int, name: str, given: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text of a result, and whether it is an error. Raises ``MCPError`` for an unknown tool."""
        if name not in _ARGUMENTS:
            raise MCPError(INVALID_PARAMS, f"There is no tool {name[:60]!r}. Use {' or '.join(_ARGUMENTS)}.")
        try:
            # Models also send null for arguments that they omit, and numbers as text.
            present = {key: value for key, value in given.items() if value is not None}
            arguments = msgspec.convert(present, _ARGUMENTS[name], strict=False)
        except msgspec.ValidationError as error:
            return f"Invalid arguments: {error}", True
        if isinstance(arguments, SearchArguments):
            query = Query(arguments.query, arguments.id, limit=arguments.limit)
        else:
            query = Query(None, arguments.id, arguments.offset)
        try:
            with contextlib.closing(self._reader.conversation(tenant)) as archive:
                text = await archive.answer(query, _tokens, most)
        except StoreFailed:  # the guarded store logs it
            return FAILED, True
        if text is None:
            return _MISSING.format(id=arguments.id), True
        # JSON can't contain lone surrogates.
        return text.encode("utf-8", "replace").decode(), False


async def _list(context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None) -> ListToolsResult:
    return ListToolsResult(tools=_TOOLS)


def _method(body: bytes) -> str | None:
    """Return the method of a message, empty if it has none. ``None`` if the body is JSON, but not a message.

    The SDK answers bodies that aren't JSON.
    """
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE:
        return ""
    try:
        message = msgspec.convert(value, _Envelope)
    except msgspec.ValidationError:
        return None
    if message.method is message.result is message.error is msgspec.UNSET:
        return None
    return message.method if isinstance(message.method, str) else ""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with a body that has been read."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
