"""Match error messages against the known wordings of overflow errors: one row for each family of messages.

Each pattern matches a message in lower case, on one line, without embedded JSON and quoted values. The first matching
row counts, so exact rows come before general ones. A wording has a row only if ``general`` misreads it. Placeholders:

    <limit> <counted> <output>   the token counts that ``OverflowReading`` has under the same names
    <n>                          a number without a role
    (?P<least>...)               matches if the counted size is only a lower bound
    (?P<parts>...)               a list of sizes with their purposes

Numbers match possessively and gaps are bounded, so a search takes linear time in the length of the message.
``source`` names the servers with this wording. "general" rows cover other servers. ``excluded`` drops errors whose
wording resembles an overflow but that have another cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from proxy.overflow import general
from proxy.overflow.general import Kind, OverflowReading, Remedy, Scope, amount

_NUMBER = r"\d++(?:[,_]\d{3}(?!\d)){0,9}+(?:\.\d++)?+(?![km]\b)"
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
    rf"(?<!\d)(?P<size>{_NUMBER}) (?:tokens )?(?:of |in |for |from )?(?:the |your )?"
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
    row(
        "vLLM",
        r"context length is <limit> tokens and your request has <counted> input tokens \(<output> >",
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
        r"reduce the length of the messages or completion\W{1,3}current length is <n> while limit is <limit>",
        "input_plus_output",
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
        r"\b(?:input|prompt) (?:content )?(?:length )?(?:tokens? )?(?:count )?(?:limit )?exceed(?:s|ed)?\b"
        r"|too many (?:input|prompt) tokens"
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


NEVER_STATUS = frozenset({401, 402, 404, 405, 408, 504})  # keys, credit, names, methods, and timeouts
FORBIDDEN_STATUS = frozenset({403})  # Permissions. Together also uses it for long prompts, and names the context.
AMBIGUOUS_STATUS = frozenset({429, 499, 503, 529})  # an overflow only if a message names a window
RATE_STATUS = frozenset({413, 429})  # statuses of rate limits
TIER_LIMIT = 200_000  # Tokens. Providers sell longer prompts apart: to some plans, or for usage that costs extra.

TIER_GATE = re.compile(
    r"^(?=.*\b(?:available|access|enabled?|subscriptions?|plans?|tiers?|usage|credits?|upgrade|require[sd]?|eligible"
    r"|allowed|permitted)\b).*\b(?:long|extended|1m)[ -]context\b"
)
"""The words of a refusal of prompts over ``TIER_LIMIT``, in lower case."""

LARGE_BODY = re.compile(r"\b(?:request|entity|payload|body|content)\b[^.]{0,40}(?:too (?:large|long|big)|exceed|limit)")
NOT_BODY = re.compile(r"token|\b(?:images?|files?|audio|video|pdf|upload|attachment|context|prompt)\b")
"""The words of a refusal of a body's bytes, and those that no such refusal has, in lower case."""

# Codes of errors about other problems.
_CODES = frozenset(
    {
        *("rate_limit_exceeded", "rate_limit_error", "rate_limit", "rate_limit_reached_error", "ratelimitreached"),
        *("insufficient_quota", "quota_exceeded", "budget_exceeded", "overloaded_error", "throttlingexception"),
        *("servicequotaexceededexception", "toomanyrequests", "too_many_requests", "resource_exhausted"),
        *("request_too_large", "max_tokens_per_request", "entity.too.large", "file_too_large"),
        *("string_above_max_length", "array_above_max_length", "integer_above_max_value", "integer_below_min_value"),
        *("invalid_value", "invalid_api_key", "model_not_found", "content_filter", "content_policy_violation"),
        "data_inspection_failed",
    }
)

_ALONE = r"^(?!.*\b(?:context[ _-](?:length|window|size|limit)|input tokens)\b)"
"""The start of a text that names neither a window nor the prompt's size, so that it's about the output alone."""

# Words of errors about other problems, by the problem.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "rate": (
        r"\b(?:per[ -](?:min(?:ute)?|sec(?:ond)?|hour|day)|tpm|rpm|tpd|rpd)\b|rate[ -]?limit|throttl|for this minute",
        r"\b(?:try again later|please wait|retry after|in flight|queue|overloaded)\b",
        r"每(?:分钟|秒|小时|天|日)|频[繁率]|限流|流控|并发|排队",
        r"次数|qps|轮数|条数|消息数|会话数|对话数|本月|今日|当日|每月",
        r"в (?:минуту|секунду|день|сутки)|분당|毎分|1分あたり|レート制限",
    ),
    "quota": (
        r"\bquota|\bcredits?\b|\bafford|\bbilling\b|\bbudget has been\b|\bmax budget\b|allowance",
        r"余额|欠费|配额|额度|充值",
        r"квот|баланс|оплат|残高|잔액",
    ),
    "bytes": (
        r"\b(?:bytes|entity too large|content size)\b|\b\d+ ?[km]i?b\b|\bmessage size\b",
        r"payload (?:too large|size)(?![^.]{0,60}\bcontext\b)",
        r"client_max_body_size",
        r"请求体|大小",
    ),
    "media": (
        r"^(?!.*(?:\btokens?\b|\bcontext\b)).*\bur[li]s?\b",
        r"\b(?:image|audio|video) items?\b|\bencoder cache\b",
        r"\bimages?\(s\)|\bimage (?:size|dimensions)|\b(?:pixels|pages)\b|\battachment|\bfile (?:size|exceeds|too)",
        r"^(?!.*(?:token|上下文)).*(?:图片|图像|视频|音频|附件|文件|文档)",
    ),
    "other units": (
        r"^(?!.*\btokens?\b).*\bnumber of (?:images?|files?|messages|tools|functions|documents|videos?|audio"
        r"|frames|turns)\b",
        r"^(?!.*(?:\btokens?\b|\bcontext\b)).*\b\d[\d,.]{0,12}+ ?(?:images?|videos?|seconds?|secs?|minutes?"
        r"|hours?|files?|pages?|pixels?|px|frames?|tools?|functions?|documents?|urls?|words|elements?|levels?)\b",
        r"\b(?:audio|video|image|speech|recording)s?(?: \w{1,12}){0,2} (?:is|are|was) too (?:long|large|big)\b",
        r"\btool (?:input|argument|result|name|description)s?\b[^.;]{0,40}\d ?(?:characters?|chars)\b",
        r"\bsearch(?:_| )quer",
        r"^(?!.*\btokens?\b).*\b(?:length of (?:\w{1,20} ){0,2}(?:stop|stop_\w{1,20}|ids?|names?)\b|query is too long"
        r"|size of the (?:image|file|audio|video)|speech input|audio clips|description\b)",
    ),
    "characters": (r"string too long|string with (?:maximum|at most)|\bmaximum length of \d+ characters",),
    "array": (r"array too long|\d items\b|maximum number of (?:items|messages|tools|images)",),
    "output": (
        rf"{_ALONE}.*max(?:imum)?_?(?:completion_|output_|new_)?tokens (?:is|are) (?:too large|limited)",
        rf"{_ALONE}[`']?max_(?!total)\w{{0,20}}tokens\b[^:+]{{0,40}}(?:exceed|must|cannot|larger|too large)",
        r"^max(?:imum)? tokens (?:exceed|must|cannot)",
        r"number of output tokens|\bmax_?(?:completion_|output_)?tokens'?[^.;]{0,40} (?:cannot|can't) be greater",
        r"supports at most [\d,]+ (?:completion|output)|(?<!and )\bmaximum output\b|max_?output_?tokens value",
        r"maximum tokens you requested|(?<!\+ )(?<!and )max_tokens must be|invalid max_tokens|model output limit was",
        r"^(?!.*(?:输入|上下文|提示|prompt)).*(?:输出|生成长度|max_\w{0,12}tokens ?(?:参数|超|过|大))",
    ),
    "schema": (
        r"\binput should be (?:a|an|less|greater|at)\b",
        r"^invalid (?:value|schema|')|truncate_prompt_tokens|\bthinking.budget|\bobject properties\b",
    ),
    "fit elsewhere": (r"model name|batchsize|deadline|\btoo small\b.{0,12}\bminimum\b",),
    "server": (r"\bstack overflow\b|\bthreads?\b|\bcuda\b|out of memory",),
    "plan": (r"\b(?:subscription|your plan|not yet available|permissions?)\b",),
    "field": (r"(?:标题|名称|用户名|昵称|描述|字段|密码|标签|备注|文件名)\S{0,6}(?:长度|字数)",),
    "key": (r"令牌(?:数量|额度)|(?:api )?keys? (?:limit|quota)",),
    "fetching": (
        r"\b(?:fail(?:ed|ure|s)?|unable|error|could ?n[o']t|could not|cannot|can't)(?: \w+){0,2} (?:to )?"
        r"(?:(?:down)?load|fetch(?!\w* new request)|retriev|decod|pars|open|identify|resolv)(?:e|ed|ing)?\b",
        r"\bnot found\b|\bno such\b",
    ),
    "content": (r"content (?:was )?filtered|content management policy|safety (?:system|violations)",),
}
_MATTER = re.compile(
    r"(?:image|media|audio|video|file|url|download|fetch|json|pars(?:e|ing)|decod|schema|function|regex|grammar)"
    r"|(?<![a-z])tools?(?![a-z])"
)
"""Words for other problems in an error's code, or in the name of the parameter that the error is about."""

_EXCLUDED = tuple(re.compile(pattern) for patterns in _WORDS.values() for pattern in patterns)


def excluded(codes: Iterable[str], texts: Iterable[str]) -> bool:
    """Return whether an error is about another problem than a long prompt. ``codes`` are lower case."""
    if any(code in _CODES or _MATTER.search(code) for code in codes):
        return True
    return any(pattern.search(text) for text in map(str.lower, texts) for pattern in _EXCLUDED)
