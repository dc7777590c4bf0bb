"""Watch the rest of a response, after the proxy has decided that the client gets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from proxy.dialects.answers import ItemReader
from proxy.http.decompression import Unpacking
from proxy.overflow.silent import Finished
from proxy.pipeline.attempt import Departure
from proxy.pipeline.billing import UNPACKED_BYTES
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_start import ResponseStart, header, is_encoded
from proxy.upstream.transport import Answer


class Tap:
    """Reads the items of an answer as it passes, before the client gets it."""

    def __init__(self, reader: ItemReader | None, answer: Answer, room: Callable[[], Awaitable[None]] | None) -> None:
        """``room`` waits while too many removed messages wait to be archived."""
        self._reader = reader
        self._room = room
        packed = reader is not None and is_encoded(answer)
        self._unpacking = Unpacking(header(answer, "content-encoding"), UNPACKED_BYTES) if packed else None

    async def begin(self, first: bytes) -> None:
        """Add the first bytes. If the archive is behind, let the client wait for it, so that little can be lost."""
        if self._room is not None:
            await self._room()
        self.add(first)

    def add(self, chunk: bytes) -> None:
        """Add a chunk, as it arrived from the upstream."""
        if self._reader is None:
            return
        if self._unpacking is not None:
            self._unpacking.feed(chunk)
            chunk = self._unpacking.take()
        self._reader.add(chunk)

    def finish(self) -> None:
        """Read what wasn't known before the end."""
        if self._reader is not None and (self._unpacking is None or not self._unpacking.ended):
            self._reader.finish()


class Watch:
    """The notes and lessons from a response. Call ``ended`` after its end, and ``learn`` once nothing waits for it.

    There are two lists of functions. Each gets the usage of a complete response:

    - those of ``at_end`` run in ``ended``, before the costs are settled;
    - those of ``later`` run in ``learn``, after the costs. They don't run if the response had recalls, because the
      usage of several rounds isn't the size of one prompt.
    """

    def __init__(self, exchange: Exchange, tap: Tap | None) -> None:
        self.tap = tap
        self._exchange = exchange
        self._notes: list[Callable[[Finished], None]] = []
        self._lessons: list[Callable[[Finished], Awaitable[None]]] = []
        self._end: Finished | None = None

    def at_end(self, note: Callable[[Finished], None]) -> None:
        """Call ``note`` with the usage of a complete response."""
        self._notes.append(note)

    def later(self, lesson: Callable[[Finished], Awaitable[None]]) -> None:
        """Call ``lesson`` with the usage of a complete response that shows the size of one prompt."""
        self._lessons.append(lesson)

    def release(self, start: ResponseStart, sent: Departure, held: int) -> None:
        """Drop the bodies that nothing needs anymore, because a stream may take hours. ``held`` is the bytes to keep.

        A request that wasn't counted keeps its body, in case that the upstream reports no usage. A stream that may have
        recalls keeps the bytes that the proxy sent, to send them again.
        """
        exchange = self._exchange
        if exchange.original is not exchange.body:
            exchange.original.release()
        if sent.after is not None or exchange.counter is None:
            exchange.body.release()
        if not start.answer.keeps_request:
            exchange.memory.shrink(exchange.body.size + held)

    def ended(self) -> None:
        """Take note of the end of a response."""
        meter = self._exchange.bill.last
        if meter is None or not (self._notes or self._lessons):
            return
        if (end := meter.end) is None:
            return
        for note in self._notes:
            note(end)
        # The usage of several rounds says nothing about the size of one prompt.
        self._end = None if self._exchange.record.recalls else end

    async def learn(self) -> None:
        """Learn how the upstream counts."""
        if self._end is not None:
            for lesson in self._lessons:
                await lesson(self._end)
