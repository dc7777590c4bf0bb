"""A fast upstream in its own process: ``python -m bench.upstream PORT``.

It returns the same short answer for every request to a path.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

from tests.kit.raw_upstream import answer
from tests.kit.three_apis import PATHS, Answer

TEXT = "The task is to keep the service fast. Files were read one by one; nothing was changed so far. " * 4
"""The text of an answer. It's also valid as a summary."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ANSWERS = {path: answer(Answer(TEXT).parts(api, stream=False)[1]) for api, path in PATHS.items()}
_UNKNOWN = answer(status="404 Not Found")


class Upstream(asyncio.Protocol):
    """A connection. Requests arrive one at a time, with a ``content-length``."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._needed = 0

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
        path = bytes(self._received[:64]).split(b" ", 2)[1].decode()
        self._received.clear()
        self._needed = 0
        self._transport.write(_ANSWERS.get(path, _UNKNOWN))


async def serve(port: int) -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
