"""A proxy that translates for chat completions, and clients that send long conversations as they are given."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai._utils import _transform as openais

from tests.kit.odd_answers import Upstream
from tests.product.properties.test_odd_answers import Clients
from tests.product.test_bridged_answers import LARGE, clients, entrance


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    upstream = Upstream()
    folder = tmp_path_factory.mktemp("proxy")
    with entrance(upstream.app, folder, LARGE, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        yield upstream, claude, gpt


LONG = 20
"""Messages. OpenAI's SDK looks each one up in the types of all messages. It takes longer than the proxy's own work."""


@pytest.fixture(scope="session", autouse=True)
def _long_conversations_leave_as_they_are() -> Iterator[None]:
    """Short conversations show what the SDK makes of messages. Those of the SDK's own objects need it, too."""
    transform = openais.transform

    def quick(data: Any, expected: Any) -> Any:
        long = {name: value for name, value in data.items() if name in ("messages", "input") and _plain(value)}
        made = transform({name: value for name, value in data.items() if name not in long}, expected) | long
        return {name: made[name] for name in data if name in made}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openais, "transform", quick)
        yield


def _plain(messages: Any) -> bool:
    try:
        return isinstance(messages, list) and len(messages) > LONG and bool(json.dumps(messages))
    except TypeError:
        return False
