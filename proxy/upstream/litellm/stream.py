"""A streamed answer of the translate lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from proxy.errors import UpstreamInterrupted
from proxy.upstream.litellm import answer as translate_answer
from proxy.upstream.litellm import errors as translate_errors
from proxy.upstream.transport import Headers

_EVENTS: Headers = [("content-type", "text/event-stream; charset=utf-8")]
_AHEAD = 8
"""Chunks that are read before the client has taken them."""


class Stream:
    """A streamed answer. One task owns the upstream's request from start to end, so cancelling it ends the request."""

    def __init__(self, litellm: Any, call: dict[str, Any], open_streams: set[Stream]) -> None:
        self._litellm = litellm
        self._call = call
        self._open = open_streams
        self._head: asyncio.Future[Headers] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes | UpstreamInterrupted | None] = asyncio.Queue(_AHEAD)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Headers:
        """The answer's headers, once the first chunk is there. Raises what LiteLLM raised before it."""
        self._open.add(self)
        self._task = asyncio.create_task(self._run())
        return await self._head

    async def close(self) -> None:
        """End the upstream's request, and with it ``events``."""
        self._open.discard(self)
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._head.done() and not self._head.cancelled():
            self._head.exception()  # Nobody waits for it any more: it counts as seen.

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events up to ``[DONE]``. Raises ``UpstreamInterrupted`` where the provider breaks off."""
        try:
            while (event := await self._chunks.get()) is not None:
                if isinstance(event, UpstreamInterrupted):
                    try:
                        raise event
                    finally:
                        del event  # else it would know itself, by its traceback
                yield event
        finally:
            await self.close()

    async def _run(self) -> None:
        response = None
        try:
            response = await self._litellm.acompletion(**self._call)
            await self._read(response)
        except asyncio.CancelledError:
            self._cut()  # and this is the end: a task that was cancelled keeps the error, which knows this stream
        except Exception as error:  # noqa: BLE001 - every one is handed on, see below
            # Before the first chunk the caller judges it. After it, whatever it is, the answer is broken.
            if not self._head.done():
                self._head.set_exception(error)
                return
            broken = UpstreamInterrupted(translate_errors.INTERRUPTED)
            broken.__cause__ = error.with_traceback(None)  # that knows this stream, too
            await self._chunks.put(broken)
        finally:
            self._open.discard(self)
            if response is not None:
                await response.aclose()

    async def _read(self, response: Any) -> None:
        async for part in response:
            chunk = translate_answer.chunk(part)
            finished = any(choice["finish_reason"] for choice in chunk["choices"])
            if finished and not (response.received_finish_reason or response.intermittent_finish_reason):
                raise UpstreamInterrupted(translate_errors.INTERRUPTED)
            if not self._head.done():
                self._head.set_result(_EVENTS + translate_answer.request_id(response))
            await self._chunks.put(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        if not self._head.done():
            raise UpstreamInterrupted(translate_errors.INTERRUPTED)
        await self._chunks.put(b"data: [DONE]\n\n")
        await self._chunks.put(None)

    def _cut(self) -> None:
        """Tell a reader that still waits that the stream was cut; what it has not taken yet is dropped."""
        self._head.cancel()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(UpstreamInterrupted(translate_errors.INTERRUPTED))
