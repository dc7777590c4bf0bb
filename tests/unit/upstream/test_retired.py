"""Finish open answers of a replaced configuration, and then close its connections."""

import asyncio
import json

from pydantic import SecretStr

from proxy.config import UpstreamSettings
from proxy.server.loopback import serve
from proxy.upstream.litellm.transport import LiteLLMTransport
from proxy.upstream.registry import Upstreams
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import Answer, Transport
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.translation import outgoing
from tests.kit.upstream import Reply, StandIn


def is_open(transport: Transport) -> bool:
    """Return whether a transport holds connections."""
    if isinstance(transport, RelayTransport):
        return transport.connections._session is not None
    assert isinstance(transport, LiteLLMTransport)
    return transport._client is not None


def translated(server: AnthropicServer) -> UpstreamSettings:
    return UpstreamSettings(provider="anthropic", base_url=server.url, api_key=SecretStr(server.key))


async def ended(answer: Answer) -> bytes:
    """Read the rest of an answer, and close it."""
    content = b"".join([part async for part in answer.body])
    await answer.close()
    await answer.close()
    return content


async def read_to_its_end(transport: Transport) -> None:
    """Wait until LiteLLM's transport has read its open streams."""
    assert isinstance(transport, LiteLLMTransport)
    await asyncio.gather(*(stream._task for stream in transport._streams if stream._task is not None))


async def outlived(settings: UpstreamSettings) -> None:
    before = Upstreams({"main": settings, "same": settings})
    try:
        await _outlived(before, settings)
    finally:
        await before.aclose()  # Otherwise connections that a failed test leaves open would fail another test.


async def _outlived(before: Upstreams, settings: UpstreamSettings) -> None:
    transport, same = await before.transport("main"), await before.transport("same")
    await ended(await same.send(outgoing({})))
    stream, plain = await transport.send(outgoing({"stream": True})), await transport.send(outgoing({}))
    changed = settings.model_copy(update={"base_url": f"{settings.base_url}/other"})
    after = Upstreams({"main": changed, "same": settings}, before)
    if isinstance(transport, LiteLLMTransport):
        await read_to_its_end(transport)
    await before.retire(after)
    assert after.unchanged == {"same"}
    assert await after.transport("same") is same
    assert await after.transport("main") is not transport
    assert is_open(same)
    # A stream that LiteLLM's transport has read to its end isn't open, even if the client hasn't read it yet.
    relayed = isinstance(transport, RelayTransport)
    assert is_open(transport) is relayed, "two answers are open"
    assert json.loads(await ended(plain))["object"] == "chat.completion"
    assert is_open(transport) is relayed, "one is"
    assert (await ended(stream)).endswith(b"data: [DONE]\n\n")
    assert not is_open(transport)
    # A request that began under the old configuration and has waited for its summary.
    late = await before.transport("main")
    assert late is transport
    answer = await late.send(outgoing({}))
    assert (answer.status, is_open(transport)) == (200, relayed)
    await ended(answer)
    assert not is_open(transport)
    await after.aclose()
    assert not is_open(same)


def test_relayed() -> None:
    upstream = StandIn(responder=lambda body: Reply(content="Hello there. " * 20, pause=0.01))
    with serve(upstream.app) as url:
        asyncio.run(outlived(UpstreamSettings(base_url=f"{url}/v1")))


def test_translated() -> None:
    with AnthropicServer() as server:
        asyncio.run(outlived(translated(server)))


def test_a_translated_stream_that_goes_on_stays_open() -> None:
    async def scenario(settings: UpstreamSettings) -> None:
        before = Upstreams({"main": settings})
        transport = await before.transport("main")
        stream = await transport.send(outgoing({"stream": True}))
        try:
            await before.retire(Upstreams({}, before))
            assert is_open(transport)
            await stream.close()
            assert not is_open(transport)
        finally:
            await stream.close()
            await before.aclose()

    with AnthropicServer() as server:
        server.script.cut = "hang"
        asyncio.run(scenario(translated(server)))
        assert server.disconnected.wait(30)
