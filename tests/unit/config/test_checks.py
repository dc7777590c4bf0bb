"""Test settings that are valid alone but not together."""

from pathlib import Path

import pytest

from tests.kit.configuration import errors_in
from tests.kit.configurations import check

HASH = "sha256:" + "ab" * 32


TOGETHER = {
    "a route to nowhere": (
        "upstreams:\n  main: {}\nmodels:\n  - match: a\n    upstream: mian\n",
        5,
        "Fix: did you mean 'main'?",
    ),
    "a team with an unknown policy": (
        "policies:\n  careful: {}\nteams:\n  a:\n    policy: carefull\n",
        5,
        "Fix: did you mean 'careful'?",
    ),
    "keys without a key": ("auth:\n  mode: keys\nupstreams:\n  main: {api_key: x}\n", 2, "Fix: add the lines"),
    "keys and an upstream without one": (
        f"auth: {{mode: keys}}\nteams:\n  a: {{keys: ['{HASH}']}}\n"
        "upstreams:\n  main: {api_key: x}\n  two:\n    lane: auto\n",
        6,
        "upstreams.two: api_key is missing",
    ),
    "an unknown parent": (
        "policies:\n  careful:\n    extends: defualt\n",
        3,
        "Fix: did you mean 'default'?",
    ),
    "its own parent": ("policies:\n  a:\n    keep: {messages: 5}\n    extends: a\n", 4, "in a circle (a → a)"),
    "prepare above a trigger in tokens": (
        "policies:\n  a:\n    prepare: {tokens: 5000}\n    trigger: [{tokens: 4000}, {fraction: 0.8}]\n",
        3,
        "5000 (tokens) must be below the trigger's 4000",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line", "hint"), TOGETHER.values(), ids=TOGETHER)
def test_settings_that_conflict_are_an_error_with_its_line(text: str | bytes, line: int, hint: str) -> None:
    (found,) = errors_in(text)
    assert found.line == line
    assert hint in found.message


PROVIDERS = {
    "openai": None,
    "anthropic": None,
    "bedrock": None,
    "anthropc": "did you mean 'anthropic'?",
    "opena": "did you mean 'openai'?",
    "zzzzzz": "lane: relay",
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_that_nobody_knows(provider: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"upstreams:\n  main:\n    provider: {provider}\n")
    hint = PROVIDERS[provider]
    if hint is None:
        assert check(file, {}) == []
        return
    (said,) = check(file, {})
    assert said.startswith(f"{file}:3: upstreams.main.provider: LiteLLM has no provider '{provider}'. Fix: ")
    assert hint in said
    file.write_text(f"upstreams: {{main: {{provider: {provider}, lane: relay, base_url: 'http://127.0.0.1:1'}}}}\n")
    assert check(file, {}) == []


def test_a_provider_without_an_address_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("server: {}\nupstreams:\n  main: {provider: hosted_vllm}\n")
    assert check(file, {}) == [
        f"{file}:3: upstreams.main: provider hosted_vllm has no default address. Fix: add base_url: https://HOST/v1"
    ]
