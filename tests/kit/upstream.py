"""The stand-in upstream of the tests, and an agent that works with it. Both are the demo's; import them from here.

``StandIn`` counts real tokens, validates conversations, and returns OpenAI's errors. ``EveryApi`` also serves the other
two APIs. ``Reply`` scripts an answer.
"""

from proxy.demo.agent import AGENTS, Agent, gather
from proxy.demo.apis import EveryApi
from proxy.demo.counting import RequestCounter, first_tokens, text_tokens
from proxy.demo.replies import (
    NOTES,
    WORDS_PER_CHUNK,
    Completion,
    Reply,
    Responder,
    ToolCall,
    event,
    is_summary_request,
    summarise,
)
from proxy.demo.script import decide
from proxy.demo.upstream import Received, StandIn
from proxy.demo.validity import faults

__all__ = [
    "AGENTS",
    "NOTES",
    "WORDS_PER_CHUNK",
    "Agent",
    "Completion",
    "EveryApi",
    "Received",
    "Reply",
    "RequestCounter",
    "Responder",
    "StandIn",
    "ToolCall",
    "decide",
    "event",
    "faults",
    "first_tokens",
    "gather",
    "is_summary_request",
    "summarise",
    "text_tokens",
]
