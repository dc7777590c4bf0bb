"""Decide by its first bytes whether a response without a stream's content type is an answer or may be an error."""

from __future__ import annotations

import re

from proxy.dialects import first_bytes

_CHOICE = b'"choices":[{'
_TEXT = b'"content":"'

_MARKS = re.compile(
    rb"""(?P<begin> "choices" \s{0,99} : \s{0,99} \[ \s{0,99} \{ )
    | (?P<written>
        "(?: content | text | refusal | reasoning | reasoning_content )" \s{0,99} : \s{0,99} "[^"]
      | "(?: content | tool_calls | reasoning_details )" \s{0,99} : \s{0,99} \[ \s{0,99} \{
      | "(?: function_call | audio )" \s{0,99} : \s{0,99} \{
      )
    | (?P<error> "error" \s{0,99} : \s{0,99} [^\sn] )""",
    re.VERBOSE,
)
"""JSON strings can't match, because they escape quotation marks."""


def fast_path(first: bytes) -> bool:
    """Return whether the first bytes have the usual form of an answer: a text, and no error before it.

    This gives the same result as ``ContentDetector``, faster.
    """
    choice = first.find(_CHOICE)
    text = first.find(_TEXT, choice)
    written = first[text + len(_TEXT) : text + len(_TEXT) + 1]
    return choice > 0 and text > 0 and written not in (b"", b'"') and first.find(b'"error"', 0, text) < 0


class ContentDetector(first_bytes.ContentDetector):
    """Checks an answer as it arrives: a choice with content."""

    def __init__(self) -> None:
        super().__init__(_MARKS, inside=False)
