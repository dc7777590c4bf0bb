"""A fast upstream in its own process: ``python -m bench.upstream PORT``.

It returns the same short answer for every request to a path. The request's ``user`` field selects other responses:

- ``burst-N``: a stream of N equal chunks, sent as fast as possible
- ``whole-N``: a stream of N equal chunks, sent in one piece
- ``paced-N``: a stream of N chunks, a millisecond apart
- ``slow-N``: the short answer after N milliseconds
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import msgspec
import uvloop

from proxy.http import sse

CHAT = "/v1/chat/completions"
CREATED = 1_700_000_000
SUMMARY = "The task is to keep the service fast. Files were read one by one; nothing was changed so far. "

_RESPONSE = {"id": "resp_bench", "object": "response", "created_at": CREATED, "model": "bench", "error": None}
_MESSAGE = {"id": "msg_bench", "type": "message", "role": "assistant", "model": "bench"}

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"user" *: *"(burst|whole|paced|slow)-(\d+)"')


def completion(text: str, prompt_tokens: int = 40) -> bytes:
    """Return the body of a chat completion with this text."""
    message = {"role": "assistant", "content": text}
    return msgspec.json.encode(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "created": CREATED,
            "model": "bench",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 80, "total_tokens": prompt_tokens + 80},
        }
    )


def answers() -> dict[str, bytes]:
    """Return the body of each answer by its path. The text of the chat completion is also valid as a summary."""
    text = SUMMARY * 4
    usage = {"input_tokens": 40, "output_tokens": 80}
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": "msg_bench", "status": "completed", "role": "assistant", "content": [part]}
    made = {
        "/v1/embeddings": {"object": "list", "data": [], "model": "bench"},
        "/v1/responses": {
            **_RESPONSE,
            "status": "completed",
            "output": [item],
            "usage": {**usage, "total_tokens": 120},
        },
        "/v1/messages": {
            **_MESSAGE,
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
            "usage": usage,
        },
    }
    return {CHAT: completion(text)} | {path: msgspec.json.encode(body) for path, body in made.items()}


def streams() -> dict[str, tuple[bytes, bytes, bytes]]:
    """Return the events of each API's stream by its path: those before, one with a token of text, and those after."""
    choice = {"index": 0, "delta": {"content": " proxy"}, "finish_reason": None}
    chunk = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": CREATED, "model": "bench"}
    usage = {"input_tokens": 40, "output_tokens": 80}
    part = {"item_id": "msg_bench", "output_index": 0, "content_index": 0}
    item = {"type": "message", "id": "msg_bench", "role": "assistant", "content": []}
    ended = {**_RESPONSE, "status": "completed", "output": [item], "usage": usage}
    return {
        CHAT: (b"", sse.encode(msgspec.json.encode({**chunk, "choices": [choice]})), b"data: [DONE]\n\n"),
        "/v1/responses": (
            event("response.created", response={**_RESPONSE, "status": "in_progress", "output": []}),
            event("response.output_text.delta", **part, delta=" proxy"),
            event("response.completed", response=ended),
        ),
        "/v1/messages": (
            event("message_start", message={**_MESSAGE, "content": [], "usage": usage})
            + event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": " proxy"}),
            event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage) + event("message_stop"),
        ),
    }


def event(name: str, **fields: object) -> bytes:
    """Return an event whose data repeats its name, as in both newer APIs."""
    return sse.encode(msgspec.json.encode({"type": name, **fields}), name)


def framed(data: bytes) -> bytes:
    """Return a chunk in HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes) -> bytes:
    """Return the bytes of a response."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_ANSWERS = {path: whole(body) for path, body in answers().items()}
_STREAMS = {path: tuple(framed(part) if part else b"" for part in parts) for path, parts in streams().items()}
_LAST_CHUNK = b"0\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Upstream(asyncio.Protocol):
    """A connection. Requests arrive one at a time, with a ``content-length``."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._needed = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class doesn't inherit from it.

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        if len(self._received) < self._needed:
            return
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end + 2)
        self._needed = end + 4 + (int(length[1]) if length else 0)
        if len(self._received) < self._needed:
            return
        wanted = _STREAM.search(bytes(self._received[end : end + 300]))
        path = bytes(self._received[:64]).split(b" ", 2)[1].decode()
        self._received.clear()
        self._needed = 0
        if wanted is None:
            self._transport.write(_ANSWERS[path])
            return
        if wanted[1] == b"slow":
            asyncio.get_running_loop().call_later(int(wanted[2]) / 1e3, self._transport.write, _ANSWERS[path])
            return
        if wanted[1] == b"whole":
            opening, token, ending = _STREAMS[path]
            self._transport.write(_STREAM_HEAD + opening + token * int(wanted[2]) + ending + _LAST_CHUNK)
            return
        task = asyncio.ensure_future(self._stream(path, int(wanted[2]), 0.001 if wanted[1] == b"paced" else 0))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    def pause_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        for task in self._streams:
            task.cancel()

    async def _stream(self, path: str, chunks: int, pause: float) -> None:
        opening, token, ending = _STREAMS[path]
        self._transport.write(_STREAM_HEAD + opening)
        for _ in range(chunks):
            await self._writable.wait()
            self._transport.write(token)
            # Send each chunk in its own system call, like an upstream that sends each token at once.
            await asyncio.sleep(pause)
        self._transport.write(ending + _LAST_CHUNK)


async def serve(port: int) -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
