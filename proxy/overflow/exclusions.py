"""Errors whose wording resembles an overflow but that have another cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

NEVER_STATUS = frozenset({401, 402, 404, 405, 408, 504})
"""Statuses for keys, credit, names, methods, and timeouts. They never mean a long prompt."""

FORBIDDEN_STATUS = frozenset({403})
"""Permission errors. Together also uses this status for long prompts and then names the context."""

AMBIGUOUS_STATUS = frozenset({429, 499, 503, 529})
"""Statuses for rates, load, and disconnected clients. They mean an overflow only if a message names a window."""

RATE_STATUS = frozenset({413, 429})
"""Statuses of rate limits."""

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
    "characters": (r"string too long|string with (?:maximum|at most)|\bmaximum length of \d+ characters",),
    "array": (r"array too long|\d items\b|maximum number of (?:items|messages|tools|images)",),
    "output": (
        r"max(?:imum)?_?(?:completion_|output_|new_)?tokens (?:is|are) (?:too large|limited)",
        r"^[`']?max_(?!total)\w{0,20}tokens\b[^:+]{0,40}(?:exceed|must|cannot|larger|too large)",
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
