"""Translate requests for local servers with Anthropic's and Gemini's formats."""

import pytest

from proxy.upstream.litellm.request import api_base


@pytest.mark.parametrize(
    ("provider", "base_url", "expected"),
    [
        ("anthropic", None, None),
        ("anthropic", "https://host", "https://host"),
        ("anthropic", "https://host/", "https://host"),
        ("anthropic", "https://host/v1", "https://host"),
        ("anthropic", "https://host/v1/messages", "https://host"),
        ("anthropic", "https://host/path/v1/", "https://host/path"),
        ("gemini", "https://host", "https://host/v1beta"),
        ("gemini", "https://host/v1beta", "https://host/v1beta"),
        ("gemini", "https://host/v1/", "https://host/v1"),
        ("gemini", "https://host/google", "https://host/google/v1beta"),
        ("cohere", "https://host/v2/chat", "https://host/v2/chat"),
    ],
)
def test_base_urls(provider: str, base_url: str | None, expected: str | None) -> None:
    assert api_base(provider, base_url) == expected
