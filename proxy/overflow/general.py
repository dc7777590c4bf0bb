"""Read overflow errors that no row of the table matches, by their words and the words around their numbers.

Such a sentence has three elements, in any order: the text that is too long (``_SUBJECT``), the excess (``_EXCESS``),
and the bound (``_WINDOW``, or a limit on tokens). The words next to a number decide its role: a limit follows
"maximum" or "exceeds", a size follows "contains" or precedes "tokens in the prompt". A number with another unit has no
role.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

Kind = Literal["input", "input_plus_output", "silent"]
Scope = Literal["input", "total"]
Remedy = Literal["compact", "lower_output", "either"]

SMALLEST_LIMIT = 256  # Tokens. The smallest window in use, a llama.cpp default, is 512.
LARGEST_LIMIT = 100_000_000  # Tokens. A larger number is a byte count, an account number, or a time.
SMALL_OUTPUT = 0.01  # Share of the limit. If the requested output is smaller, lowering it isn't worth an attempt.
ROOMY = 0.5  # Share of the limit. If the prompt is smaller, the requested output is too large, not the prompt.


@dataclass(frozen=True, slots=True)
class Overflow:
    """A prompt that is too long, as an error or a successful response shows."""

    kind: Kind  # too long alone, or with the output; `silent` if the upstream returned no error (`silent.py`)
    limit: int | None  # tokens that the upstream named
    scope: Scope | None  # whether the limit covers the input alone
    counted: int | None  # the prompt's tokens by the upstream's count, `None` if it named a lower bound at most
    output: int | None  # the requested one in tokens, if named
    remedy: Remedy  # the change that would help
    gate: bool = False  # the caller's plan lacks long prompts, so only a long prompt is too long


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
BEFORE, AFTER = 60, 40  # characters before and after a number that decide its role

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
    return {amount(found["n"]) for found in _NUMBER.finditer(text)}


def amount(digits: str) -> int:
    """Parse a number: ``300,000`` is 300000, ``50857.0`` is 50857."""
    whole = digits.partition(".")[0]
    return int(re.sub(r"[,_']", "", whole)[:12] or 0)


_SIZED: tuple[Role, Role, Role] = ("limit", "counted", "output")
_URL = re.compile(r"https?://\S+")
_ABOUT_ITSELF = re.compile(r"\b(?:input )?validation error\b|\b(?:invalid|malformed) input\b|\buser input error\b")
"""Names of the error that contain "input" but don't describe the prompt."""
_GLUED = re.compile(r"(?<=\d)(?=tokens?\b)")
_EAST_ASIAN = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
_NO_SPACE = re.compile(rf"(?<=[{_EAST_ASIAN}])(?=\d)|(?<=\d)(?=[{_EAST_ASIAN}])")
_DOTTED = re.compile(r"(?<![\w.,])\d{1,3}(?:\.\d{3}){1,3}(?= ?(?:tokens?|token-)\b)")
_SUM = re.compile(
    rf"(?<!\d)(?P<counted>{NUMBER}) ?\+ ?(?:[a-z_]{{1,20}} )?(?P<output>{NUMBER})(?: ?= ?{NUMBER})? ?"
    rf"(?:>=?|exceeds?|is (?:greater|larger|longer|more) than) ?(?:the )?(?:[a-z_]{{1,20}} )?(?P<limit>{NUMBER})"
)
_PART_OF = (
    re.compile(rf"(?<![\w./-])(?P<counted>{NUMBER}) ?/ ?(?P<limit>{NUMBER}) tokens"),
    re.compile(rf"\btokens?\W{{0,3}}(?P<counted>{NUMBER}) ?/ ?(?P<limit>{NUMBER})"),
    re.compile(
        rf"(?<![\w./-])(?P<counted>{NUMBER}) (?:tokens )?of (?:the |your |a )?(?:max(?:imum)? )?"
        rf"(?P<limit>{NUMBER})(?! of)"
    ),
    re.compile(
        rf"\bneed(?:s|ed)? (?P<counted>{NUMBER})(?: tokens)?[,;]?(?: but)?(?: only)? (?:have|has|had|got) (?:only )?"
        rf"(?P<limit>{NUMBER})"
    ),
)
"""Two numbers. The first one is the prompt's size if it is the larger one."""
_CHARACTERS = re.compile(r"\d (?:characters?|chars)\b")
_SENTENCE_END = re.compile(r"[.;!?。；！](?=\s|$)|(?<=[。；！])")
_SUBJECT = re.compile(
    r"\btoo many tokens: ?\d"
    r"|\b(?:prompts?|inputs?|messages?|conversation|(?:chat )?history|context|contents?|text|query|request|"
    r"chat|transcript|instructions?|sequence|you|your)\b|input_?(?:ids|tokens|text)|prompt_?tokens|输入|提示|消息|对话|请求|入力"
    r"|\bn_tokens\b|(?:\b|_)ctx(?:\b|_)|\bmax_(?:prompt|input)_|\b(?:number of|total|requested) tokens\b|"
    r"\bmax_(?:model|seq)_len\b|\btoken count\b|\bn(?:ombre|úmero) de tokens\b|\bentrées?\b|\beingabe\b|\bentrada\b"
)
_ASKED = re.compile(
    r"\b(?:prompts?|inputs?|messages?|conversation|history|text|query|transcript|your context|request length)\b"
    r"|input_?(?:ids|tokens|text|length)|prompt_?tokens|输入|提示|消息|对话"
)
_EXCESS = re.compile(
    r"\bexceed(?:s|ed|ing)?\b|\b(?:longer|larger|greater|bigger|more|higher) than\b|\btoo (?:long|large|big|many"
    r"|small)\b|(?:surpass|overflow|overrun)|\b(?:does not|doesn't|do not|don't|cannot|can't|won't|will not|not) fit\b"
    r"|\b(?:over|above|beyond|past|outside)\b|\bgoes over\b|\bfull\b|\breached\b|\bran out\b|\bout of context\b"
    r"|\b(?:must|should|has to|have to) (?:be|have) (?:<=?|≤|less|fewer|smaller|shorter|at most|within|under|below"
    r"|no more)|\b(?:must|should) (?:be )?in \[|\bshould be \[|\b(?:reduce|shorten|trim|truncate|shrink|decrease)\b"
    r"|\bno more than\b|\b(?:cannot|can't|may not|must not) be (?:more|longer|larger|greater)\b|\boverflow"
    r"|\binsufficient\b|\bnot enough\b|\bonly (?:supports?|accepts?|allows?|handles?|has)\b|\bat most\b"
    r"|\d\)? ?(?:tokens? )?>=? ?(?:[a-z_]{1,20} ?)?\(?\d|超|过长|太长|大于|長すぎ|초과|dépass|überschr|zu lang|\bexced"
    r"|demasiado larg|trop long"
)
_WINDOW = re.compile(
    r"\b(?:context|ctx|prompt|input|sequence|seq|token|message)s?[ _-]{0,2}(?:token )?(?:length|window|size|limit"
    r"|capacity|budget|len|maximum)s?\b|\bcontext\b.{0,20}\b(?:length|window|size|limit|capacity)\b|(?:\b|_)ctx(?:\b|_)"
    r"|\bmax_length\b|\bmax[_ ]position[_ ]embeddings\b|\bmax_(?:model_len|seq_len|input_\w{1,12}|prompt_\w{1,12}"
    r"|context_\w{1,12}|total_tokens|num_tokens|sequence_length)\b|\bmax(?:imum)? (?:number of )?(?:model |input "
    r"|prompt |message |context |total |sequence )(?:length|tokens?|size|count)\b|\bkv[ -]?(?:cache|size)\b"
    r"|\b(?:max(?:imum)?|model's|model|supported|available|its|the) context\b"
    r"|\bcontext(?: (?:is|of|has))?(?: only)?[ (:=]{1,2}\d|\btokens available\b"
    r"|\bmodel(?:'s)? (?:\w{1,12} ){0,2}(?:length|window|capacity)\b"
    r"|\blimit of the (?:\w{1,12} ){0,2}model\b|(?:上下文|输入|提示).{0,8}(?:长度|窗口|限制|上限)|上下文|コンテキスト"
    r"|컨텍스트|\bcontexte\b|\bkontext|\bcontexto\b"
)
_TOKENS = re.compile(r"token")
_BOUND = re.compile(
    r"\bmax(?:imum)?\b|\bmax_|\blimit|\ballow|\bsupport(?:s|ed)?\b|\baccepts?\b|\bat most\b|\bup to\b|\bcapacity\b|"
    r"\bmodel (?:only )?takes\b|\bcan (?:only )?(?:handle|take|"
    r"accept|process)|\bno more than\b|\bexceed\w* (?:the )?\d|\d ?/ ?\d|\bwindow\b|>|<=|≤|\bless than\b|"
    r"\bfewer than\b|\b(?:is|are) (?:greater|larger|longer|more|higher|bigger) than (?:the )?\d|上限|限制"
)
_OUTPUT = re.compile(
    r"max_?(?:new_|completion_|output_)?tokens\b|\bmaxoutputtokens\b|\bcompletion\b|\boutput\b|\bgenerat(?:e|ed|ion)\b"
    r"|\bresponse (?:has |had )?(?:exceed|length|was cut)"
)
_JOINED = re.compile(r"\+|\bplus\b|\bor\b|\band\b|\bsum\b|\btotal\b|\bcombined\b|\btogether\b|\bboth\b")

_BOTH = re.compile(r"requested token count|token budget|answering your request")

_OTHER = re.compile(
    r"\b(?:month(?:ly)?|daily|weekly|hourly|day|week|hour|minute|plan|tier|subscription|usage limit|spend|balance"
    r"|account|organi[sz]ation|concurren\w+|connections?|sessions?|timeout|timed out|batch|queue|memory slot|rate|retry"
    r"|pricing|trial|free|characters?|chars|bytes?|[kmg]i?b|urls?|headers?|names?|titles?|ids?|keys?|properties|schema"
    r"|enum|stop (?:sequences?|tokens?|words?|strings?)|functions?|tools|logprobs|temperature|top_\w|seed|metadata"
    r"|thinking|reasoning"
    r"|(?<!position )embeddings?|loop|recursion|depth|nest\w+|iterations?|turns|steps|items|entries|elements|arguments?"
    r"|parameters?|regex|grammar|deadline|beta|adapter|lora)\b"
)
"""Words of errors about other problems. Only a row of the table can match a sentence with one of them."""
_MEDIA = re.compile(r"\b(?:images?|pixels?|pages?|pdfs?|files?|audio|videos?|frames?|attachments?|documents?)\b")
"""Words of errors about media. They exclude a sentence unless it counts tokens."""


def prepared(text: str) -> str:
    """Return a cleaned message in lower case. ``4104tokens`` becomes ``4104 tokens``."""
    text = _NO_SPACE.sub(" ", _ABOUT_ITSELF.sub(" ", text.lower()))
    return _DOTTED.sub(lambda found: found[0].replace(".", ""), _GLUED.sub(" ", text))


def read(text: str, *, certain: bool = False, ambiguous: bool = False) -> OverflowReading | None:
    """Read a cleaned message in lower case; ``None`` if it doesn't describe an overflow.

    ``certain`` says that the message is known to be an overflow, so only its figures are read. ``ambiguous`` says that
    the status suggests another cause, so the message must name a context window.
    """
    if certain:
        return reading(text)
    text = _URL.sub(" ", text)
    sentences = [sentence for sentence in _SENTENCE_END.split(text) if sentence.strip()]
    for index, sentence in enumerate(sentences):
        both = f"{sentence} {sentences[index + 1]}" if index + 1 < len(sentences) else sentence
        if _describes_overflow(sentence, ambiguous) or (both is not sentence and _describes_overflow(both, ambiguous)):
            return reading(text)
    return None


def _describes_overflow(text: str, ambiguous: bool) -> bool:
    if _OTHER.search(text) or (_MEDIA.search(text) and not _TOKENS.search(text)):
        return False
    if not _EXCESS.search(text) and not _is_over(figures(text)) and _pair(text) is None:
        return False
    if only_output(text):
        return False
    if _WINDOW.search(text) and (_SUBJECT.search(text) or _TOKENS.search(text)):
        return not ambiguous or "context" in text
    return bool(not ambiguous and _SUBJECT.search(text) and _TOKENS.search(text) and _BOUND.search(text))


def only_output(text: str) -> bool:
    """Return whether a sentence in lower case is about the length of the output and not of the prompt."""
    return bool(_OUTPUT.search(text) and not _ASKED.search(text))


def _pair(text: str) -> tuple[int, int] | None:
    for form in _PART_OF:
        if (found := form.search(text)) is None:
            continue
        counted, most = amount(found["counted"]), amount(found["limit"])
        if counted > most >= SMALLEST_LIMIT:
            return counted, most
    return None


def _is_over(found: Sequence[Figure]) -> bool:
    limits, counts, outputs = (_of(found, role) for role in _SIZED)
    return len(limits) == 1 and bool(counts) and max(counts) + sum(outputs) > limits[0]


def reading(text: str) -> OverflowReading:
    """Return the figures of a message that describes an overflow, without those that contradict each other."""
    text = _URL.sub(" ", text)
    if both := _SUM.search(text):
        sizes = {name: amount(digits) for name, digits in both.groupdict().items()}
        return OverflowReading("input_plus_output", sizes["limit"], "total", sizes["counted"], sizes["output"])
    if _CHARACTERS.search(text) and not _TOKENS.search(text):
        return OverflowReading()  # The numbers count characters.
    if (pair := _pair(text)) is not None:
        return OverflowReading("input", pair[1], _scope(text), pair[0])
    found = figures(text)
    if len(found) == 1 and found[0].role == "limit" and not _TOKENS.search(text) and not _is_round(found[0].value):
        return OverflowReading()  # More likely an error's number than a window.
    limits, counts, outputs = (_of(found, role) for role in _SIZED)
    summed = bool(_BOTH.search(text) or (_OUTPUT.search(text) and _ASKED.search(text) and _JOINED.search(text)))
    kind: Kind = "input_plus_output" if summed else "input"
    if not limits and len(found) == 2 and not outputs and found[0].value != found[1].value:
        # No word gives either number a role: the larger one is the prompt.
        low, high = sorted(figure.value for figure in found)
        return OverflowReading(kind, low, _scope(text), None if summed else high)
    limit: int | None = limits[0] if len(limits) == 1 else None
    if limit is not None and (over := _of(found, "over")):
        return OverflowReading(kind, limit, "total", limit + over[0])
    output: int | None = outputs[0] if summed and len(outputs) == 1 else None
    counts = _without_totals(counts, outputs)
    if limit is not None and not counts and len(others := _of(found, "none")) == 1 and others[0] > limit:
        counts = others
    counted: int | None = counts[0] if len(counts) == 1 else None
    if limit is not None and counted is not None and counted + (output or 0) < limit:
        counted = None
    if summed and output is None:
        counted = None  # The message doesn't say whether the number includes the output.
    scope = "total" if summed else _scope(text)
    least = any(figure.least and figure.value == counted and figure.role == "counted" for figure in found)
    return OverflowReading(kind, limit, scope if limit else "total", counted, output, at_least=least)


def _without_totals(counts: list[int], outputs: list[int]) -> list[int]:
    """Drop a count that is the sum of others: "9100 tokens (5100 in the messages, 4000 in the completion)"."""
    if len(counts) < 2:
        return counts
    rest = sum(counts) + sum(outputs)
    for count in counts:
        if 2 * count == rest:
            return [sum(other for other in counts if other != count)]
    return counts


_SHARED_LIMIT = re.compile(
    r"context|window|n_ctx|max_seq_len|max_model_len|model (?:max(?:imum)? )?(?:length|token limit)|上下文"
)
_OF_INPUT = re.compile(r"\b(?:prompt|input|messages|request body|request contains)\b|max_num_tokens|_input_|输入")


def _scope(text: str) -> Literal["input", "total"]:
    """Return ``input`` if the message is about the prompt and doesn't name a window."""
    return "input" if _OF_INPUT.search(text) and not _SHARED_LIMIT.search(text) else "total"


def names_a_window(text: str) -> bool:
    """Return whether a message in lower case names a window, which input and output share."""
    return bool(_SHARED_LIMIT.search(text))


def _of(found: Sequence[Figure], role: Role) -> list[int]:
    return list(dict.fromkeys(figure.value for figure in found if figure.role == role))


def _is_round(value: int) -> bool:
    return value % 100 == 0 or value % 64 == 0


_PER_TIME = re.compile(
    r"\btokens? (?:per|/) ?(?:min(?:ute)?|day|hour)\b|\btp[md]\b|\btokens?[_-]per[_-](?:minute|day)\b"
)
_OUTPUT_PER_TIME = re.compile(r"\b(?:output|completion) tokens per\b")
_RATE_LIMIT = re.compile(rf"\blimit(?: is| of)?\W{{0,3}}(?P<n>{NUMBER})")
_REQUESTED = re.compile(rf"\brequested(?: tokens)?\W{{0,3}}(?P<n>{NUMBER})")


def read_rate(text: str) -> OverflowReading | None:
    """Read a limit on tokens per minute if the text states that one request exceeds it; ``None`` otherwise.

    Only a smaller request helps then, not waiting. OpenAI (429) and Groq (413): "Request too large for … on tokens per
    minute (TPM): Limit 6000, Requested 18000". The requested size includes the output, so it isn't the prompt's size.
    """
    lowered = text.lower()
    if not _PER_TIME.search(lowered) or _OUTPUT_PER_TIME.search(lowered):
        return None
    limit, requested = _RATE_LIMIT.search(lowered), _REQUESTED.search(lowered)
    if limit is None or requested is None:
        return None
    most, size = amount(limit["n"]), amount(requested["n"])
    return OverflowReading("input_plus_output", most, "total") if size > most >= SMALLEST_LIMIT else None
