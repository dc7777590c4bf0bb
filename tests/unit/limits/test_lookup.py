"""Test the lookup of limits by model name, with LiteLLM's table and with invented ones."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import ConfigurationError
from proxy.limits import tables
from proxy.limits.profiles import REMEMBERED, Profile, Profiles
from proxy.limits.tables import as_tokens
from proxy.tokens.media import RULES
from proxy.tokens.text import check
from proxy.tokens.tools import PROMPT

PROFILES = Profiles()


@dataclass(frozen=True)
class Settings:
    context_window: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_bytes: int | None = None
    max_messages: int | None = None
    tokenizer: str | None = None
    images: str | None = None
    strict_alternation: bool | None = None


def limits(profile: Profile) -> tuple[int | None, int | None, int | None]:
    return profile.context_window, profile.max_input_tokens, profile.max_output_tokens


GPT_5 = (400_000, 272_000, 128_000)
GPT_54 = (1_050_000, 922_000, 128_000)


@pytest.mark.parametrize(
    ("model", "provider", "expected"),
    [
        ("gpt-5", None, GPT_5),
        ("gpt-5.1-codex", "openai", GPT_5),
        ("gpt-5-pro", None, GPT_5),
        ("gpt-5.3-codex", None, GPT_5),
        ("gpt-5.5-pro", "azure", GPT_54),
        ("gpt-5.4-mini", None, GPT_5),
        ("gpt-5-chat-latest", None, (128_000, 128_000, 16_384)),
        ("gpt-4o", None, (128_000, 128_000, 16_384)),
        ("gpt-3.5-turbo", None, (16_385, 16_385, 4_096)),
        ("claude-sonnet-4-5", "anthropic", (200_000, 200_000, 64_000)),
    ],
)
def test_limits_in_force(model: str, provider: str | None, expected: tuple[int, int, int]) -> None:
    profile = PROFILES.find(model, provider=provider)
    assert limits(profile) == expected
    assert profile.note is None
    assert profile.has_limit


@pytest.mark.parametrize(
    ("name", "taken_as"),
    [
        ("gpt-5-2", "gpt-5.2"),
        ("openai/GPT-5-2", "gpt-5.2"),
        ("gpt-5.2-2031-01-01", "gpt-5.2"),
        ("gpt-4o-latest", "gpt-4o"),
        ("anthropic/claude-sonnet-4.5", "claude-sonnet-4-5"),
        ("ft:gpt-4o-mini-2024-07-18:org::id", "gpt-4o-mini-2024-07-18"),
        ("openai/ft:gpt-4o-2024-08-06:org:name:id", "gpt-4o-2024-08-06"),
        ("openai/gpt-4o:free", "gpt-4o"),
    ],
)
def test_near_misses_are_resolved_and_said(name: str, taken_as: str) -> None:
    profile = PROFILES.find(name)
    assert profile.note == f"{name} is not listed; taken as {taken_as}"
    assert limits(profile) == limits(PROFILES.find(taken_as))
    assert profile.model == name


@pytest.mark.parametrize("name", ["openai/gpt-4o", "GPT-4o", "azure/eu/gpt-5", "models/gemini-2.5-pro"])
def test_a_path_before_the_name_is_no_near_miss(name: str) -> None:
    profile = PROFILES.find(name)
    assert profile.note is None
    assert profile.has_limit


def test_bedrock_and_vertex_spellings() -> None:
    for name in (
        "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
        "eu.anthropic.claude-sonnet-4-5-20250929-v1:0",
        "claude-sonnet-4-5@20250929",
        "bedrock/anthropic.claude-sonnet-4-5-20250929-v1:0",
    ):
        profile = PROFILES.find(name)
        assert profile.context_window == 200_000, name
        assert profile.images == "claude"


@pytest.mark.parametrize("name", ["gpt-9-turbo", "my-model", "", "/", "x" * 5000, "gpt-5", "\ud800"])
def test_unknown_models_have_no_limits(name: str) -> None:
    profile = Profiles({"gpt-4o": {"max_input_tokens": 128_000, "mode": "chat"}}).find(name)
    assert limits(profile) == (None, None, None)
    assert not profile.has_limit
    assert profile.note
    assert "no limits are known" in profile.note
    assert profile.sources["context_window"] == "unknown"


def test_an_unknown_model_is_told_of_names_like_it() -> None:
    assert "gpt-4-turbo" in (PROFILES.find("gpt-4-turbbo").note or "")


def test_sources_say_where_each_field_comes_from() -> None:
    sources = PROFILES.find("gpt-5.1-codex").sources
    assert sources["max_input_tokens"] == "corrections: GPT-5 to GPT-5.3"
    assert sources["max_output_tokens"] == "litellm table: gpt-5.1-codex"
    assert PROFILES.find("gpt-4o").sources["context_window"].startswith("litellm table: gpt-4o")
    assert PROFILES.find("gpt-4o").sources["tokenizer"] == "corrections: gpt-4o, 4.1 and 4.5"


def test_an_upstream_may_offer_less() -> None:
    table = {"hub/gpt-5": {"max_input_tokens": 100_000, "max_output_tokens": 8_000, "litellm_provider": "hub"}}
    assert limits(Profiles(table).find("gpt-5", provider="hub")) == (108_000, 100_000, 8_000)


def listed(provider: str, window: int) -> dict[str, Any]:
    return {"litellm_provider": provider, "max_input_tokens": window, "max_output_tokens": 1_000, "mode": "chat"}


def test_what_the_operator_states_wins() -> None:
    profile = PROFILES.find("support-bot", override=Settings(32_000, None, 4_000, tokenizer="cl100k_base"))
    assert limits(profile) == (32_000, None, 4_000)
    assert (profile.tokenizer, profile.token_ratio, profile.note) == ("cl100k_base", 1.0, None)
    assert profile.sources["context_window"] == "override"

    smaller = PROFILES.find("gpt-5", override=Settings(context_window=64_000))
    assert limits(smaller) == (64_000, None, 128_000)
    named = PROFILES.find("claude-sonnet-4-5", override=Settings(tokenizer="o200k_base", images="gpt-4o"))
    assert (named.context_window, named.images) == (200_000, "gpt-4o")
    assert named.token_ratio == PROFILES.find("claude-sonnet-4-5").token_ratio > 1


@pytest.mark.parametrize(
    ("model", "tokenizer", "exact"),
    [
        ("gpt-4o", "o200k_base", True),
        ("gpt-4.1-mini", "o200k_base", True),
        ("o4-mini", "o200k_base", True),
        ("chatgpt-4o-latest", "o200k_base", True),
        ("gpt-35-turbo", "cl100k_base", True),
        ("gemini-2.5-flash", "o200k_base", False),
        ("meta-llama/Llama-3.3-70B-Instruct", "cl100k_base", False),
        ("mistral-large-latest", "o200k_base", False),
    ],
)
def test_tokenizers(model: str, tokenizer: str, exact: bool) -> None:
    profile = PROFILES.find(model)
    assert profile.tokenizer == tokenizer
    assert (profile.token_ratio == 1.0) is exact
    assert 1.0 <= profile.token_ratio <= 2.0


def test_newer_claude_models_count_more() -> None:
    for name in ("claude-opus-4-7", "us.anthropic.claude-opus-5", "claude-sonnet-5"):
        assert PROFILES.find(name).token_ratio == 1.6, name
    for name in ("claude-opus-4-6", "claude-3-5-sonnet-20241022", "claude-haiku-4-5"):
        assert PROFILES.find(name).token_ratio == 1.25, name


@pytest.mark.long
def test_every_listed_model_has_a_sound_profile() -> None:
    for name, listing in tables.load().items():
        profile = PROFILES.find(name)
        check(profile.tokenizer)
        assert profile.images in RULES
        assert profile.tools == "typescript" or profile.tools in PROMPT
        if listing.max_input_tokens:
            assert profile.max_input_tokens
            assert profile.max_input_tokens <= listing.max_input_tokens, name
            assert profile.max_input_tokens <= (profile.context_window or profile.max_input_tokens), name


@given(st.text(max_size=300), st.none() | st.text(max_size=20))
def test_any_name_has_an_answer(name: str, provider: str | None) -> None:
    assert PROFILES.find(name, provider=provider).model == name


def test_what_is_remembered_is_bounded() -> None:
    profiles = Profiles({"gpt-4o": listed("openai", 128_000)})
    assert profiles.find("gpt-4o") is profiles.find("gpt-4o")
    for number in range(REMEMBERED + 10):
        profiles.find(f"made-up-{number}")
    assert len(profiles._remembered) == REMEMBERED


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (8192, 8192),
        (8192.0, 8192),
        ("8,192", 8192),
        (-1, None),
        (1.5, None),
        (None, None),
        ([], None),
    ],
)
def test_figures_of_the_table(value: object, tokens: int | None) -> None:
    assert as_tokens(value) == tokens


def test_a_damaged_table_is_said(tmp_path: Any) -> None:
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="can't be read"):
        tables.load(path)


def test_the_file_is_read_again_if_it_changes(tmp_path: Any) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"m": {"max_input_tokens": 1000}}')
    table = tables.load(path)
    assert tables.load(path) is table
    assert table["m"].max_input_tokens == 1_000
    path.write_text('{"m": {"max_input_tokens": 20000}}')
    assert tables.load(path)["m"].max_input_tokens == 20_000
    path.unlink()
    with pytest.raises(ConfigurationError, match="can't be read"):
        tables.load(path)


def door(model: str, provider: str | None, address: str | None = None) -> tuple[int | None, int | None]:
    profile = PROFILES.find(model, provider=provider, address=address)
    return profile.max_bytes, profile.max_messages


@pytest.mark.parametrize(
    ("model", "provider", "address", "expected"),
    [
        ("gpt-4o", "openai", "https://api.openai.com/v1", (None, 2_048)),
        ("gpt-4o", "openai", "https://eu.api.openai.com/v1", (None, 2_048)),
        # The protocol alone is not the company.
        ("gpt-4o", "openai", "http://127.0.0.1:8000/v1", (None, None)),
        ("kimi-k2", "openai", "https://api.moonshot.ai/v1", (4_194_304, 2_048)),
        ("anything", "openai", "https://api.groq.com/openai/v1", (4_000_000, None)),
        ("gpt-4o", "azure", "https://gateway.example.org", (None, 2_048)),
        ("anthropic.claude-sonnet-4-5-20250929-v1:0", "bedrock", None, (20_000_000, None)),
        ("amazon.nova-pro-v1:0", "bedrock", None, (None, None)),
        ("gemini-2.5-pro", "vertex_ai", None, (None, None)),
        ("kimi-k2-turbo-preview", "moonshot", None, (4_194_304, 2_048)),
        ("kimi-for-coding", "moonshot", "https://api.kimi.com/coding/v1", (2_097_152, 2_048)),
        ("gpt-4o", None, None, (None, None)),
    ],
)
def test_what_a_provider_takes_of_a_request(
    model: str, provider: str | None, address: str | None, expected: tuple[int | None, int | None]
) -> None:
    assert door(model, provider, address) == expected


def test_the_operator_knows_better_what_a_provider_takes() -> None:
    profile = PROFILES.find("gpt-4o", provider="openai", override=Settings(max_bytes=5, max_messages=7))
    assert (profile.max_bytes, profile.max_messages) == (5, 7)
    assert profile.sources["max_bytes"] == profile.sources["max_messages"] == "override"
    profile = PROFILES.find("gpt-4o", provider="openai", override=Settings(max_bytes=5))
    assert (profile.max_bytes, profile.max_messages) == (5, 2_048)
    assert profile.sources["max_messages"] == "corrections: OpenAI"
    assert profile.context_window == 128_000, "the limits in tokens stay"
    assert PROFILES.find("gpt-4o").sources["max_bytes"] == "unknown"
