"""Send through LiteLLM to a local stand-in."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from proxy.upstream.litellm.transport import LiteLLMTransport
from proxy.upstream.transport import Outgoing
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.gemini_server import GeminiServer

Standin = AnthropicServer | GeminiServer
PROVIDERS = {"anthropic": AnthropicServer, "gemini": GeminiServer}
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Result:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def chunks(self) -> list[Any]:
        events = self.content.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def outgoing(body: dict[str, Any] | bytes, **fields: Any) -> Outgoing:
    raw = body if isinstance(body, bytes) else json.dumps({"model": "m-1", "messages": HELLO} | body).encode()
    stream = isinstance(body, dict) and body.get("stream", False)
    defaults: dict[str, Any] = {"model": "m-1", "headers": [], "credential": None, "timeout": 20.0}
    return Outgoing(body=raw, stream=stream, **(defaults | fields))


async def exchange(transport: LiteLLMTransport, request: Outgoing) -> Result:
    try:
        answer = await transport.send(request)
        content = b"".join([part async for part in answer.body])
        await answer.close()
        await answer.close()
        return Result(answer.status, dict(answer.headers), content)
    finally:
        await transport.aclose()


def send(provider: str, server: Standin, body: dict[str, Any] | bytes, **fields: Any) -> Result:
    transport = LiteLLMTransport(provider, server.url, server.key, {})
    return asyncio.run(exchange(transport, outgoing(body, **fields)))


async def drain(body: Any) -> None:
    async for _ in body:
        pass
