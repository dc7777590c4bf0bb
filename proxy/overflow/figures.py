"""Read the token counts in an error message, and decide which overflow they show.

The words around a number decide its role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import Literal

Kind = Literal["input", "input_plus_output", "silent"]
Scope = Literal["input", "total"]
Remedy = Literal["compact", "lower_output", "either"]

SMALLEST_LIMIT = 256
"""Tokens. A smaller number isn't a model's limit. The smallest window in use, a llama.cpp default, is 512."""
LARGEST_LIMIT = 100_000_000
"""Tokens. A larger number is a byte count, an account number, or a time."""
SMALL_OUTPUT = 0.01
"""Share of the limit. If the requested output is smaller, lowering it isn't worth an attempt."""
ROOMY = 0.5
"""Share of the limit. If the prompt is smaller, the requested output is too large, not the prompt."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """A prompt that is too long, as an error or a successful response shows.

    ``kind`` is ``input`` if the prompt alone is too long, ``input_plus_output`` if it is too long with the requested
    output, and ``silent`` if the upstream returned no error but cut the prompt or its response (``silent.py``).
    ``limit`` is the limit in tokens that the upstream named. ``scope`` says whether it covers the input alone or input
    and output together. ``counted`` is the prompt's size in tokens by the upstream's count, ``None`` if the upstream
    named none or only a lower bound. ``output`` is the requested output in tokens, if named. ``remedy`` is the change
    that would help. ``gate`` is true if the caller's plan lacks long prompts, so only a long prompt is too long.
    """

    kind: Kind
    limit: int | None
    scope: Scope | None
    counted: int | None
    output: int | None
    remedy: Remedy
    gate: bool = False


@dataclass(frozen=True, slots=True)
class OverflowReading:
    """The figures of one message, unchecked. If ``counted`` is a lower bound, ``at_least`` is true."""

    kind: Kind = "input"
    limit: int | None = None
    scope: Scope | None = "total"
    counted: int | None = None
    output: int | None = None
    remedy: Remedy | None = None
    at_least: bool = False

    @property
    def score(self) -> int:
        """Return a score for the number of known figures. The limit counts most."""
        return 4 * (self.limit is not None) + 2 * (self.counted is not None) + (self.output is not None)

    def resolve(self) -> Overflow:
        """Check the figures against each other, and decide the kind and the remedy."""
        limit = self.limit if self.limit and SMALLEST_LIMIT <= self.limit <= LARGEST_LIMIT else None
        kind, remedy = self._kind_and_remedy(limit)
        counted = None if self.at_least else self.counted
        if limit and counted and kind == "input" and counted + (self.output or 0) < limit:
            counted = None  # An upstream doesn't refuse a prompt under the limit, so the number is something else.
        return Overflow(kind, limit, self.scope if limit else None, counted, self.output, remedy)

    def _kind_and_remedy(self, limit: int | None) -> tuple[Kind, Remedy]:
        if self.kind == "input":
            return "input", self.remedy or "compact"
        if limit and self.counted is not None and self.counted >= limit:
            return "input", "compact"
        if limit and self.output is not None and self.output >= limit:
            return "input_plus_output", "lower_output"
        if limit and self.counted is not None:
            if self.output is not None and self.output <= SMALL_OUTPUT * limit:
                return "input_plus_output", "compact"
            if not self.at_least and self.counted < ROOMY * limit:
                return "input_plus_output", "lower_output"
        return "input_plus_output", self.remedy or "either"


Role = Literal["limit", "counted", "output", "over", "none"]

MAX_NUMBERS = 24
BEFORE, AFTER = 60, 40
"""Characters before and after a number that decide its role."""

NUMBER = r"\d++(?:[,_']\d{3}(?!\d)){0,9}+(?:\.\d++)?+(?!\.?\d|[km]\b)"
_NUMBER = re.compile(rf"(?<![\w.$€#/-])(?P<n>{NUMBER})(?![\w%/]|-\d|:\d)")

_STATUSES = frozenset({400, 403, 404, 408, 413, 416, 422, 424, 429, 499, 500, 502, 503, 504, 529})
_LEAST = re.compile(r"(?:\bat least|\bfirst|\bkeep:?|\bmore than|\bin over) \(?$")

_UNIT = re.compile(
    r"[ -]?(?:utf-?8 |raw )?(?:characters?|chars|bytes?|[kmgt]i?b|items|messages|images?|tools|seconds?|secs?|s|ms|"
    r"minutes?|hours?|days?|pages?|pixels?|px|requests?|times|percent|usd|words|files|turns|entries)\b"
    r"|[ -]?(?:个?字符?|张|次|条|秒|分钟|文字)"
)
_NO_SIZE = re.compile(
    r"(?:\b(?:code|status|http|error|id|line|column|position|index|port|version|batch(?: size)?|query length|rank|"
    r"worker|year|chunk)\b[\W_]{0,3}|http/)$"
)
_ROLES_BEFORE: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("over", re.compile(r"\bby (?:about |approximately )?$")),
    (
        "output",
        re.compile(
            r"(?:max_?(?:new_|completion_|output_)?tokens|\bcompletion|\boutput(?: tokens)?|\bto generate"
            r"|\bnew tokens)[`'\")]{0,2}\W{0,3}(?:is |of |= ?|: ?|\()?(?:at least )?$"
        ),
    ),
    (
        "limit",
        re.compile(
            r"(?:\bmax(?:imum)?\b|\bmax_\w{1,20}|\blimit(?:ed|s)?\b|\bcap(?:acity|ped)?\b|\bceiling\b|\ballow(?:s"
            r"|ed)?\b|\bsupport(?:s|ed)?\b|\baccepts?\b|\btakes\b|\bat most\b|\bup to\b|\b(?:only|just)\b|\bwindow\b"
            r"|\bcontext(?: |_)?(?:length|size|len)?\b|\b(?:n_)?ctx\b|\b(?:less|fewer|smaller|shorter|longer|larger"
            r"|greater|bigger|more|higher) than(?: or equal to)?\b|\bunder\b|\bbelow\b|\bwithin\b|\bover\b|\babove\b"
            r"|\bbeyond\b|\bexceed(?:s|ed|ing)?\b|\bmust be\b|<=?|(?<!=)>=?|≤|≥|\[\d{1,3}, ?|限制|上限|最大|超过|超出"
            r"|大于|不超|最多|最长|コンテキスト長|上下文(?:长度|窗口)|컨텍스트 길이|최대|한도|лимит|максим"
            r"|предел)[^\d.;]{0,24}$"
        ),
    ),
    (
        "counted",
        re.compile(
            r"\b(?:got|given|gave|received|found|has|have|had|contains?|containing|results? in|resulted in|requested"
            r"|requests?|were|was|used|uses|using|actual(?:ly)?|provided|supplied|counted|count|sent|current(?:ly)?"
            r"|required?s?|needs?|needed|length|len|prompt|prompt_tokens|inputs?|input_tokens|messages?|request|tokens"
            r"|total|estimated|size|of|is)\b[^\d.;]{0,16}$"
        ),
    ),
)
_SURELY_BEFORE = re.compile(
    r"(?:\b(?:got|given|gave|received|requested|used|contains?|supplied|sent|passed|yours|resulted in)\b[^\d.;]{0,8}"
    r"|\b(?:needs|requires) (?:about |at least )?|(?:请求|输入|序列|提示词?)(?:长度|的?长度为?)\W{0,2}|\b(?:has|have"
    r"|had|needed)[ =](?:about |approximately )?|(?<!max )(?<!maximum )(?<!max_)(?:prompt|input)[ _]tokens?\W{0,2})$"
)
_SURELY_AFTER = re.compile(
    r"[)\]]? ?(?:tokens )?(?:>|exceeds?\b|(?:were |was )?(?:given|provided|requested|supplied|received|sent)\b)"
)
_ROLES_AFTER: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("over", re.compile(r" ?(?:tokens? )?(?:over|too many|too long|beyond|above)\b")),
    (
        "output",
        re.compile(
            r"[)\]]? ?(?:tokens )?(?:for|in|of|from) (?:the |your )?(?:completion|output|response|generation|answer"
            r"|reply)|[)\]]? ?(?:max_?(?:new_|output_|completion_)?tokens|(?:new|output|completion|generated"
            r"|requested output) tokens)"
        ),
    ),
    (
        "limit",
        re.compile(
            r"[)\]]?[ -]?(?:tokens?[ -])?(?:max(?:imum)?\b|limit\b|context|window|allowed|cap\b|ceiling|"
            r"is the (?:max|limit)|(?:is |are )?available\b|"
            r"or (?:fewer|less))|[)\]]?[ -]tokens? (?:max|limit|context|window|allowed)"
        ),
    ),
    (
        "counted",
        re.compile(
            r"[)\]]? ?(?:(?:input|prompt|message|context|total)[ -])?(?:tokens?\b)?[)\]]? ?(?:in (?:the "
            r"|your )?(?:prompt|messages?|input|request|conversation)|from the|were|was|(?:which )?(?:exceed|surpass"
            r"|overflow)|(?:is|are) (?:too|longer|larger|greater|more|over|above)|given|provided|requested|supplied"
            r"|received|of input|>|does(?:n't| not)|cannot|can't)|[)\]]? ?(?:input|prompt|message)[ -]tokens?\b"
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A token count and its role in the sentence. ``least`` says that it is only a lower bound."""

    value: int
    role: Role
    least: bool = False


def figures(text: str) -> list[Figure]:
    """Return the numbers in a message that may be token counts, and their roles."""
    found = []
    end = 0
    numbers = list(islice(_NUMBER.finditer(text), MAX_NUMBERS))
    for index, number in enumerate(numbers):
        following = numbers[index + 1].start() if index + 1 < len(numbers) else len(text)
        before = text[max(end, number.start() - BEFORE) : number.start()]
        after = text[number.end() : min(following, number.end() + AFTER)]
        end = number.end()
        value = amount(number["n"])
        if value in _STATUSES:
            continue
        role = _role(before, after)
        if _UNIT.match(after) or _NO_SIZE.search(before):
            continue
        if SMALLEST_LIMIT <= value <= LARGEST_LIMIT or (role == "output" and value < SMALLEST_LIMIT):
            found.append(Figure(value, role, bool(_LEAST.search(before))))
        elif value < SMALLEST_LIMIT:
            end = max(number.start() - BEFORE, 0)  # "[1, 8192]": a small number doesn't separate the words.
    return found


def _role(before: str, after: str) -> Role:
    if _SURELY_BEFORE.search(before) or _SURELY_AFTER.match(after):
        return "counted"
    left = {role: match.start() for role, pattern in _ROLES_BEFORE if (match := pattern.search(before))}
    right = next((role for role, pattern in _ROLES_AFTER if pattern.match(after)), None)
    if "over" in left or right == "over":
        return "over"
    if "output" in left or right == "output":
        return "output"
    if right == "limit" and "limit" not in left:
        return "limit"
    if "limit" in left:
        return "limit"
    if right is not None:
        return right
    return "counted" if "counted" in left else "none"


def amounts(text: str) -> set[int]:
    """Return the numbers in a text."""
    return {amount(found["n"]) for found in _NUMBER.finditer(text)}


def amount(digits: str) -> int:
    """Parse a number: ``300,000`` is 300000, ``50857.0`` is 50857."""
    whole = digits.partition(".")[0]
    return int(re.sub(r"[,_']", "", whole)[:12] or 0)
