"""Define what an API for conversations is. Each API is a folder with these parts, and a row in ``apis``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.dialects.answers import Answers, ItemReader, ItemSink
from proxy.dialects.counting import Counter, Evidence
from proxy.dialects.request import Request
from proxy.dialects.rounds import HiddenTool
from proxy.errors import ErrorShape
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
    - ``item_reader`` returns a reader that
      passes each output item of an answer to the sink; ``None`` if the API has no references to items.
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
