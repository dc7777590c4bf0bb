"""Test how a bridge answers requests that it can't translate. tests/product/test_bridges.py tests the rest."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.relay import Address, RelayTransport
from tests.kit.translation import outgoing


@pytest.mark.parametrize("messages", ["x", [1], [{"role": "assistant", "tool_calls": [{}]}]])
def test_a_request_that_cannot_be_translated_is_answered(messages: object) -> None:
    """An exception would skip the record of the attempt, and fail a summary's request."""

    async def scenario() -> None:
        relay = RelayTransport(Address("http://127.0.0.1:9"), upstream="main", api_key=None, headers={})
        answer = await Bridge("chat", "responses", relay).send(outgoing({"messages": messages}))
        assert answer.status == 400
        assert (
            "can't translate" in msgspec.json.decode(b"".join([part async for part in answer.body]))["error"]["message"]
        )

    asyncio.run(scenario())
