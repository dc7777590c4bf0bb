"""OpenAI's Responses API: ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Hashable

from proxy.dialects import dialect
from proxy.dialects.responses import answers, evidence
from proxy.dialects.responses.counting import Counter, counter_key
from proxy.dialects.responses.request import ResponsesRequest, parsed
from proxy.dialects.responses.state import continues
from proxy.dialects.tail import is_silence
from proxy.errors import ErrorShape
from proxy.http.heartbeat import COMMENT
from proxy.limits.profiles.profile import Profile
from proxy.overflow.silent import Finished

_USUAL = frozenset({None, "completed", "max_output_tokens"})


class _ResponsesAnswers:
    def fast_path(self, first: bytes) -> bool:
        return answers.fast_path(first)

    def content_detector(self) -> answers.ContentDetector:
        return answers.ContentDetector()

    def event_reader(self) -> answers.Start:
        return answers.Start()

    def tail(self) -> answers.AnswerTail:
        return answers.AnswerTail()

    def read_usage(self, body: bytes) -> Finished:
        return answers.read_usage(body)

    def is_silence(self, body: bytes) -> bool:
        return is_silence(body)

    def gives_up(self, body: bytes) -> bool:
        return answers.gives_up(body)

    def is_usual(self, reason: str | None) -> bool:
        return reason in _USUAL


class _ResponsesEvidence:
    def comparable(self, raw: bytes) -> bool:
        return evidence.comparable(raw)

    def adds_text(self, raw: bytes) -> bool:
        return evidence.adds_text(raw)

    def has_calls(self, unit: bytes) -> bool:
        return evidence.has_calls(unit)

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        return evidence.kept_text(unit, tools=tools)


class ResponsesDialect:
    """See ``dialects.dialect.Dialect``."""

    name = "responses"
    path = "/responses"
    heartbeat = COMMENT
    errors: ErrorShape = "openai"
    answers = _ResponsesAnswers()
    evidence = _ResponsesEvidence()

    async def parse(self, raw: bytes) -> ResponsesRequest:
        return await parsed(raw)

    def continues(self, raw: bytes) -> bool:
        return continues(raw)

    def counter(self, profile: Profile) -> Counter:
        return Counter(profile)

    def counter_key(self, profile: Profile) -> Hashable:
        return counter_key(profile)


RESPONSES: dialect.Dialect = ResponsesDialect()
