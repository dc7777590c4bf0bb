"""OpenAI's ``POST /responses/compact``: the user's messages and an encrypted item in place of items.

See developers.openai.com/api/docs/guides/compaction, November 2026.
"""

from __future__ import annotations

import msgspec

from proxy.dialects.dialect import NativeSummary
from proxy.dialects.request import NOTHING, UNREADABLE, fields_of, value_of
from proxy.dialects.responses.answers import ResponsesAnswers
from proxy.dialects.responses.units import PREFIX_TYPES, joined
from proxy.dialects.unit_json import decode
from proxy.overflow.silent import Finished

_ANSWERS = ResponsesAnswers()
_SENT = ("model", "input", "prompt_cache_key", "service_tier")


class _Answer(msgspec.Struct):
    output: list[msgspec.Raw]


class ResponsesCompaction:
    """See ``dialects.dialect.NativeCompaction``."""

    path = "/responses/compact"
    beta: str | None = None
    listed = False

    def accepts(self, raw: bytes) -> bool:
        return b'"context_management"' not in raw or not value_of(fields_of(raw).get("context_management", NOTHING))

    def request(self, sent: bytes, instructions: str, max_output: int) -> bytes | None:
        return msgspec.json.encode({name: value for name, value in fields_of(sent).items() if name in _SENT})

    def read(self, answer: bytes) -> NativeSummary | None:
        try:
            items = msgspec.json.decode(answer, type=_Answer).output
        except UNREADABLE:
            return None
        if not items or decode(items[-1]).get("type") not in PREFIX_TYPES:
            return None
        return NativeSummary(joined(items), "")

    def read_usage(self, body: bytes) -> Finished:
        return _ANSWERS.read_usage(body)
