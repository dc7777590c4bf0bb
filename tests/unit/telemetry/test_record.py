"""Check which model names records and logs show."""

import pytest

from proxy.telemetry.record import HIDDEN_MODEL, shown_client, shown_model

NAMES = [
    "gpt-4.1-mini-2025-04-14",
    "o3",
    "claude-sonnet-4-5@20250929",
    "anthropic.claude-3-5-sonnet-20241022-v2:0",
    "ft:gpt-4o-mini-2024-07-18:my-org:custom_suffix:id",
    "accounts/fireworks/models/llama-v3p1-405b-instruct",
    "hf:meta-llama/Llama-3.3-70B-Instruct",
    "hf.co/bartowski/Qwen2.5-Coder-32B-Instruct-GGUF:Q4_K_M",
    "xai-grok-4-fast-non-reasoning-latest",
    "hf_some-long-name-of-a-model-2",
    "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-sonnet-4",
    "x" * 128,
]

OTHERS = [
    "",
    "what is this",
    "a\nb",
    "gpt-4\n",
    "é",
    "x" * 129,
    "<script>",
    "sk-1",
    "openai/sk-proj-4f1d",
    "sk_live_51H",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig",
    "gsk_" + "a1" * 26,
    "hf_" + "aB3" * 11,
    "AIzaSy" + "a1-" * 11,
    "nvapi-" + "a1_b-" * 12,
    "AKIA" + "A1" * 8,
    "xai-" + "a1" * 40,
    "github_pat_" + "a1" * 20,
    "0123456789abcdef" * 2,
    HIDDEN_MODEL,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown(name: str) -> None:
    assert shown_model(name) == name


@pytest.mark.parametrize("name", OTHERS)
def test_other_text_and_keys_are_hidden(name: str) -> None:
    assert shown_model(name) == HIDDEN_MODEL


@pytest.mark.parametrize("name", ["m" * 129, "openai/" + "m" * 200_000])
def test_a_long_name_is_hidden(name: str) -> None:
    assert shown_model("m" * 128) == "m" * 128
    assert shown_model(name) == HIDDEN_MODEL


@pytest.mark.parametrize("rest", ["", " (Linux; x64)", " sk-" + "a" * 200, "x" * 500])
def test_the_longest_product_and_version_are_shown(rest: str) -> None:
    longest = f"P{'r' * 39}/{'1' * 40} v2.{'3' * 29}"
    assert shown_client(longest + rest) == longest
    assert shown_client("sk-live-1/2" + rest) == HIDDEN_MODEL
    assert shown_client("(unknown)" + rest) is None
