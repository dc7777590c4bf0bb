"""The response of a summary model, the ways in which a call fails, and the check whether a text is usable."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field, replace

from proxy.compaction.format import TextCounter
from proxy.summary.extract import first_lines
from proxy.summary.prompt import continuation

# How refusals begin: in English, German, French, Spanish, Portuguese, Italian, Chinese, Japanese, Korean, and Russian.
# `_is_refusal` finds others by comparing them with the transcript.
_REFUSES = re.compile(
    r"(?:^\W{0,5}|(?<=[.!?。！？\n])\s{0,5})(?:"
    r"(?:(?:let me|i (?:appreciate|understand|want|know|see))\b[^.!?\n]{0,100}[:,] (?:but )?)?(?:unfortunately,? )?"
    r"(?:i|i'm|i am|we|we're)(?: \w+,?){0,2}? (?:can't|cannot|can not|could(?:n't| not)|won't|will not|unable"
    r"|not (?:able|comfortable|permitted|allowed|going)|prohibited|sorry\b(?! was)|(?:don't|do not) (?:see|have)|afraid"
    r"|apologi[sz]e|refuse\b|(?:must|have to|need to) (?:decline|stop))|(?:my )?apologies\W|sorry\b(?! state| was)"
    r"|no[.,!] i\b|(?:as|being) an? (?:ai|large|lan)|that(?:'s| is) (?:not|beyond)|thank you for|there is no transcript"
    r"|(?:please )?(?:provide|share|paste) .{0,12}the (?:transc|conv)|(?:this|your) (?:request|content) (?:viol|cannot)"
    r"|(?:es )?tut mir (?:\w+ )?leid|entschuldig(?:e|en|ung)\b|ich (?:kann|darf|werde) (?:\S+ ){0,5}?(?:nicht|kein)"
    r"|(?:je suis )?(?:\w+ )?désolée?\b|je (?:regrette|(?:ne |n')(?:peux|puis|suis|vais|dois)\b)|il m'est impossible"
    r"|(?:lo )?(?:siento|lamento)|disculp|(?:me temo que )?no (?:puedo|podemos|estoy|me es)|prefiero no"
    r"|(?:peço )?desculp|sinto muito|(?:infelizmente,? )?(?:eu )?não (?:posso|consigo|vou|tenho perm|me é)"
    r"|mi (?:dispiace|scuso)|scusa|spiacente|(?:purtroppo,? )?non (?:posso|sono (?:in gr|autor)|mi è)|preferisco non"
    r"|[很非常真的]{0,3}(?:抱歉|遗憾|遺憾)|对不起|對不起|我(?:无法|無法|不能|不会|没)|作为.{0,3}(?:ai|人|语)"
    r"|(?:大変)?(?:申し訳|すみません|ごめんなさい|恐れ入)|残念ながら|(?:정말 )?(?:죄송|미안|유감)|저는 (?:ai|인공지능)"
    r"|(?:извин|прости)те|сожале|мне (?:\w+ )?жаль|(?:к сожалению,? )?(?:я )?(?:\w+ )?(?:не (?:могу|буду)|отказ))",
    re.IGNORECASE,
)
_ABOUT_ITSELF = re.compile(
    r"polic(?:y|ies)\b|guideline|terms of service|safety system|filt(?:er|r[eo])|richtlin|bedingung|politique|polític"
    r"|(?:request|content|response|prompt) (?:\w+ ){0,2}(?:blocked|flagged|rejected|removed)|direc?triz|norme\b"
    r"|政策|法规|规范|敏感|ポリシー|規約|정책|политик|правил|[?？]\s*\Z",
    re.IGNORECASE,
)
"""Words about the rules of a model, or a question at the end."""
_PERSON = re.compile(r"\b(?:i|me|my|we|us|our|you|your)\b", re.IGNORECASE)
_ENGLISH = re.compile(r"\b(?:the|and|of|to|is|was|were|with|they)\b", re.IGNORECASE)
_json = json.JSONDecoder()
_SHORT, _COMPARED = 400, 4_000
"""Characters in which errors and refusals show, and that are compared with the transcript."""

_TOKEN = re.compile(r"\w[\w./:@#-]{0,80}\w")
_IN_NAMES = re.compile(r"\d|_|[a-z][A-Z]|\w[./@:#]\w")
"""Signs that a token is a path, a number, or an identifier."""
_CAPITALIZED = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{3,}")
_PIECES = re.compile(r"(?=([\u0590-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2}))|\b([^\W\d_\u0590-\uffff]{5})")
"""Pairs of letters in scripts that don't split words like English, and the beginnings of words in others."""
_MOSTLY, _TOO_SHORT, _LONG = 0.4, 24, 2_000
"""The share of a text's words from the transcript; the bytes of a text that can't tell so many tokens."""

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
  | (?:error|failed)\ (?:to\ )?(?:generat|summari|produc|creat)\w*\ (?:the\ )?(?:summary|notes|response|conversation)\b
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
_ENVELOPE_KEYS = {"error", "errors", "detail", "exception", "fault", "error_code", "error_message", "errorMessage"}
_ENVELOPE_KEYS |= {"message", "code", "status", "statusCode", "type", "param", "title", "success", "object", "path"}
_ENVELOPE_KEYS |= {"request_id", "requestId", "timestamp"}

# Tool calls as text, from models whose server can't parse them. `_is_call` finds others by their structure.
_CALL = re.compile(
    r"```tool_code|(?:```\w{0,10}\s{0,4})?(?:<(?:\w{1,20}[:_])?(?:tool|function)_?calls?>|<function=|<invoke\b"
    r"|<\|[\w|]{0,20}(?:tool|call|action|function|python|plugin|invoke)|<｜|\]<\]|\[TOOL_CALLS\]|functools\[|✿"
    r"|(?:<\|channel\|>)?commentary\b|to=functions|\*{3} Begin Patch)",
    re.IGNORECASE,
)
_CALL_END = re.compile(
    r"(?:</(?:\w{1,20}:)?(?:tool_calls?|function_calls?|function|invoke)|<\|{1,2}(?:tool_calls?\w{0,20}_end|call)\|{1,2}"
    r"|(?:</?｜|</\|)[^<>]{0,40})>\s{0,4}(?:```\s{0,4})?\Z",
    re.IGNORECASE,
)
"""A call after other words. Notes that only mention calls end differently."""
_CALL_KEY = re.compile(
    r"tool(?:_?(?:name|calls?|use|input|args))?|function(?:_call|_name)?|action(?:_input)?|cmd|command|recipient_name|input"
    r"|arg(?:ument)?s?|param(?:eter)?s?",
    re.IGNORECASE,
)
_ACTION = re.compile(r"^Action Input:", re.MULTILINE)
_CLOSING = re.compile(r"</([^\W\d][\w:.-]{0,60})>\Z")
_NOTE_LANGUAGES = {"", "json", "markdown", "md", "text", "txt", "yaml", "yml", "html", "xml"}
_MOST_WORDS = 40  # Words before a call, or of an announcement. A text with more of them is notes that end with it.
_ANNOUNCES = re.compile(
    r"(?i)(?:(?:ok(?:ay)?|now|first|next|then|good|great)\b\W{0,3}){0,3}(?:let me|let's|i'll|i will|i'm going to"
    r"|i need to|让我|我来|我将|ich (?:werde|schaue|prüfe)|je vais|voy a|vou) ?\w"
)

_NOTATION = re.compile(
    r"^\[(?:tool result|(?:user|assistant|system|developer)(?: calls [^\]\n]{1,100})?)\] ", re.MULTILINE
)
"""The beginning of a message in the transcript that the model gets."""
_QUOTED, _MOST_LABELS = 60, 100
"""Characters of a message that are compared with the transcript, and messages that are compared."""

_PLACEHOLDER = re.compile(r"\W{0,4}(?:\([^()\n]{0,80}\)|n/a)\W{0,2}", re.IGNORECASE)

_HEADS = "|".join(["summary", "notes", *re.findall(r"^\d\. (\w+)", continuation(0), re.MULTILINE)])
_SECTION = re.compile(
    rf"^[^\w\n]{{0,6}}(?:\d[^\w\n]{{1,4}})?(?:{_HEADS})\b[\w ]{{0,30}}[^\w\n]{{0,4}}(?:[:：—–-]|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""A heading that the prompt asks for."""
_MOST_THOUGHTS = 20
_THOUGHT = (
    r"(?:\w{1,20}[:_])?(?:think|thought|reason|reflect|analy[sz]|scratch|plann|ponder|deliberat|monolog|cot\b)\w{0,30}"
)
_CONTENT_TAGS = (
    rf"(?:{_HEADS}|notes?|\w*summary|answer|final\w*|output|response|result|text|html|body|main|article|section|table|strong"
    r"|code|markdown|document|context|conversation|begin_of_solution|(?:\w{1,20}:)?(?:tool\w*|function\w*|invoke)|user|assistant)\b"
)
_TAG = re.compile(
    rf"(?:<[|｜ ]?(?=[^\W\d])|[\[(](?=(?:think|thinking|thoughts?|reasoning)[\])])|◁|【)(?!{_CONTENT_TAGS})"
    r"([^\W\d][\w:.-]{2,40})(?:\s[^<>\n]{0,200})?[|｜ ]?[>\]▷】)]",
    re.IGNORECASE,
)
_TAGS_OF_NOTES = re.compile(
    rf"</(?:{_HEADS}|notes?|\w*summary|answer|final\w*|output|response|result|text|html|body|main|article|section|table|div|p"
    r"|h\d|ul|ol|pre|strong|b|em|code|markdown|document|context|conversation|details)>",
    re.IGNORECASE,
)
_LATER = re.compile(rf"(?<=\n)(?:<|◁|\[|<[|｜]){_THOUGHT}[|｜]?[>▷\]]", re.IGNORECASE)
"""Reasoning that begins at a line after the notes."""
_KIMI = re.compile(r"<\|(open|close)\|>(\w{1,40})[^<>]{0,400}<\|sep\|>")
_FINAL = re.compile(r"<\|channel\|>final\b[^<]{0,40}<\|message\|>|assistantfinal", re.IGNORECASE)
_HARMONY = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>|analysis(?=\S)", re.IGNORECASE)
_CLOSING_ALONE = re.compile(rf"(?:</|◁/|\[/|<\|end_of_){_THOUGHT}(?:\|?>|▷|\])[ \t]{{0,8}}(?=\n|$)", re.IGNORECASE)
_FENCED = re.compile(
    rf"```[ \t]{{0,4}}(?:{_THOUGHT}|(?=\n\s*<{_THOUGHT}>))[^\n]{{0,40}}\n.*?\n```[ \t]*(?:\n|$)"
    rf"|>[^\w\n]{{0,6}}{_THOUGHT}[^\n]*(?:\n>[^\n]*)*(?:\n|$)",
    re.IGNORECASE | re.DOTALL,
)
_LABEL = re.compile(r"[^\w\n]{0,6}(?:think|thought|reasoning)\w{0,9}(?: process)?[^\w\n]{0,3}(?::|\n)", re.IGNORECASE)
_DONE = re.compile(
    r"(\w{1,20})(?:\.{3}|…)\s.*?^\W{0,6}done \1\W*$|<(unused\d|\|channel)\d?>thought.*?<(?:\2\d|channel\|)>|<!--.*?-->",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)

_BROKEN_OFF = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
_CALLED = {"tool_calls", "function_call", "tool_use"}
_BLOCKED = {"content_filter", "content_filtered", "guardrail_intervened", "safety", "sensitive", "recitation", "spii"}
_BLOCKED |= {"blocklist", "prohibited_content", "refusal", "error"}


class SummaryFailed(Exception):
    """The model returned no usable summary. The message gives the reason without quoting content."""


class SummaryRefused(SummaryFailed):
    """The upstream refused the request, though it took the conversation's own requests."""


class SummaryTooLong(SummaryFailed):
    """The model rejected the request as too long."""


class SummaryUnasked(SummaryFailed):
    """The proxy sent no request, for a reason unrelated to the model's health."""


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
    notes = _without_continuation(text, transcript)
    size = count(notes)
    faults = (
        (written.refused or reason in _BLOCKED, "the model refused"),
        (not text, "the summary is empty"),
        (reason in _BROKEN_OFF, "the summary was truncated"),
        (reason in _CALLED or _is_call(text), "the model called a tool"),
        (not notes, "the model went on with the transcript"),
        (_is_hollow(notes), "the summary says nothing"),
        (_is_error(notes), "the summary is an error message"),
        (_is_refusal(notes, transcript, source_tokens), "the model refused"),
        (_is_announcement(notes), "the model went on with the work"),
        (size >= source_tokens, "the summary isn't smaller than the text it replaces"),
    )
    if fault := next((fault for found, fault in faults if found), None):
        raise SummaryRejected(fault)
    return notes if size <= max_tokens else _shortened(notes, max_tokens, count)


def notes_in(written: Written) -> Written:
    """Return only the notes in a response: between ``<notes>`` and ``</notes>``, or a text that begins like notes.

    Raises ``SummaryRejected`` if there are none: the model went on with the conversation instead.
    """
    text = without_thoughts(written.text).strip()
    if not text:
        return written
    _, opened, rest = text.partition("<notes>")
    notes, closed, _ = rest.rpartition("</notes>")
    if not opened and _SECTION.match(text):
        return written
    if not opened or not closed:
        raise SummaryRejected("the model didn't write notes")
    return replace(written, text=notes.strip())


def without_thoughts(text: str) -> str:
    """Return the text without the reasoning at its beginning, or ``""`` if the reasoning never ends."""
    text = _KIMI.sub(lambda tag: f"<{'/' if tag[1] == 'close' else ''}{tag[2]}>", text).lstrip()
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
    if later := _LATER.search(text):
        text = text[: later.start()] + text[_end_of(_TAG.match(text, later.start()) or later, text) :]
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
    for tag in tags.finditer(text, opening.start()):
        depth += -1 if tag[2] else 1
        if tag[2]:
            last = tag.end()
        if depth == 0:
            break
    # Some models close another tag than they opened.
    other = _CLOSING_ALONE.search(text, opening.end()) if last == len(text) else None
    return other.end() if other else last


def _without_continuation(text: str, transcript: str) -> str:
    """Return the notes before a message in the transcript's notation that isn't in the transcript. ``""``: none."""
    for label in [*_NOTATION.finditer(text)][:_MOST_LABELS]:
        quoted = text[label.start() :].partition("\n")[0][:_QUOTED].rstrip() in transcript
        if not quoted and (transcript or not label.start()):
            notes = text[: label.start()].rstrip()
            about = _SECTION.search(notes) or _names(notes, transcript) or _shared(notes, transcript) >= _MOSTLY
            return notes if about else ""
    return text


def _is_refusal(text: str, transcript: str, source_tokens: int) -> bool:
    """Return whether a text is about itself and tells nothing of the transcript, if that's known."""
    start = text[:_SHORT].replace("’", "'")
    names, own, headings = _names(text, transcript), _names(text, text), len(_SECTION.findall(text))
    if _REFUSES.match(start):
        return headings < 2 and len(own if names else names) < max(2, min(5, len(text.split()) / 10))
    if not transcript or names or headings or any(word in transcript for word in _CAPITALIZED.findall(start)):
        return False
    if _REFUSES.search(start) or _ABOUT_ITSELF.search(start + text[-1:]):
        return True
    if text.isascii() and text.isalpha():
        return False  # a lone word tells too little to judge it
    english = text.isascii() and (own or _ENGLISH.search(text))
    unlike = _shared(text, transcript) < _MOSTLY and (not english or _PERSON.search(start) is not None)
    return unlike or (len(text.encode()) < _TOO_SHORT and source_tokens >= _LONG and not own)


def _names(text: str, transcript: str) -> set[str]:
    """Return the paths, numbers, and identifiers of a text that are in the transcript."""
    tokens = set(_TOKEN.findall(text[:_COMPARED]))
    return {token for token in tokens if _IN_NAMES.search(token) and token in transcript}


def _shared(text: str, transcript: str) -> float:
    """Return how many of a text's longer words begin like words of the transcript, from 0 to 1. 1 if it has none."""
    pieces = {pair or word for pair, word in _PIECES.findall(text[:_COMPARED].lower())}
    lower = transcript.lower()
    return sum(piece in lower for piece in pieces) / len(pieces) if pieces else 1


def _is_hollow(text: str) -> bool:
    """Return whether a text has no letters, or most lines under its headings are placeholders such as ``- (none)``."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    empty = sum(_PLACEHOLDER.fullmatch(line) is not None for line in lines)
    return 2 * empty > len(lines) or not any(map(str.isalpha, text))


def _is_call(text: str) -> bool:
    """Return whether a text is a call, or ends with one after a few words."""
    if _CALL.match(text) or _CALL_END.search(text, max(0, len(text) - 100)):
        return True
    words, inner = text, ""
    if text.endswith("```") and (start := f"\n{text}".rfind("\n```", 0, -3)) >= 0:
        language, _, inner = text[start + 3 : -3].partition("\n")
        found = language.strip().lower() not in _NOTE_LANGUAGES or _is_structure(inner.strip())
        words = text[:start]
    elif (closing := _CLOSING.search(text, max(0, len(text) - 70))) and (start := text.find(f"<{closing[1]}")) >= 0:
        found, words, inner = not _TAGS_OF_NOTES.match(closing[0]), text[:start], text[start:]
    else:
        found, words = _is_structure(text) or _ACTION.search(text) is not None, ""
    return found and not _SECTION.search(words + inner) and len(words.split()) <= _MOST_WORDS


def _is_announcement(text: str) -> bool:
    """Return whether a text only announces what the model does next, in place of notes."""
    announces = text.endswith((":", "：")) or _ANNOUNCES.match(text.replace("’", "'"))
    return bool(announces) and not _SECTION.search(text) and len(text.split()) <= _MOST_WORDS


def _is_structure(text: str) -> bool:
    """Return whether a text is the JSON of calls, or an expression in Python that calls functions."""
    values, rest = list[object](), text if text.startswith(("{", "[")) else ""
    try:
        while rest:
            value, end = _json.raw_decode(rest)
            values += value if isinstance(value, list) else [value]
            rest = rest[end:].strip()
    except (ValueError, RecursionError):
        values = []
    if values:
        return all(isinstance(one, dict) and _has_call(one) for one in values)
    if len(text) > _COMPARED or not text.endswith((")", "]")):
        return False
    try:
        made = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = made.elts if isinstance(made, ast.List) else [made]
    return bool(calls) and all(isinstance(one, ast.Call) for one in calls)


def _has_call(value: dict[str, object]) -> bool:
    return any(map(_CALL_KEY.fullmatch, value)) and not any(re.fullmatch(_HEADS, key, re.IGNORECASE) for key in value)


def _is_error(text: str) -> bool:
    bare = text.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if bare.startswith("{"):
        try:
            value = json.loads(bare)
        except (ValueError, RecursionError):
            value = None
        if value and _ENVELOPE_KEYS.issuperset(value):
            return True
    one_line = len(text) <= _SHORT and "\n" not in text
    return _ERROR_CODE.match(text) is not None or (one_line and _ERROR.match(text) is not None)


def _shortened(text: str, max_tokens: int, count: TextCounter) -> str:
    """Return the leading whole lines that fit in ``max_tokens``."""
    lines, _ = first_lines(text.splitlines(), max_tokens, count)
    if not lines:
        raise SummaryRejected("the summary is one line that is too long")
    return "\n".join(lines)
