"""Test which transport serves a client's API, by the provider, the APIs, and the lane of the upstream."""

import asyncio
from typing import Any

import pytest

from proxy.config import UpstreamSettings
from proxy.errors import NotFound
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.litellm.transport import LiteLLMTransport
from proxy.upstream.registry import LearningTransport, Upstreams
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, Transport

HOST = "http://127.0.0.1:9"
CHAT_TO_RESPONSES = "bridge of over_responses over relay by authorization"


def described(transport: Transport) -> str:
    """Return a transport and those that it sends through."""
    match transport:
        case LearningTransport():
            return f"{described(transport._native)}, learning"
        case Bridge():
            translator = transport._translator.translate.__module__.rpartition(".")[2]
            if transport._translator.shape == "anthropic":
                translator = "messages"
            elif translator == "chat":
                translator = "responses"
            again = " again" if transport._translated else ""
            return f"bridge of {translator}{again} over {described(transport._transport)}"
        case RelayTransport():
            return f"relay by {transport._address.key_header}"
        case LiteLLMTransport():
            return f"litellm for {transport._provider}"
    raise AssertionError(type(transport))


CASES: dict[str, tuple[dict[str, Any], tuple[str, str, str, str]]] = {
    "any server": (
        {"base_url": f"{HOST}/v1"},
        (
            "relay by authorization",
            "relay by authorization, learning",
            "relay by authorization, learning",
            "relay by authorization",
        ),
    ),
    "OpenAI": (
        {"provider": "openai"},
        (
            "relay by authorization",
            "relay by authorization",
            "bridge of messages over relay by authorization",
            "relay by authorization",
        ),
    ),
    "Azure": (
        {"provider": "azure", "base_url": f"{HOST}/openai/v1"},
        (
            "relay by api-key",
            "relay by api-key",
            "bridge of messages over relay by api-key",
            "relay by api-key",
        ),
    ),
    "Anthropic's chat completions": (
        {"provider": "anthropic", "speaks": ["chat", "messages"]},
        (
            "relay by authorization",
            "bridge of responses over relay by authorization",
            "relay by x-api-key",
            "relay by x-api-key",
        ),
    ),
    "only /v1/responses": (
        {"base_url": f"{HOST}/v1", "speaks": ["responses"]},
        (
            CHAT_TO_RESPONSES,
            "relay by authorization",
            f"bridge of messages again over {CHAT_TO_RESPONSES}",
            "relay by authorization",
        ),
    ),
    "both without chat": (
        {"base_url": f"{HOST}/v1", "speaks": ["responses", "messages"]},
        (
            "litellm for anthropic",
            "relay by authorization",
            "relay by authorization",
            "relay by authorization",
        ),
    ),
}
"""The settings of an upstream, and the transports for chat completions, responses, messages, and another path."""


@pytest.mark.parametrize("case", CASES)
def test_each_api_has_its_transport(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    settings, expected = CASES[case]

    async def transports() -> tuple[str, ...]:
        upstreams = Upstreams({"main": UpstreamSettings(**settings)})
        found = []
        for path in (CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, "/files"):
            try:
                found.append(described(await upstreams.transport("main", path)))
            except NotFound:
                found.append("NotFound")
        await upstreams.aclose()
        return tuple(found)

    assert asyncio.run(transports()) == expected
