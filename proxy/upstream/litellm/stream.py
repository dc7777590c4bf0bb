"""Stream an answer through LiteLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from proxy.errors import UpstreamInterrupted
from proxy.http import sse
from proxy.upstream.litellm import answer as translate_answer
from proxy.upstream.litellm import errors as translate_errors
from proxy.upstream.transport import Headers

_EVENTS: Headers = [("content-type", "text/event-stream; charset=utf-8")]
_AHEAD = 8
"""Chunks to read ahead of the client."""


class Stream:
    """A streamed answer. One task owns the upstream's request from start to end, so canceling it ends the request."""

    def __init__(self, litellm: Any, call: dict[str, Any], open_streams: set[Stream]) -> None:
        self._litellm = litellm
        self._call = call
        self._open = open_streams
        self._head: asyncio.Future[Headers] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes | UpstreamInterrupted | None] = asyncio.Queue(_AHEAD)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Headers:
        """Wait for the first chunk, and return the headers. Raises LiteLLM's exception if one comes first."""
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
            self._head.exception()  # Mark the exception as retrieved, because no caller awaits it now.

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events up to ``[DONE]``. Raises ``UpstreamInterrupted`` if the provider breaks off."""
        try:
            while (event := await self._chunks.get()) is not None:
                if isinstance(event, UpstreamInterrupted):
                    try:
                        raise event
                    finally:
                        del event  # avoid a reference cycle through its traceback
                yield event
        finally:
            await self.close()

    async def _run(self) -> None:
        response = None
        try:
            response = await self._litellm.acompletion(**self._call)
            await self._read(response)
        except asyncio.CancelledError:
            self._cut()  # don't reraise: a canceled task would keep the error, which refers to this stream
        except Exception as error:  # noqa: BLE001 - each one is passed on below
            translate_errors.drop_tracebacks(error)
            # Before the first chunk, the caller handles the error. After it, the answer is broken.
            if not self._head.done():
                self._head.set_exception(error)
                return
            broken = UpstreamInterrupted(translate_errors.INTERRUPTED)
            broken.__cause__ = error
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
            await self._chunks.put(sse.encode(msgspec.json.encode(chunk)))
        if not self._head.done():
            raise UpstreamInterrupted(translate_errors.INTERRUPTED)
        await self._chunks.put(sse.encode(b"[DONE]"))
        await self._chunks.put(None)

    def _cut(self) -> None:
        """Report the interruption to a waiting reader, and drop the chunks that it hasn't read."""
        self._head.cancel()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(UpstreamInterrupted(translate_errors.INTERRUPTED))
