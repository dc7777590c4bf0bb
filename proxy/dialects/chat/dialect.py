"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.dialects import dialect
from proxy.dialects.answers import ItemSink
from proxy.dialects.chat import upstream_counts
from proxy.dialects.chat.answers import ChatAnswers
from proxy.dialects.chat.counting import Counter
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.chat.rounds import ChatTool
from proxy.dialects.counting import key_of
from proxy.errors import ErrorShape
from proxy.http.heartbeat import COMMENT
from proxy.limits.profiles.profile import Profile


class ChatDialect:
    """See ``dialects.dialect.Dialect``."""

    name = "chat"
    path = "/chat/completions"
    heartbeat = COMMENT
    errors: ErrorShape = "openai"
    answers = ChatAnswers()
    evidence: dialect.Evidence = upstream_counts
    hidden_tool = ChatTool()
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
