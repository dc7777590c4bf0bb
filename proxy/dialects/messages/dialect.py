"""Anthropic's Messages API: ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.dialects import dialect
from proxy.dialects.answers import ItemSink
from proxy.dialects.messages import upstream_counts
from proxy.dialects.messages.answers import MessagesAnswers
from proxy.dialects.messages.counting import Counter, key_of
from proxy.dialects.messages.native import MessagesCompaction
from proxy.dialects.messages.request import MessagesRequest
from proxy.dialects.messages.rounds import MessagesTool
from proxy.errors import ErrorShape
from proxy.limits.profiles.profile import Profile


class MessagesDialect:
    """See ``dialects.dialect.Dialect``."""

    name = "messages"
    path = "/messages"
    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'
    errors: ErrorShape = "anthropic"
    answers = MessagesAnswers()
    hidden_tool = MessagesTool()
    native: dialect.NativeCompaction | None = MessagesCompaction()
    evidence: dialect.Evidence = upstream_counts

    def item_reader(self, sink: ItemSink) -> None:
        return None

    async def parse(self, raw: bytes) -> MessagesRequest:
        return await MessagesRequest.read(raw)

    def counter(self, profile: Profile) -> Counter:
        return Counter(profile)

    def counter_key(self, profile: Profile) -> Hashable:
        return key_of(profile)


MESSAGES: dialect.Dialect = MessagesDialect()
