"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.dialects import dialect, hidden_tool, tail
from proxy.dialects.chat import first_bytes, hidden_calls, stream, upstream_counts, usage
from proxy.dialects.chat.counting import Counter
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.counting import key_of
from proxy.dialects.dialect import ItemSink
from proxy.errors import ErrorShape
from proxy.http.heartbeat import COMMENT
from proxy.limits.profiles.profile import Profile
from proxy.overflow.silent import Finished

_USUAL = frozenset({None, "stop", "tool_calls", "length", "function_call"})


class _ChatAnswers:
    def fast_path(self, first: bytes) -> bool:
        return first_bytes.fast_path(first)

    def content_detector(self) -> first_bytes.ContentDetector:
        return first_bytes.ContentDetector()

    def event_reader(self) -> stream.Start:
        return stream.Start()

    def tail(self) -> usage.AnswerTail:
        return usage.AnswerTail()

    def read_usage(self, body: bytes) -> Finished:
        return usage.read_usage(body)

    def is_silence(self, body: bytes) -> bool:
        return tail.is_silence(body)

    def gives_up(self, body: bytes) -> bool:
        return usage.gives_up(body)

    def is_usual(self, reason: str | None) -> bool:
        return reason in _USUAL


class ChatDialect:
    """See ``dialects.dialect.Dialect``."""

    name = "chat"
    path = "/chat/completions"
    heartbeat = COMMENT
    errors: ErrorShape = "openai"
    answers = _ChatAnswers()
    evidence: dialect.Evidence = upstream_counts
    hidden_tool: hidden_tool.HiddenTool | None = hidden_calls.HiddenTool()
    native: dialect.NativeCompaction | None = None

    def item_reader(self, sink: ItemSink) -> None:
        return None

    async def parse(self, raw: bytes) -> ChatRequest:
        return await ChatRequest.read(raw)

    def counter(self, profile: Profile) -> Counter:
        return Counter(profile)

    def counter_key(self, profile: Profile) -> Hashable:
        return key_of(profile)


CHAT: dialect.Dialect = ChatDialect()
