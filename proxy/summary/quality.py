"""Check whether a model's text is usable as a summary."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from proxy.compaction.format import TextCounter
from proxy.summary.prompt import continuation

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

_HEADS = "|".join(re.findall(r"^\d\. (\w+)", continuation(0), re.MULTILINE))
_SECTION = re.compile(
    rf"^[^\w\n]{{0,6}}(?:\d[^\w\n]{{1,4}})?(?:{_HEADS})\b[\w ]{{0,30}}[^\w\n]{{0,4}}(?:[:：—–-]|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""A heading that the prompt asks for."""
_MOST_THOUGHTS = 20
_THOUGHT = (
    r"(?:\w{1,20}[:_])?(?:think|thought|reason|reflect|analy[sz]|scratch|plann|ponder|deliberat|monolog|cot\b)\w{0,30}"
)
_KEPT = (
    rf"(?:{_HEADS}|notes?|\w*summary|answer|final\w*|output|response|result|text|html|body|main|article|section|table|strong"
    r"|code|markdown|document|context|conversation|begin_of_solution|(?:\w{1,20}:)?(?:tool\w*|function\w*|invoke)|user|assistant)\b"
)
_TAG = re.compile(
    rf"(?:<[|｜ ]?(?=[^\W\d])|[\[(](?=(?:think|thinking|thoughts?|reasoning)[\])])|◁|【)(?!{_KEPT})"
    r"([^\W\d][\w:.-]{2,40})(?:\s[^<>\n]{0,200})?[|｜ ]?[>\]▷】)]",
    re.IGNORECASE,
)
_FINAL = re.compile(r"<\|channel\|>final\b[^<]{0,40}<\|message\|>|assistantfinal", re.IGNORECASE)
_HARMONY = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>|analysis(?=\S)", re.IGNORECASE)
_CLOSING_ALONE = re.compile(rf"(?:</|◁/|\[/|<\|end_of_){_THOUGHT}(?:\|?>|▷|\])[ \t]{{0,8}}(?=\n|$)", re.IGNORECASE)
_FENCED = re.compile(
    rf"```[ \t]{{0,4}}(?:{_THOUGHT}|(?=\n\s*<{_THOUGHT}>))[^\n]{{0,40}}\n.*?\n```[ \t]*(?:\n|$)",
    re.IGNORECASE | re.DOTALL,
)
_LABEL = re.compile(r"[^\w\n]{0,6}(?:think|thought|reasoning)\w{0,9}(?: process)?[^\w\n]{0,3}(?::|\n)", re.IGNORECASE)
_DONE = re.compile(
    r"(\w{1,20})(?:\.{3}|…)\s.*?^\W{0,6}done \1\W*$|<(unused\d|\|channel)\d?>thought.*?<(?:\2\d|channel\|)>|<!--.*?-->",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)

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
    if _HARMONY.match(text) and (final := [*_FINAL.finditer(text)]):
        text = text[final[-1].end() :].partition("<|")[0].lstrip()
    elif text.startswith(("<|channel|>analysis", "<|start|>")):
        return ""
    whole = ""
    for _ in range(_MOST_THOUGHTS):
        if block := _FENCED.match(text) or _DONE.match(text):
            end = block.end()
        elif opening := _TAG.match(text):
            end = _end_of(opening, text)
            if not re.match(_THOUGHT, opening[1], re.IGNORECASE):
                whole = whole or text
        # Some servers omit the opening tag, because it is part of their prompt.
        elif (alone := _CLOSING_ALONE.search(text)) and not _SECTION.match(text) and f"<{alone[0][2:]}" not in text:
            end = alone.end()
        else:
            break
        text = text[end:].lstrip()
    if _LABEL.match(text) and (section := _SECTION.search(text)):
        text = text[section.start() :].lstrip()
    return text or whole


def _end_of(opening: re.Match[str], text: str) -> int:
    """Return the end of the part that a tag opens. A tag that nothing closes opens the whole text."""
    name = opening[1]
    ending = re.sub(r"^(begin|start)(?=_)", "end", name, flags=re.IGNORECASE)
    close = f"[|｜]?{re.escape(ending)}" if ending != name else f"(?:[|｜]?/|/[|｜]?) ?{re.escape(name)}"
    tags = re.compile(
        rf"([<\[(◁【] ?)(?:({close})|[|｜]?{re.escape(name)})\b[^<>\n]{{0,200}}?[|｜]?[>\])▷】]", re.IGNORECASE
    )
    depth, last = 0, len(text)
    for tag in tags.finditer(text):
        depth += -1 if tag[2] else 1
        if tag[2]:
            last = tag.end()
        if depth == 0:
            break
    return last


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
