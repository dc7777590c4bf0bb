"""HTTP as uvicorn reads it with httptools, within bounds that it does not set by itself."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.coalescing import CoalescingTransport

HEAD_BYTES = 262_144
"""The most that may come of a request's head, or of what follows its body, before it is complete."""


class BoundedProtocol(HttpToolsProtocol):
    """A head that never ends is refused, and no header is taken from behind the body.

    The parser keeps a head in memory, however long it is. What comes behind a chunked body (trailers) it hands over
    like headers; to take them for such would let them past whoever checked the headers on the way here.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._unread = 0

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._unread = 0
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = CoalescingTransport(self.transport, self.loop)
        self.headers = []  # those of the request are in its scope; what is added from here on are trailers

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._unread = 0
        super().on_message_complete()
