"""Read limits on tokens per minute that one request alone exceeds. Only a smaller request helps, not waiting.

OpenAI (429) and Groq (413): "Request too large for … on tokens per minute (TPM): Limit 6000, Requested 18000". If the
request is smaller than the limit, the error is an ordinary rate limit.
"""

from __future__ import annotations

import re

from proxy.overflow.figures import NUMBER, amount
from proxy.overflow.reading import SMALLEST_LIMIT, OverflowReading

_PER_TIME = re.compile(
    r"\btokens? (?:per|/) ?(?:min(?:ute)?|day|hour)\b|\btp[md]\b|\btokens?[_-]per[_-](?:minute|day)\b"
)
_OUTPUT = re.compile(r"\boutput tokens per\b|\bcompletion tokens per\b")
_LIMIT = re.compile(rf"\blimit(?: is| of)?\W{{0,3}}(?P<n>{NUMBER})")
_REQUESTED = re.compile(rf"\brequested(?: tokens)?\W{{0,3}}(?P<n>{NUMBER})")


def read(text: str) -> OverflowReading | None:
    """Return the limit if the text states that one request exceeds a rate limit on tokens; ``None`` otherwise.

    The requested size includes the output, so it isn't the size of the prompt.
    """
    lowered = text.lower()
    if not _PER_TIME.search(lowered) or _OUTPUT.search(lowered):
        return None
    limit, requested = _LIMIT.search(lowered), _REQUESTED.search(lowered)
    if limit is None or requested is None:
        return None
    most, size = amount(limit["n"]), amount(requested["n"])
    return OverflowReading("input_plus_output", most, "total") if size > most >= SMALLEST_LIMIT else None
