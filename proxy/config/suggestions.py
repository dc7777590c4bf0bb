"""Fixes for common mistakes in values and names of settings."""

from __future__ import annotations

import re

from proxy.config.tree import shown

MIGRATING = "docs/migrating.md"

_FROM_LITELLM = f"this looks like a LiteLLM configuration; {MIGRATING} lists the settings that replace it"

LITELLM = dict.fromkeys(
    (
        "model_list",
        "litellm_settings",
        "litellm_params",
        "general_settings",
        "router_settings",
        "environment_variables",
        "master_key",
        "database_url",
        "callback_settings",
        "guardrails",
        "mcp_servers",
    ),
    _FROM_LITELLM,
)
"""Fixes by the name of a setting that only LiteLLM has."""

UNKNOWN = {
    "server.workers": "remove it, and set the number of workers with serve --workers N",
    "workers": "remove it, and set the number of workers with serve --workers N",
    "logging": "write log, with level, format, and requests, as in log: {level: info, format: json, requests: all}",
    "log_level": "write log: {level: info}. log.format and log.requests set the format and which requests to log",
    "auth.keys": 'list keys under a team: teams: {NAME: {keys: ["sha256:…"]}}',
    "api_key": 'set it at an upstream: upstreams: {main: {api_key: "${OPENAI_API_KEY}"}}',
    "base_url": 'set it at an upstream: upstreams: {main: {base_url: "https://api.openai.com/v1"}}',
}
"""Fixes by the path of a setting that exists elsewhere."""

MISSING = {
    "match": 'match: "*"',
    "upstream": "upstream: NAME, a name under upstreams",
    "hash": 'hash: "sha256:…", as printed by: compaction-proxy keys new --team NAME',
}
"""Lines to add, by the name of a setting that is required."""

_AMOUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SECONDS = {"s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "minutes": 60, "h": 3600}
_COUNTS = {"k": 1_000, "m": 1_000_000, "d": 1, "day": 1, "days": 1, "tokens": 1, "messages": 1, "s": 1}
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?)\s*%")
_SPECIAL = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|~|[-+.0-9].*|.*[:#{}\[\],&*!|>'\"%@`].*|\s.*|.*\s")


def number_for(text: str, *, whole: bool) -> str | None:
    """Return the plain number for a text like ``45s`` or ``128k``, or ``None``."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = None if found is None else ({"": 1} | (_COUNTS if whole else _SECONDS)).get(found[2].lower())
    if found is None or unit is None or len(text) > 20:
        return None
    value = float(found[1].replace("_", "").replace(",", "")) * unit
    return f"{round(value)}" if whole or value.is_integer() else f"{value}"


def quoted(text: str) -> str:
    """Return a text with quotes if YAML would read another type without them."""
    return f'"{text}"' if _SPECIAL.fullmatch(text) else text


def section_for(name: str, text: str, main: str | None, *, is_number: bool) -> str:
    """Return the section that a plain value probably means. ``text`` is empty if it can't be shown.

    ``main`` is the section's setting that such a value probably means, and ``is_number`` whether that's a number.
    """
    if main is None or not text:
        return f"write its settings, as in {name or 'name'}: {{{main or 'setting'}: value}}"
    if is_number:
        number = number_for(text, whole=True)
        return f"write {name}: {{{main}: {number or 'N'}}}"
    return f"did you mean {name}: {{{main}: {quoted(shown(text))}}}?"


def condition_for(value: object, usual: str) -> str:
    """Return the condition that a plain value probably means: a fraction or a number of tokens."""
    text = str(value)
    percent = _PERCENT.fullmatch(text.strip())
    if percent is not None and 0 < float(percent[1]) <= 100:
        return f"{{fraction: {float(percent[1]) / 100:g}}}"
    known = None if isinstance(value, bool) else number_for(text, whole=False) or number_for(text, whole=True)
    number = float(known) if known is not None else 0
    if 0 < number <= 1:
        return f"{{fraction: {number:g}}}"
    if 1 < number <= 100:
        return f"{{fraction: {number / 100:g}}}"
    return f"{{tokens: {number_for(text, whole=True)}}}" if number else usual
