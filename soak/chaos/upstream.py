"""An upstream that responds, pauses, or closes the connection at any byte, as a request's header selects.

A response contains a digest of the last message, so that the client detects a wrong or incomplete one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.kit.upstream import faults

FAULT = "x-soak-fault"
"""The header that selects a failure of the response."""

BYTES_A_TOKEN = 6
WINDOWS = {"wide": 16_000, "tight": 9_000}
"""Input tokens of each model, at ``BYTES_A_TOKEN`` each. The proxy's configuration has the largest for both."""

SUMMARY = "Goal: go on as agreed. Done so far: what was asked for. Next: the rest."
SUMMARY_FAILS = 0.1
PIECE = 4
"""Characters of text in a chunk of a stream."""


def digest_of(content: str) -> str:
    """Return the response's text for a last message."""
    return "answer-" + hashlib.blake2b(content.encode(), digest_size=40).hexdigest()


@dataclass
class Seen:
    """The requests that the upstream received. ``wrong`` has the malformed ones."""

    requests: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    open: int = 0


class Upstream:
    """The upstream server."""

    def __init__(self, seed: int) -> None:
        self.seen = Seen()
        self._random = random.Random(seed)  # noqa: S311 - no secret

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Serve on loopback, and yield the port."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 24)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.open += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.seen.open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve a request. Return whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        raw = await _body(reader, headers)
        path = lines[0].split(" ")[1]
        if path != "/v1/chat/completions":
            self.seen.requests["other"] += 1
            writer.write(_plain(200, {"path": path, "digest": hashlib.blake2b(raw, digest_size=20).hexdigest()}))
            await writer.drain()
            return True
        body = json.loads(raw)
        fault = headers.get(FAULT, "")
        last = str(body["messages"][-1].get("content") or "")
        if not fault and not last.startswith("turn "):
            return await self._summary(writer)
        self._judge(body)
        size = sum(len(str(m.get("content") or "")) + len(str(m.get("tool_calls") or "")) for m in body["messages"])
        tokens = size // BYTES_A_TOKEN
        window = WINDOWS[body["model"]]
        if tokens > window:
            self.seen.requests["refused as too long"] += 1
            text = f"maximum context length is {window} tokens. However, your messages resulted in {tokens} tokens."
            error = {"message": f"This model's {text}", "type": "invalid_request_error"}
            writer.write(_plain(400, {"error": {**error, "code": "context_length_exceeded"}}))
            await writer.drain()
            return True
        self.seen.requests[fault.partition(":")[0] or "answered"] += 1
        return await self._answer(writer, fault, digest_of(last), tokens, stream=bool(body.get("stream")))

    async def _summary(self, writer: asyncio.StreamWriter) -> bool:
        self.seen.requests["summary"] += 1
        await asyncio.sleep(self._random.uniform(0.01, 0.4))
        if self._random.random() < SUMMARY_FAILS:
            writer.write(_plain(500, {"error": {"message": "No summary today.", "type": "server_error"}}))
        else:
            writer.write(_plain(200, _completion(SUMMARY, 500)))
        await writer.drain()
        return True

    def _judge(self, body: dict[str, Any]) -> None:
        found = faults(body)
        if found:
            self.seen.wrong.append(f"{found[0]}")

    async def _answer(
        self, writer: asyncio.StreamWriter, fault: str, content: str, tokens: int, *, stream: bool
    ) -> bool:
        name, _, argument = fault.partition(":")
        if name == "reset before":
            return _reset(writer)
        if name == "status":
            writer.write(_plain(int(argument), {"error": {"message": f"Status {argument}.", "type": "soak"}}))
            await writer.drain()
            return True
        if name == "silent":
            await asyncio.sleep(float(argument))
        if not stream:
            whole = _plain(200, _completion(content, tokens))
            cut = int(argument) % len(whole) if name == "reset" else len(whole)
            writer.write(whole[:cut])
            await writer.drain()
            return _reset(writer) if name == "reset" else True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        left = int(argument) if name == "reset" else None
        for event in _events(content, tokens):
            data = b"%x\r\n%s\r\n" % (len(event), event)
            if left is not None and len(data) > left:
                writer.write(data[:left])
                await writer.drain()
                return _reset(writer)
            left = None if left is None else left - len(data)
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.002 if name != "slow" else 0.2)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length") or 0))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Reset the connection."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def _plain(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


def _completion(content: str, tokens: int) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": tokens, "completion_tokens": 40, "total_tokens": tokens + 40}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def _events(content: str, tokens: int) -> Iterator[bytes]:
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    usage = {"prompt_tokens": tokens, "completion_tokens": 40, "total_tokens": tokens + 40}
    for delta, reason in [
        ({"role": "assistant", "content": ""}, None),
        *(({"content": p}, None) for p in pieces),
        ({}, "stop"),
    ]:
        chunk: dict[str, Any] = {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        if reason:
            chunk["usage"] = usage
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"
