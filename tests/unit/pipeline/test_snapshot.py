"""Routes by model and dialect."""

import asyncio
from typing import Any

import pytest

from proxy.config import Settings
from proxy.pipeline.runtime import ConfigSnapshot

BOTH = {"openai": {"provider": "openai"}, "anthropic": {"provider": "anthropic"}}
EVERY = [{"match": "*", "upstream": "openai"}]
CLAUDE = [{"match": "claude-*", "upstream": "anthropic"}, *EVERY]


@pytest.mark.parametrize(
    ("upstreams", "models", "model", "dialect", "found"),
    [
        (BOTH, [], "m", "chat", "openai"),
        (BOTH, [], "m", "messages", "anthropic"),
        (BOTH, [], "m", "responses", "openai"),
        (BOTH, EVERY, "claude-x", "messages", "anthropic"),
        (BOTH, CLAUDE, "claude-x", "messages", "anthropic"),
        (BOTH, CLAUDE, "claude-x", "responses", "anthropic"),
        (BOTH, CLAUDE, "claude-x", "chat", "anthropic"),
        (BOTH, CLAUDE[:1], "m", "chat", None),
        (BOTH, CLAUDE[:1], "m", "responses", "openai"),
        ({"vllm": {"base_url": "http://127.0.0.1:9/v1"}}, [], "m", "messages", "vllm"),
    ],
)
def test_a_request_goes_to_an_upstream_with_its_api(
    upstreams: dict[str, Any], models: list[Any], model: str, dialect: str, found: str | None
) -> None:
    async def routed() -> str | None:
        snapshot = ConfigSnapshot(Settings.model_validate({"upstreams": upstreams, "models": models}), "id")
        route = snapshot.route(model, dialect)
        await snapshot.aclose()
        return None if route is None else route.upstream

    assert asyncio.run(routed()) == found
