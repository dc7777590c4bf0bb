"""Check whether a model's text is usable as a summary."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from proxy.compaction.format import TextCounter

# A short answer that begins like this is a refusal or asks for the transcript again. Refusals in other languages pass
# unless the API marks them or they have another fault.
_REFUSAL = re.compile(
    r"""^\W*(?:
    i['’]?m\ (?:very\ |really\ |so\ )?sorry | i\ am\ (?:very\ |really\ |so\ )?sorry | sorry\b | (?:my\ )?apologies
  | i\ (?:must\ |do\ |sincerely\ )?apologi[sz]e
  | (?:unfortunately|regrettably)[,\ ]{1,2}(?:i|this|the)\b | i(?:['’]m|\ am)\ afraid
  | i\ (?:can(?:no|['’])?t|can\ not|could(?:n['’]t|\ not)|won['’]t|will\ not|must\ decline|have\ to\ decline)\b
  | i(?:['’]m|\ am)\ (?:unable|not\ able|not\ comfortable|not\ permitted|not\ allowed|prohibited)\b
  | i\ (?:don['’]t|do\ not)\ (?:see|have|feel\ comfortable)\b
  | (?:as|being)\ an?\ (?:ai|large\ language\ model|language\ model)\b
  | (?:this|your|the)\ (?:request|content|prompt)\ (?:violates|goes\ against|was\ (?:blocked|flagged)|cannot)
  | (?:could\ you|can\ you)?\ ?(?:please\ )?(?:provide|share)\ (?:me\ )?(?:with\ )?the\ (?:transcript|conversation)
  | (?:there\ is|i\ see)\ no\ (?:transcript|conversation)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_SHORT = 400
"""Characters. A longer text that begins like a refusal may be notes about an apology."""

# Error texts that servers and gateways return as an answer.
_ERROR = re.compile(
    r"""^\W*(?:
    (?:[a-z_]{1,40}\.){0,4}[a-z]{0,40}(?:error|exception)\ ?[:(] | error\ code\b | api\ error | error\ \d{3}
  | (?:http(?:/\d(?:\.\d)?)?|status(?:\ code)?)[\ :]{1,2}[45]\d\d\b
  | [45]\d\d[\s:-]{1,3}(?:too\ many|internal|bad\ |service|gateway|unauth|forbid|not\ found|payment|request|error)
  | internal\ server\ error | bad\ gateway | gateway\ time-?out | service\ (?:temporarily\ )?unavailable
  | upstream\ (?:error|request|connect|server|timed|returned)
  | too\ many\ requests | (?:the\ )?rate\ limit | you\ (?:have\ )?exceeded | quota\ exceeded
  | insufficient\ (?:quota|credit|balance|funds)
  | (?:invalid|incorrect|missing|no)\ (?:api[\ _-]?key|auth) | unauthorized | forbidden | access\ denied
  | (?:the\ |that\ |this\ )?(?:model|server|service|engine|api)\ [^.\n]{0,60}
    (?:overloaded|unavailable|not\ available|at\ capacity|busy|not\ found|not\ exist|returned\ an\ (?:empty|error))
  | (?:request|connection|operation)\ (?:timed\ out|time-?out|failed|refused|reset|was) | time-?out\b | timed\ out
  | an?\ (?:internal\ |unexpected\ |unknown\ )?error\ (?:has\ )?occur | something\ went\ wrong | traceback\b
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_ERROR_CODE = re.compile(
    r"\W{0,4}(?:error code: ?\d{3}\b|<!doctype html|<html\b|traceback \(most recent)", re.IGNORECASE
)
# A JSON object with only these keys is an error. Notes in JSON have other keys.
_ERROR_KEYS = {"error", "errors", "detail", "exception", "fault", "error_code", "error_message", "errorMessage"}
_ENVELOPE_KEYS = _ERROR_KEYS | {
    "message",
    "code",
    "status",
    "statusCode",
    "type",
    "param",
    "title",
    "success",
    "object",
}
_ENVELOPE_KEYS |= {"request_id", "requestId", "timestamp", "path"}

# Tool calls as text, from models whose server can't parse their call format.
_CALL = re.compile(
    r"```tool_code|(?:```\w{0,10}\s{0,4})?(?:<(?:\w{1,20}:)?tool_calls?>|<function_calls?>|<function=|<invoke\b"
    r"|\[TOOL_CALLS\]|<\|tool_call|<｜|<\|channel\|>commentary)",
    re.IGNORECASE,
)
_CALL_END = re.compile(
    r"(?:</(?:\w{1,20}:)?(?:tool_calls?|function_calls?|function|invoke)|<\|(?:tool_calls_section_end|call)\||</?｜[^<>]{0,40})"
    r">\s{0,4}(?:```\s{0,4})?\Z",
    re.IGNORECASE,
)
"""A call after other words. Notes that only mention calls end differently."""
_CALL_KEYS = (
    {"name", "arguments"},
    {"name", "parameters"},
    {"name", "input"},
    {"tool_calls"},
    {"function_call"},
    {"type", "function"},
)

_NOTATION = re.compile(r"\[(?:tool result|(?:user|assistant|system|developer)(?: calls [^\]\n]{1,100})?)\] ")
"""The beginning of a message in the transcript that the model gets."""
_QUOTED = 60
"""Characters of a message that are compared with the transcript."""

_PLACEHOLDER = re.compile(r"\W{0,4}\([^()\n]{0,80}\)\W{0,2}")

_TAGS = ("think", "thinking", "thought", "reasoning", "reflection", "analysis", "scratchpad")
_THOUGHTS = (
    *((f"<{name}>", f"</{name}>") for name in _TAGS),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
_FINAL = "<|channel|>final<|message|>"
_CLOSING_ALONE = re.compile(r"(?:^|\n)[ \t]{0,8}(?:</think(?:ing)?>|◁/think▷)[ \t]{0,8}(?=\n|$)")

_BROKEN_OFF = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
_CALLED = {"tool_calls", "function_call", "tool_use"}
_BLOCKED = {"content_filter", "safety", "recitation", "prohibited_content", "refusal", "error"}


class SummaryRejected(Exception):
    """The text isn't usable. The message gives the reason without quoting the text."""


@dataclass(frozen=True, slots=True)
class Written:
    """The response of a summary model."""

    text: str
    finish_reason: str | None
    refused: bool = False
    thought: bool = field(default=False, compare=False)
    """Whether the response shows reasoning."""

    @property
    def cut_in_thought(self) -> bool:
        """Return whether the response ended before the text was complete, because the model reasoned."""
        broken = str(self.finish_reason).lower() in _BROKEN_OFF
        return broken and (self.thought or without_thoughts(self.text) != self.text.strip())


def checked(written: Written, *, transcript: str, source_tokens: int, max_tokens: int, count: TextCounter) -> str:
    """Return the summary without the model's reasoning, cut to ``max_tokens``. It may quote the ``transcript``.

    Raises ``SummaryRejected`` if the text is empty, a refusal, a tool call, an error, truncated, or not smaller than
    its source.
    """
    text = without_thoughts(written.text).strip()
    reason = written.finish_reason.lower() if isinstance(written.finish_reason, str) else None
    if written.refused or reason in _BLOCKED or (len(text) <= _SHORT and _REFUSAL.match(text)):
        raise SummaryRejected("the model refused")
    if not text:
        raise SummaryRejected("the summary is empty")
    if reason in _BROKEN_OFF:
        raise SummaryRejected("the summary was truncated")
    if reason in _CALLED or _is_call(text):
        raise SummaryRejected("the model called a tool")
    if _NOTATION.match(text) and text.partition("\n")[0][:_QUOTED].rstrip() not in transcript:
        raise SummaryRejected("the model went on with the transcript")
    if _is_hollow(text):
        raise SummaryRejected("the summary says nothing")
    if _is_error(text):
        raise SummaryRejected("the summary is an error message")
    size = count(text)
    if size >= source_tokens:
        raise SummaryRejected("the summary isn't smaller than the text it replaces")
    return text if size <= max_tokens else _first_lines(text, max_tokens, count)


def notes_in(written: Written) -> Written:
    """Return only the notes in a response, between ``<notes>`` and ``</notes>``.

    Raises ``SummaryRejected`` if there are none: the model went on with the conversation instead.
    """
    text = without_thoughts(written.text).strip()
    if not text:
        return written
    _, opened, rest = text.partition("<notes>")
    notes, closed, _ = rest.rpartition("</notes>")
    if not opened or not closed:
        raise SummaryRejected("the model didn't write notes")
    return replace(written, text=notes.strip())


def without_thoughts(text: str) -> str:
    """Return the text without the reasoning at its beginning, or ``""`` if the reasoning never ends."""
    text = text.lstrip()
    if text.startswith("<|") and _FINAL in text:
        text = text.rpartition(_FINAL)[2].partition("<|")[0].lstrip()
    place = 0
    while True:
        lower = text[place : place + 32].lower()
        closing = next((end for begin, end in _THOUGHTS if lower.startswith(begin.lower())), None)
        if closing is None:
            break
        end = re.compile(rf"{re.escape(closing)}\s*", re.IGNORECASE).search(text, place)
        if end is None:
            return ""
        place = end.end()
    text = text[place:]
    # Some servers omit the opening tag, because it is part of their prompt.
    for match in _CLOSING_ALONE.finditer(text):
        return text[match.end() :].lstrip()
    return text


def _is_hollow(text: str) -> bool:
    """Return whether a text has no letters, or most lines under its headings are placeholders such as ``- (none)``."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    empty = sum(_PLACEHOLDER.fullmatch(line) is not None for line in lines)
    return 2 * empty > len(lines) or not any(map(str.isalpha, text))


def _is_call(text: str) -> bool:
    value = _as_json(text)
    values = value if isinstance(value, list) else [value]
    return bool(_CALL.match(text) or _CALL_END.search(text, max(0, len(text) - 100))) or (
        bool(values) and all(isinstance(one, dict) and any(keys <= one.keys() for keys in _CALL_KEYS) for one in values)
    )


def _is_error(text: str) -> bool:
    value = _as_json(text)
    if isinstance(value, dict) and value and _ENVELOPE_KEYS.issuperset(value):
        return True
    one_line = len(text) <= _SHORT and "\n" not in text
    return _ERROR_CODE.match(text) is not None or (one_line and _ERROR.match(text) is not None)


def _as_json(text: str) -> object:
    """Parse a JSON object or list, with or without a code fence. Return ``None`` for anything else."""
    text = text.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first_lines(text: str, max_tokens: int, count: TextCounter) -> str:
    """Return the leading whole lines that fit in ``max_tokens``."""
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
