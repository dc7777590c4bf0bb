"""Match error messages against the known wordings of overflow errors: one row for each family of messages.

Each pattern matches a message in lower case, on one line, without embedded JSON and quoted values. The first matching
row counts, so exact rows come before general ones. A wording has a row only if ``general`` misreads it. Placeholders:

    <limit> <counted> <output>   the token counts that ``OverflowReading`` has under the same names
    <n>                          a number without a role
    (?P<least>...)               matches if the counted size is only a lower bound
    (?P<parts>...)               a list of sizes with their purposes

Numbers match possessively and gaps are bounded, so a search takes linear time in the length of the message.
``source`` names the servers with this wording. "general" rows cover other servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from proxy.overflow import general
from proxy.overflow.figures import amount
from proxy.overflow.reading import Kind, OverflowReading, Remedy, Scope

_NUMBER = r"\d++(?:[,_]\d{3}(?!\d))*+(?:\.\d++)?+(?![km]\b)"
_PLACEHOLDERS = {
    "<limit>": rf"(?P<limit>{_NUMBER})",
    "<counted>": rf"(?P<counted>{_NUMBER})",
    "<output>": rf"(?P<output>{_NUMBER})",
    "<n>": _NUMBER,
    # "maximum context length is 8192 tokens. However, ", "… of some-model is 32768. However, "
    "<window>": (
        r"maximum (?:context|model) length (?:of [\w./:-]{1,80} )?(?:is|of) "
        rf"(?P<limit>{_NUMBER})(?: tokens)?\W{{1,3}}"
    ),
    "<context>": r"(?:context|prompt|model)[ _-]?(?:length|window|size|limit)",
}
_PART = re.compile(
    rf"(?P<size>{_NUMBER}) (?:tokens )?(?:of |in |for |from )?(?:the |your )?"
    r"(?P<purpose>[a-z]{1,20}(?: [a-z]{1,20})?)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One family of messages. With ``figures``, the words around a number decide its role."""

    source: str
    pattern: re.Pattern[str]
    kind: Kind = "input"
    scope: Scope = "total"
    remedy: Remedy | None = None
    figures: bool = False


def row(
    source: str,
    pattern: str,
    kind: Kind = "input",
    scope: Scope = "total",
    remedy: Remedy | None = None,
    *,
    figures: bool = False,
) -> Row:
    """Return a row. ``pattern`` may contain the placeholders."""
    for name, expression in _PLACEHOLDERS.items():
        pattern = pattern.replace(name, expression)
    return Row(source, re.compile(pattern), kind, scope, remedy, figures)


CODES: Mapping[str, str] = {
    "context_length_exceeded": "OpenAI, Azure, Groq, Cerebras, llama-cpp-python, LiteLLM",
    "context_window_exceeded": "general",
    "contextwindowexceedederror": "LiteLLM",
    "exceed_context_size_error": "llama.cpp",
    "model_max_prompt_tokens_exceeded": "GitHub Copilot",
    "tokens_limit_reached": "GitHub Models, Azure",
    "too_many_prompt_tokens": "Perplexity",
    "outofcontexterror": "Volcengine",
    "context_exceeded": "DS4",
    "tokens_too_long": "Qianfan, Modelverse",
    "characters_too_long": "Qianfan",
    "content_length_exceeds_threshold": "Amazon Q",
    "message_length_exceeds_limit": "ChatGPT",
    "user_message_too_long": "Poe",
    "prompt_too_long": "Aleph Alpha",
    "prompt_limit": "Claude relay",
    "model_context_window_exceeded": "Anthropic",
}
"""Codes of overflow errors, in lower case, and the servers that send them. Mistral's 3051 and MiniMax's 2013 aren't
listed because these servers also send them for other errors."""

CODE_SHAPE = re.compile(
    r"^(?!.*(?:rate|quota|output|completion|minute|day|image|file|audio|video|usage|budget|credit|deadline|batch|string"
    r"|array|tool|name|key|schema|stop|body|upload|retr|timeout)).*(?:(?:context|prompt|input"
    r"|conversation)(?:_[a-z]+){0,3}_(?:exceed\w*|overflow\w*|too_(?:long|large|big|many\w*))|(?:context|prompt"
    r"|input)_?(?:length|window|tokens?|size)_(?:error|limit(?:_reached)?)$|exceed(?:s|ed)?(?:_[a-z]+){0,2}_(?:context"
    r"|prompt|input)|too_(?:many|long)(?:_[a-z]+){0,2}_(?:context|prompt|input)|(?:tokens?|characters?"
    r"|messages?)_too_long|(?:content|message)_length_exceed)"
)
"""The form of unlisted codes of overflow errors, in lower case with underscores."""

ROWS: tuple[Row, ...] = (
    # OpenAI's sentence and its variants.
    row(
        "vLLM",
        r"<window>however, you requested <output> output tokens "
        r"and your prompt contains (?P<least>at least )?<counted> input",
        "input_plus_output",
    ),
    row(
        "vLLM",
        r"<window>however, you requested <output> output tokens and your prompt contains <n> characters",
        "input_plus_output",
    ),
    # vLLM doesn't tokenize such a long text. The next number repeats the limit.
    row("vLLM", r"<window>however, your (?:prompt|request|input) contains <n> characters"),
    row(
        "OpenAI, Azure, DeepSeek, llama-cpp-python, OpenRouter",
        r"<window>however,? you requested (?:about )?<n> tokens \((?P<parts>[^)]{1,300})\)",
        "input_plus_output",
    ),
    row(
        "vLLM",
        r"you passed (?P<least>at least )?<counted> input tokens and requested <output> output tokens\. however, "
        r"the model's context length is only <limit> tokens",
        "input_plus_output",
    ),
    # Other providers and servers.
    row("Anthropic", r"prompt is too long: <counted> tokens > <limit> maximum"),
    row("Anthropic", r"max_tokens: <output> > context_window: <limit> - input_tokens: <counted>", "input_plus_output"),
    row("Bedrock", r"#/(?:inputtext|prompt|inputs?): expected maxlength: <n>"),
    row("Gemini", r"cannot truncate to <limit>, required <counted>", scope="input"),
    row(
        "TGI",
        r"inputs` tokens \+ `max_new_tokens` must be <= <limit>\W{1,3}given: <counted> `?inputs`? tokens and <output>",
        "input_plus_output",
    ),
    row("TGI", r"inputs` must have less than <limit> tokens\W{1,3}given: <counted>", scope="input"),
    row("vLLM", r"input prompt \(<counted> tokens\) is too long and exceeds (?:the )?(?:limit|capacity) of <limit>"),
    row(
        "llama.cpp",
        r"(?:request|input|prompt) \(<counted> tokens\) (?:exceeds|is larger than) the "
        r"(?:available |max )?context size \(<limit>",
    ),
    row("llama.cpp, LM Studio", r"context size has been exceeded", "input_plus_output", remedy="compact"),
    row("llama.cpp", r"input \(<counted> tokens\) is too large to process"),
    row("LM Studio", r"keep the (?P<least>first) <counted> tokens.{1,120}context length of only <limit> tokens"),
    row("LM Studio", r"n_(?P<least>keep): <counted> >= n_ctx: <limit>"),
    row("xAI", r"maximum prompt length is <limit> but the request contains <counted> tokens"),
    row(
        "Cerebras",
        r"reduce the length of the messages or completion\W{1,3}current length is <counted> while limit is <limit>",
    ),
    row("watsonx", r"number of input tokens <counted> cannot exceed the total tokens limit <limit>"),
    row(
        "Cloudflare",
        r"input and maximum output tokens \(<n>\) exceeded this model context window limit \(<limit>",
        "input_plus_output",
    ),
    row("Moonshot", r"exceeded model token limit ?: ?<limit> \(requested: <counted>"),
    row("Moonshot", r"exceeded model token limit ?: ?<limit>", "input_plus_output"),
    row(
        "Chinese services",
        r"(?:输入|上下文|提示词?|对话|历史|会话|消息|文本|内容|请求长度|(?<![a-z_])prompt|(?<![a-z_])tokens?)[^。;，,]{0,16}"
        r"(?:过长|太长|超长|超出|超过|超限|大于)"
        r"|(?:超出|超过)[^。;，,]{0,10}(?:上下文|输入长度|最大长度|(?<![a-z_])tokens? ?限制)"
        r"|(?:压缩|缩短|精简|减少)(?:上下文|输入|对话|提示)",
        figures=True,
    ),
    row(
        "general, in other languages",
        r"(?:コンテキスト|プロンプト|入力|トークン)[^。]{0,16}(?:超え|超過|長すぎ)|(?:컨텍스트|프롬프트|입력"
        r"|토큰)[^.]{0,16}(?:초과|너무 (?:길|깁)|넘)|слишком (?:много токенов|длинн\w{0,3} (?:запрос|промпт|контекст))"
        r"|(?:запрос|промпт|контекст|токенов)[^.]{0,30}(?:превыша|превышен|слишком длин)",
        figures=True,
    ),
    row("Volcengine", r"exceed max message tokens"),
    row("AI21", r"too many tokens\W{1,3}total tokens: <counted>, maximum: <limit>"),
    row("LiteLLM", r"max input tokens=<limit>, got=<counted>", scope="input"),
    row("Snowflake", r"^max tokens of <limit> exceeded"),
    row("Apple", r"provided <counted> tokens, but the maximum allowed is <limit>", scope="input"),
    row("Bedrock", r"^[^#]{0,60}expected maxlength: <n>, actual"),
    row("LM Studio", r"reached context length of <limit> tokens", "input_plus_output", remedy="compact"),
    row("Qianfan, YandexGPT", r"\binput characters?(?: limit)?(?: is|:)|\btext length is <n>, which is outside"),
    row("Qianfan", r"\binput token limit is <limit>", scope="input"),
    # General: the words of an overflow, and a number if its place shows its role.
    row("general", r"^[^.;]{0,40}\bmodel's maximum context length is <limit>(?: tokens)?\b", figures=True),
    row(
        "Together, general",
        r"(?:inputs?|prompt)`?(?: tokens?)?(?: count)?`? ?\+ ?`?max_(?:new_|completion_|output_)?tokens`?[^.;]{0,30}"
        r"(?:exceed|must be|larger than|greater than|longer than)",
        "input_plus_output",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:input|prompt) (?:tokens? )?(?:count )?(?:limit )?exceed(?:s|ed)?\b|too many (?:input|prompt) tokens"
        r"|number of tokens in (?:the |your )?(?:prompt|input|request)[^.;]{0,30}exceed",
        scope="input",
        figures=True,
    ),
    row(
        "general",
        r"(?:exceed|larger than|longer than|greater than|overflow|surpass|too (?:long|large) for)[^.;]{0,50}"
        r"(?:<context>|max_model_len|n_ctx|max_seq_len|maximum input length|maximum number of (?:input )?tokens)",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:context[ _-]?(?:length|window|size|limit)|n_ctx|max_model_len|max_seq_len)[^.;]{0,30}(?:exceeded"
        r"|overflow|too (?:small|long|large)|reached)|context[_ ]?(?:length|window)[_ ]?exceeded|\bcontext[_ ]overflow"
        r"|\blength of (?:all |the |your )?(?:messages|prompt|input|conversation)[^.;]{0,20}exceed|\b(?:not enough"
        r"|insufficient) context\b(?! caching)|\bonly <n> (?:tokens )?(?:fit|are left|are available)\b|\b(?:requires?"
        r"|needs?) (?:a )?(?:larger|bigger|longer|more) context\b|\bcontext (?:length|window|size|limit) (?:is"
        r"|of) [^.;]{1,20}, (?:but )?you(?:r \w{1,12})? (?:requested|sent|provided|passed|has|have|needs?)\b",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:prompt|input|conversation|context|messages)(?: tokens| length)? (?:(?:is|are|was) )?too (?:long"
        r"|large)\b|\b(?:prompt|input)s?(?: tokens?)?[ _]?too[ _]?(?:long|large)\b|\b(?:query|text"
        r"|message)s? too long\b|\b(?:prompt|input|message|query|text|request)s?(?: (?!(?:ids?|names?|titles?|arrays?"
        r"|lists?|urls?|headers?|keys?|time\w*|roles?)\b)\w{1,12}){0,3} (?:is|was|are|were) (?:much |far )?too long\b"
        r"|\btoo many tokens in (?:the |your )?(?:prompt|input|request|messages|conversation)\b|\b(?:prompt"
        r"|conversation|history|transcript|messages)(?: (?:history|you|sent|provided|is|are|was|has|have|been|become"
        r"|grown|got|now|much|far)){0,5} too long\b|\b(?:prompt|input|request) (?:has|contains) too many tokens"
        r"|\brequest (?:is )?too long: <n> tokens|too many tokens: <n> > <n>",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:reduce|shorten) (?:the )?(?:length of )?(?:the |your )?(?:prompt|messages|input|conversation)\b",
        figures=True,
    ),
)


def read(text: str, rows: Iterable[Row]) -> OverflowReading | None:
    """Read a cleaned message in lower case; ``None`` if no row matches it."""
    for known in rows:
        if (found := known.pattern.search(text)) and not (known.figures and general.only_output(text)):
            return _by_words(known, text) if known.figures else _by_groups(known, found)
    return None


def _by_groups(row: Row, found: re.Match[str]) -> OverflowReading:
    groups = found.groupdict()
    limit, counted, output = (
        amount(digits) if (digits := groups.get(name)) else None for name in ("limit", "counted", "output")
    )
    if parts := groups.get("parts"):
        counted, output = _sum(parts)
    return OverflowReading(row.kind, limit, row.scope, counted, output, row.remedy, at_least=bool(groups.get("least")))


def _by_words(row: Row, text: str) -> OverflowReading:
    reading = general.reading(text)
    kind: Kind = "input_plus_output" if "input_plus_output" in (row.kind, reading.kind) else "input"
    of_input = row.scope == "input" and kind == "input" and not general.names_a_window(text)
    return replace(reading, kind=kind, scope=row.scope if of_input else reading.scope, remedy=row.remedy)


def _sum(parts: str) -> tuple[int | None, int | None]:
    """Return input and output of ``122163 of text input, 58582 of tool input, 32000 in the output``."""
    counted, output = None, None
    for part in _PART.finditer(parts):
        size = amount(part["size"])
        if "completion" in part["purpose"] or "output" in part["purpose"]:
            output = (output or 0) + size
        else:
            counted = (counted or 0) + size
    return counted, output
