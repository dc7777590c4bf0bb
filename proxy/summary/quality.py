"""Whether what a model wrote may stand for a conversation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.compaction.message import TextCounter

# A short answer that begins like this is a refusal, whatever the field it comes in.
_REFUSAL = re.compile(
    r"^\W*(?:i['’]?m sorry|i am sorry|sorry,|i can(?:no|['’])?t (?:help|assist|comply|do that|provide)|"
    r"i['’]?m (?:unable|not able) to|as an ai\b)",
    re.IGNORECASE,
)
_REFUSAL_CHARACTERS = 400


class SummaryRejected(Exception):
    """The text may not be used; the message says why, without quoting it."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a summary model answered."""

    text: str
    finish_reason: str | None
    refused: bool = False


def checked(written: Written, *, source_tokens: int, max_tokens: int, count: TextCounter) -> str:
    """The summary, at most ``max_tokens`` long.

    Raises ``SummaryRejected`` if it is empty, a refusal, broken off, or no smaller than its source.
    """
    text = written.text.strip()
    if written.refused or (len(text) <= _REFUSAL_CHARACTERS and _REFUSAL.match(text)):
        raise SummaryRejected("the model refused")
    if not text:
        raise SummaryRejected("the summary is empty")
    if written.finish_reason == "length":
        raise SummaryRejected("the summary was broken off")
    size = count(text)
    if size >= source_tokens:
        raise SummaryRejected("the summary is no smaller than what it stands for")
    return text if size <= max_tokens else _first_lines(text, max_tokens, count)


def _first_lines(text: str, max_tokens: int, count: TextCounter) -> str:
    """Whole lines from the beginning, as far as the tokens reach."""
    kept: list[str] = []
    left = max_tokens
    for line in text.splitlines():
        left -= count(line) + 1
        if left < 0:
            break
        kept.append(line)
    if not kept:
        raise SummaryRejected("the summary is one line that is too long")
    return "\n".join(kept)
