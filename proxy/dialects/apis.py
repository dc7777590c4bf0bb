"""The table of APIs, and how to read a body or a unit whose API isn't known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.dialects.answers import Answers, ItemReader, ItemSink
from proxy.dialects.chat.answers import ChatAnswers
from proxy.dialects.chat.counting import ChatCounter, ChatEvidence
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.chat.rounds import ChatTool
from proxy.dialects.counting import Counter, Evidence
from proxy.dialects.messages.answers import MessagesAnswers
from proxy.dialects.messages.counting import MessagesCounter, MessagesEvidence
from proxy.dialects.messages.request import MessagesRequest
from proxy.dialects.messages.rounds import MessagesTool
from proxy.dialects.parts import CHAT as CHAT_PARTS
from proxy.dialects.parts import MESSAGES as MESSAGES_PARTS
from proxy.dialects.parts import RESPONSES as RESPONSES_PARTS
from proxy.dialects.parts import SILENT
from proxy.dialects.request import Request
from proxy.dialects.responses.answers import OutputItemReader, ResponsesAnswers
from proxy.dialects.responses.counting import ResponsesCounter, ResponsesEvidence
from proxy.dialects.responses.request import ResponsesRequest
from proxy.dialects.responses.rounds import ResponsesTool
from proxy.dialects.responses.units import items_of
from proxy.dialects.rounds import HiddenTool
from proxy.dialects.walk import row_of, strings
from proxy.errors import BadBody, ErrorShape
from proxy.http.sse import COMMENT


def _no_items(sink: ItemSink) -> None:
    """Return no reader: an API without references to items."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API for conversations.

    - ``name`` is its name in settings, records, and metrics. ``path`` is the path of its endpoint below ``/v1``, and at
      the upstream below its base URL. ``errors`` is the shape of its errors.
    - ``request`` parses and rewrites a body.
    - ``counters`` counts tokens. Its ``format`` are the API's units.
    - ``evidence`` tells which requests show how an upstream counts.
    - ``answers`` reads responses.
    - ``hidden_tool`` hides a tool in requests and responses; ``None`` if the proxy can't.
    - ``item_reader`` returns a reader that passes each output item of an answer to the sink; ``None`` if the API has no
      references to items.
    - ``heartbeat`` keeps a stream's connection alive before the response: a comment, or the API's own event.
    """

    name: str
    path: str
    errors: ErrorShape
    request: type[Request]
    counters: type[Counter]
    evidence: Evidence
    answers: Answers
    hidden_tool: HiddenTool | None = None
    item_reader: Callable[[ItemSink], ItemReader | None] = _no_items
    heartbeat: bytes = COMMENT


CHAT = Dialect(
    name="chat",
    path="/chat/completions",
    errors="openai",
    request=ChatRequest,
    counters=ChatCounter,
    evidence=ChatEvidence(),
    answers=ChatAnswers(),
    hidden_tool=ChatTool(),
)

RESPONSES = Dialect(
    name="responses",
    path="/responses",
    errors="responses",
    request=ResponsesRequest,
    counters=ResponsesCounter,
    evidence=ResponsesEvidence(),
    answers=ResponsesAnswers(),
    hidden_tool=ResponsesTool(),
    item_reader=OutputItemReader,
)

MESSAGES = Dialect(
    name="messages",
    path="/messages",
    errors="anthropic",
    request=MessagesRequest,
    counters=MessagesCounter,
    evidence=MessagesEvidence(),
    answers=MessagesAnswers(),
    hidden_tool=MessagesTool(),
    heartbeat=b'event: ping\ndata: {"type": "ping"}\n\n',
)

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (CHAT, RESPONSES, MESSAGES)}

_BLOCKS = MESSAGES_PARTS.keys() - CHAT_PARTS.keys() | {"tool_use", "tool_result", "redacted_thinking"}
"""The types of blocks by which a body of messages is recognized as Anthropic's."""

_PARTS = {**CHAT_PARTS, **RESPONSES_PARTS, **MESSAGES_PARTS}


def recognized(raw: bytes) -> Dialect:
    """Return the dialect that a body fits. A body that fits several, such as one with short texts only, is chat's.

    Raises ``msgspec.DecodeError``, ``UnicodeDecodeError``, or ``RecursionError`` for a body that isn't JSON.
    """
    body: Any = msgspec.json.decode(raw)
    if not isinstance(body, dict):
        return CHAT
    if "input" in body and "messages" not in body:
        return RESPONSES
    messages = body.get("messages")
    messages = [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    if any("type" in one and ("role" not in one or one["type"] == "message") for one in messages):
        return RESPONSES
    contents = [one.get("content") for one in messages]
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    used = any(isinstance(block, dict) and block.get("type") in _BLOCKS for block in blocks)
    return MESSAGES if used or "system" in body else CHAT


SYSTEM_FIELDS = {"messages": "system", "responses": "instructions"}
"""The field of each API for instructions outside of the messages. Chat completions have none."""


def body_of(
    dialect: Dialect, model: bytes, messages: bytes, tools: bytes | None = None, system: bytes | None = None
) -> bytes:
    """Return a body of an API with a conversation. All arguments are JSON.

    Raises ``BadBody`` if the API has no field for ``system``.
    """
    fields = {"model": model, dialect.request.CONVERSATION: messages, "tools": tools}
    if system is not None:
        if dialect.name not in SYSTEM_FIELDS:
            raise BadBody("Chat completions have no 'system'. Send a message with the role system.", param="system")
        fields[SYSTEM_FIELDS[dialect.name]] = system
    return msgspec.json.encode({name: msgspec.Raw(raw) for name, raw in fields.items() if raw is not None})


def archived_text(raw: bytes) -> tuple[str, str]:
    """Return the role, or else the type, of a chat message, a message of blocks, or a response's items, and the text.

    The role of results is ``tool``, also in messages of blocks that have nothing else. Items have that of the first.
    """
    items = items_of(raw)
    unit = items[0] if items else {}
    role = unit.get("role") or unit.get("type")
    blocks = unit.get("content")
    if (
        isinstance(blocks, list)
        and blocks
        and all(isinstance(one, dict) and one.get("type") == "tool_result" for one in blocks)
    ):
        role = "tool"
    return role if isinstance(role, str) else "message", "\n".join(filter(None, _texts(items)))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within a message, in order. Structured arguments become JSON."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield "" if item.startswith("data:") else item
        elif isinstance(item, list):
            waiting += reversed(item)
        elif isinstance(item, dict):
            row = row_of(item, _PARTS)
            if row.plays in ("hosted", "media") and row.reads is not None and not row.arguments:
                yield from (text for name, text in strings(item, _PARTS, row) if name)
                continue
            inner = [
                json.dumps(field, ensure_ascii=False) if name == row.arguments and isinstance(field, dict) else field
                for name, field in item.items()
                if name not in SILENT and name != "data"
            ]
            waiting += reversed(inner)
