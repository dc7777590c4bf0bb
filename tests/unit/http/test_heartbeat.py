"""Test the heartbeat to a waiting client."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from proxy.http.sse import COMMENT, Heartbeat


class Client:
    """Takes what is sent, once it is let."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.got.append(message.get("body", message["type"]))

    def heartbeat(self, every: float = 0.02) -> Heartbeat:
        return Heartbeat(self.send, every, asyncio.get_running_loop().time(), lambda: [("x-compaction", "compacted")])


def test_whoever_sends_next_waits_for_what_is_being_sent() -> None:
    async def scene() -> None:
        client = Client()
        client.reads.clear()
        heartbeat = client.heartbeat(0)
        heartbeat.start_after_delay()
        await asyncio.sleep(0.02)
        assert heartbeat.begun
        stoped = asyncio.ensure_future(heartbeat.stop())
        await asyncio.sleep(0.02)
        assert not stoped.done()
        client.reads.set()
        await stoped
        assert client.got == ["http.response.start", COMMENT]

    asyncio.run(scene())


def test_a_line_that_broke_says_so() -> None:
    async def scene() -> None:
        async def broken(message: Message) -> None:
            raise OSError("gone")

        heartbeat = Heartbeat(broken, 0, 0, list)
        heartbeat.start_after_delay()
        await asyncio.sleep(0.02)
        with pytest.raises(OSError, match="gone"):
            await heartbeat.stop()

    asyncio.run(scene())
