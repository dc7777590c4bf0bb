"""OpenAI's Responses API: ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.dialects import dialect
from proxy.dialects.answers import ItemSink
from proxy.dialects.responses import evidence as usage_evidence
from proxy.dialects.responses.answers import OutputItemReader, ResponsesAnswers
from proxy.dialects.responses.counting import Counter, counter_key
from proxy.dialects.responses.native import ResponsesCompaction
from proxy.dialects.responses.request import ResponsesRequest
from proxy.dialects.responses.rounds import ResponsesTool
from proxy.errors import ErrorShape
from proxy.http.heartbeat import COMMENT
from proxy.limits.profiles.profile import Profile


class ResponsesDialect:
    """See ``dialects.dialect.Dialect``."""

    name = "responses"
    path = "/responses"
    heartbeat = COMMENT
    errors: ErrorShape = "openai"
    answers = ResponsesAnswers()
    hidden_tool = ResponsesTool()
    native: dialect.NativeCompaction | None = ResponsesCompaction()
    evidence: dialect.Evidence = usage_evidence

    async def parse(self, raw: bytes) -> ResponsesRequest:
        return await ResponsesRequest.read(raw)

    def item_reader(self, sink: ItemSink) -> OutputItemReader:
        return OutputItemReader(sink)

    def counter(self, profile: Profile) -> Counter:
        return Counter(profile)

    def counter_key(self, profile: Profile) -> Hashable:
        return counter_key(profile)


RESPONSES: dialect.Dialect = ResponsesDialect()
