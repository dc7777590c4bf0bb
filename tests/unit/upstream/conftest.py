"""Run local servers for providers with their own formats."""

from collections.abc import Iterator

import pytest

from tests.kit.anthropic_server import AnthropicServer
from tests.kit.gemini_server import GeminiServer
from tests.kit.translation import PROVIDERS, Standin


@pytest.fixture
def anthropic() -> Iterator[AnthropicServer]:
    with AnthropicServer() as server:
        yield server


@pytest.fixture
def gemini() -> Iterator[GeminiServer]:
    with GeminiServer() as server:
        yield server


@pytest.fixture(params=PROVIDERS)
def either(request: pytest.FixtureRequest) -> Iterator[tuple[str, Standin]]:
    server: Standin
    with PROVIDERS[request.param]() as server:
        yield request.param, server
