"""An upstream whose streams stay open after their last event."""

import asyncio
import threading

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = 15


class HeldEnd:
    """Keep a stream with this text open until ``release``, for ``SECONDS`` at most. Then ``late`` is true."""

    def __init__(self, text: str) -> None:
        self.late = False
        self._text = text.encode()
        self._released = threading.Event()

    def release(self) -> None:
        """End the stream."""
        self._released.set()

    def before(self, other: ASGIApp) -> ASGIApp:
        """Pass all requests to ``other``."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            found = False

            async def sent(message: Message) -> None:
                nonlocal found
                body = message.get("body", b"")
                found = found or self._text in body
                if found and not message.get("more_body"):
                    await send({**message, "more_body": True})
                    self.late |= not await asyncio.to_thread(self._released.wait, SECONDS)
                    message = {**message, "body": b""}
                await send(message)

            await other(scope, receive, sent)

        return app
