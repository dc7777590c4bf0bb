"""The configuration that both versions run with: models, policies, and the callers' keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.kit.generator import PIN, SMALL_STAGES

SUMMARIZER = "compare-summarizer"
"""The model that writes every summary."""

WINDOWS = (8_192, 32_768, 65_536, 131_072, 200_000, 262_144, 400_000)
"""Tokens. Each one has a model: ``model(window)``."""

BUDGETS = (1_500, 3_000, 8_000)
"""Input tokens of the models for generated conversations: ``small_model(budget)``."""

NOTHING_AHEAD = "nothing-ahead"
"""The policy for requests that the proxy sends again. A summary in the background would compete with the next
attempt, so the result would depend on timing."""

POLICIES: Mapping[str, Mapping[str, Any]] = {
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
    NOTHING_AHEAD: {"prepare": None},
}


def model(window: int) -> str:
    """Return the model with this context window in tokens."""
    return f"window-{window}"


def small_model(budget: int, *, strict: bool) -> str:
    """Return the model that takes this many input tokens; a strict one wants user and assistant to alternate."""
    return f"{'strict' if strict else 'small'}-{budget}"


def key(policy: str) -> str:
    """Return the API key of the team with this policy."""
    return f"sk-compare-{policy}"


def configuration(upstream: str, database: Path) -> str:
    """Return the configuration as YAML. ``upstream`` is a root URL."""
    settings = {
        "store": {"url": f"sqlite:///{database}"},
        "upstreams": {"main": {"provider": "openai", "base_url": f"{upstream}/v1", "ask_limits": False}},
        "models": [*_models(), {"match": "*", "upstream": "main"}],
        "policies": {name: {**policy, "summary": _summary(policy)} for name, policy in POLICIES.items()},
        "teams": {
            name: {"policy": name, "keys": [f"sha256:{hashlib.sha256(key(name).encode()).hexdigest()}"]}
            for name in POLICIES
        },
    }
    return yaml.safe_dump(settings, sort_keys=False)


def _summary(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": SUMMARIZER, **policy.get("summary", {})}


def _models() -> list[dict[str, Any]]:
    profiles: dict[str, dict[str, Any]] = {SUMMARIZER: {"context_window": 64_000, "max_output_tokens": 8_000}}
    for window in WINDOWS:
        # The asterisk lets each case use a model name of its own, so that limits learned in one don't affect others.
        profiles[model(window) + "*"] = {"context_window": window, "max_output_tokens": window // 8}
    for budget in BUDGETS:
        profile = {"context_window": budget * 2, "max_input_tokens": budget, "max_output_tokens": 500}
        profiles[small_model(budget, strict=False)] = profile
        profiles[small_model(budget, strict=True)] = {**profile, "strict_alternation": True}
    return [
        {"match": match, "upstream": "main", "profile": {**profile, "tokenizer": "o200k_base"}}
        for match, profile in profiles.items()
    ]
