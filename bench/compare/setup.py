"""The configuration that both versions run with: models, policies, and the callers' keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tests.kit.generator import PIN, SMALL_STAGES

SUMMARIZER = "compare-summarizer"
"""The model that writes summaries."""

WINDOWS = (8_192, 32_768, 65_536, 131_072, 200_000, 262_144, 400_000)
"""Tokens. Each one has a model: ``model(window)``."""

BUDGETS = (1_500, 3_000, 8_000)
"""Input tokens of the models for generated conversations: ``small_model(budget)``."""

NOTHING_AHEAD = "nothing-ahead"
"""The policy for requests that the proxy sends again. A summary in the background would compete with the next
attempt, so the result would depend on timing."""

_AT_ONCE: Mapping[str, Any] = {"prepare": None}

PLAIN_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "small-stages": SMALL_STAGES,
    "pinned": {"pinned": [PIN], **SMALL_STAGES},
    "no-archive": {"archive": None, "evict_results": {"max_tokens": 150}},
    "system": {"summary": {"role": "system"}},
    "messages": {"trigger": {"messages": 12}, "keep": {"messages": 4}},
    "own-figures": {"trigger": [{"messages": 8, "fraction": 0.5}, {"fraction": 0.8}], "keep": {"tokens": 300}},
    "shorten-last": {"shorten_last_user_message": True, "user_messages": {"keep_first": False}},
    "bare": {"duplicates": None, "truncate_args": None, "evict_results": None, "media": None},
    "shadow": {"mode": "shadow"},
    "redacting": {"summary": {"redact_secrets": True, "redact": ["deploy"]}},
    "price-step": {"trigger": {"price_step": True}, "keep": {"messages": 4}},
    NOTHING_AHEAD: _AT_ONCE,
}
"""The policies for generated conversations whose upstream accepts them."""

POLICIES: Mapping[str, Mapping[str, Any]] = {
    **PLAIN_POLICIES,
    "stages-at-once": {**SMALL_STAGES, **_AT_ONCE},
    "no-retry": {"overflow_retries": 0, **_AT_ONCE},
    "keep-output": {"output": "keep", **_AT_ONCE},
    "recall": {"recall": {"tool": "auto"}, **_AT_ONCE},
    "continue": {"summary": {"method": "continue", "max_tokens": 600}, **_AT_ONCE},
    "fallback": {"summary": {"fallback_model": f"{SUMMARIZER}-second"}, **_AT_ONCE},
    "spending": _AT_ONCE,
}

LIMITS: Mapping[str, Any] = {"spending": {"spend": {"usd": 0.01, "per": "month"}}}
"""The limits of teams. Each team has the name of its policy."""

PRICES = {
    "input_cost_per_token": 0.000001,
    "output_cost_per_token": 0.000004,
    "cache_read_input_token_cost": 0.0000001,
    "input_cost_per_token_above_1k_tokens": 0.000002,
}
"""US dollars, for every model."""

ADMIN = "sk-compare-admin"

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "strict": {"strict_alternation": True},
}
"""The kinds of models for generated conversations."""


def model(window: int, api: str = "chat") -> str:
    """Return the model with this context window in tokens."""
    return f"{_prefix(api)}window-{window}"


def small_model(budget: int, *, family: str = "small", api: str = "chat", suffix: str = "") -> str:
    """Return the model that takes this many input tokens. A strict one wants user and assistant to alternate.

    A suffix keeps the limits that the proxy learns for one case away from the other cases.
    """
    return f"{_prefix(api)}{family}-{budget}{suffix}"


def key(policy: str) -> str:
    """Return the API key of the team with this policy."""
    return f"sk-compare-{policy}"


def settings(upstream: str) -> dict[str, Any]:
    """Return the configuration. ``upstream`` is a root URL."""
    base = {"base_url": f"{upstream}/v1", "ask_limits": False}
    return {
        "admin": {"keys": [_digest(ADMIN)]},
        "prices": {"*": PRICES},
        "upstreams": {"main": {"provider": "openai", **base}, "claude": {"provider": "anthropic", **base}},
        "models": [*_models(), {"match": "claude-*", "upstream": "claude"}, {"match": "*", "upstream": "main"}],
        "policies": {name: {**policy, "summary": _summary(policy)} for name, policy in POLICIES.items()},
        "teams": {
            name: {"policy": name, "keys": [_digest(key(name))], "limits": LIMITS.get(name, {})} for name in POLICIES
        },
    }


def _prefix(api: str) -> str:
    return "claude-" if api == "messages" else ""


def _digest(secret: str) -> str:
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def _summary(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": SUMMARIZER, **policy.get("summary", {})}


def _models() -> list[dict[str, Any]]:
    profiles: dict[str, dict[str, Any]] = {SUMMARIZER + "*": {"context_window": 64_000, "max_output_tokens": 8_000}}
    for window in WINDOWS:
        profiles[model(window) + "*"] = {"context_window": window, "max_output_tokens": window // 8}
    for budget in BUDGETS:
        profile = {"context_window": budget * 2, "max_input_tokens": budget, "max_output_tokens": 500}
        for family, more in FAMILIES.items():
            profiles[small_model(budget, family=family) + "*"] = {**profile, **more}
    return [
        {"match": prefix + match, "upstream": upstream, "profile": {**profile, "tokenizer": "o200k_base"}}
        for prefix, upstream in (("", "main"), ("claude-", "claude"))
        for match, profile in profiles.items()
    ]
