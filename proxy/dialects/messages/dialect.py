"""Anthropic's Messages API: ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.dialects import dialect
from proxy.dialects.messages import upstream_counts
from proxy.dialects.messages.answers import MessagesAnswers
from proxy.dialects.messages.counting import Counter, key_of
from proxy.dialects.messages.request import MessagesRequest, continues, parsed
from proxy.errors import ErrorShape
from proxy.limits.profiles.profile import Profile


class _MessagesEvidence:
    def comparable(self, raw: bytes) -> bool:
        return upstream_counts.comparable(raw)

    def adds_text(self, raw: bytes) -> bool:
        return upstream_counts.adds_text(raw)

    def has_calls(self, unit: bytes) -> bool:
        return upstream_counts.has_calls(unit)

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        return upstream_counts.kept_text(unit, tools=tools)


class MessagesDialect:
    """See ``dialects.dialect.Dialect``."""

    name = "messages"
    path = "/messages"
    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'
    errors: ErrorShape = "anthropic"
    answers = MessagesAnswers()
    evidence = _MessagesEvidence()

    def continues(self, raw: bytes) -> bool:
        return continues(raw)

    async def parse(self, raw: bytes) -> MessagesRequest:
        return await parsed(raw)

    def counter(self, profile: Profile) -> Counter:
        return Counter(profile)

    def counter_key(self, profile: Profile) -> Hashable:
        return key_of(profile)


MESSAGES: dialect.Dialect = MessagesDialect()
