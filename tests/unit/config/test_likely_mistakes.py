"""Test the warnings about settings that are valid but probably not intended."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from proxy.config import read

UP = "upstreams:\n  main: {base_url: 'http://127.0.0.1:9/v1'}\n"


POLICY = "policies:\n  default:\n    %s\n"


FORM = re.compile(r".+?:\d+: warning: (?:[\w.\[\]-]+: )?.+?\. Fix: .+", re.DOTALL)

WARNINGS = {
    "a route that is never reached": (
        UP + "models:\n  - {match: '*', upstream: main}\n  - {match: gpt-4o, upstream: main}\n",
        5,
        "models[1].match: never reached, because models[0] ('*') comes first. Fix: move this route before models[0]",
    ),
    "keep above the trigger": (
        POLICY % "trigger: {fraction: 0.5}\n    keep: {fraction: 0.6}",
        4,
        "policies.default.keep: 0.6 (fraction) isn't below the trigger's 0.5, so a compaction can keep all messages. "
        "Fix: keep: {fraction: 0.1}",
    ),
    "keep above the trigger of a model": (
        POLICY % "models: [{match: 'a*', trigger: {messages: 9}, keep: {messages: 9}}]",
        3,
        "Fix: keep: {messages: 1}",
    ),
    "Azure": (
        "upstreams:\n  az:\n    provider: azure\n    base_url: https://x.openai.azure.com\n",
        2,
        'Fix: add api_version: "2024-10-21"',
    ),
    "an unknown window": (
        UP + "models:\n  - {match: my-model, upstream: main}\n",
        4,
        "the context window of 'my-model' is unknown unless the upstream reports it. "
        "Fix: add its size in tokens, as in profile: {context_window: 128000}",
    ),
    "a trigger above a step in the price": (
        UP + "models:\n  - {match: gpt-6-astra, upstream: main}\n" + POLICY % "trigger: {fraction: 0.8}",
        7,
        "'gpt-6-astra' costs more over 272,000 tokens, but 'default' compacts at ",
    ),
    "the default trigger above a step in the operator's own price": (
        UP + "models:\n  - {match: m, upstream: main, profile: {context_window: 200000}}\n"
        "prices: {m: {input_cost_per_token: 0.000001, input_cost_per_token_above_100k_tokens: 0.000002}}\n",
        4,
        "Fix: add a condition, as in trigger: [{price_step: true}, {fraction: 0.85}]",
    ),
    "compaction by a provider that can't": (
        UP.replace("{", "{provider: groq, ") + "models:\n  - {match: '*', upstream: main}\n"
        "policies: {default: {summary: {native: true}}}\n",
        5,
        "policies.default.summary.native: no model of this policy has a provider that compacts",
    ),
    "compaction of a model that can't": (
        "upstreams: {a: {provider: anthropic}}\nmodels:\n  - {match: claude-haiku-4-5, upstream: a}\n"
        "  - {match: claude-opus-5-5, upstream: a}\n"
        "policies: {default: {models: [{match: claude-haiku-4-5, summary: {native: true}}]}}\n",
        5,
        "policies.default.models[0].summary.native: no model of this policy",
    ),
    "a summary model that the team may not use": (
        UP
        + "models:\n  - {match: '*', upstream: main}\n"
        + POLICY % "summary: {model: cheap}"
        + f"teams:\n  t:\n    models: ['local/*']\n    keys: ['sha256:{'1' * 64}']\n",
        10,
        "teams.t.models: policy 'default' names 'cheap' at upstream 'main' for summaries, which team 't' may not use, "
        "so the proxy doesn't send this model the team's conversations. Fix: add \"cheap\"",
    ),
    "a summary model of an override that the team may not use": (
        UP
        + "models:\n  - {match: '*', upstream: main}\n"
        + POLICY % "models: [{match: 'local/*', summary: {fallback_model: cheap}}, {match: 'a*', summary: {model: b}}]"
        + f"teams:\n  t:\n    models: ['local/*']\n    keys: ['sha256:{'1' * 64}']\n",
        10,
        "teams.t.models: policy 'default' names 'cheap' at upstream 'main'",
    ),
    "a team without keys": ("teams:\n  t: {keys: []}\n", 2, "compaction-proxy keys new --team t"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_likely_mistake_is_a_warning_with_its_fix(name: str, tmp_path: Path) -> None:
    text, line, hint = WARNINGS[name]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (found,) = read(file, {}).warnings
    assert found.startswith(f"{file}:{line}: warning: ")
    assert hint in found
    assert FORM.fullmatch(found)


def test_what_is_hardly_meant_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        dedent(
            """
        upstreams: {openai: {}}
        models:
          - {match: "gpt-5*", upstream: openai}
        policies:
          default:
            summary: {model: gpt-5-mini, fallback_model: gpt-4o}
            models:
              - match: "gpt-5.2*"
                summary:
                  model: o9
        teams:
          one: {models: ["gpt-*", "*mini", "claude-*"], keys: ["KEY1"]}
          none: {models: [], keys: ["KEY2"]}
        """
        ).replace("KEY", "sha256:" + "1" * 63)
    )
    assert [line.removeprefix(f"{file}:").partition(", so")[0] for line in read(file, {}).warnings] == [
        "7: warning: policies.default.summary.fallback_model: no route of 'models' matches 'gpt-4o'",
        "11: warning: policies.default.models[0].summary.model: no route of 'models' matches 'o9'",
        "13: warning: teams.one.models[2]: no route of 'models' can match 'claude-*'",
    ]
    file.write_text("policies: {default: {summary: {model: anything}}}\n")
    assert read(file, {}).warnings == (), "without routes every model has one"


def test_a_trigger_below_the_price_step_is_none(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    routes = UP + "models:\n  - {match: gpt-6-astra, upstream: main}\n"
    file.write_text(routes + POLICY % "trigger: [{price_step: true}, {fraction: 0.85}]")
    assert read(file, {}).warnings == ()
