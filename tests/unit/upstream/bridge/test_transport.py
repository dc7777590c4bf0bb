"""Test how a bridge answers requests that it can't translate. tests/product/test_bridges.py tests the rest."""

import asyncio
import subprocess
import sys

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


IMPORTS = """
import asyncio, sys
from proxy.upstream.bridge.transport import TRANSLATORS, Bridge
from proxy.upstream.transport import Outgoing

for client, upstream in TRANSLATORS:
    name = b'"input"' if client == "responses" else b'"messages"'
    body = b'{"model": "m", "max_tokens": 9, %b: [{"role": "user", "content": "Hello"}]}' % name
    asked = Outgoing(body=body, model="m", stream=False, headers=[], credential=None, timeout=9.0)
    asyncio.run(Bridge(client, upstream, None).translate(asked))
print("litellm" in sys.modules)
"""


@pytest.mark.long
def test_usual_requests_dont_import_litellm() -> None:
    """The import takes seconds, and 200 MB."""
    made = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, check=True, text=True)
    assert made.stdout == "False\n"
