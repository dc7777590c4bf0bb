"""Count the tasks of a proxy in front of a scripted upstream, to find work that continues after a client left."""

import asyncio
import json
import socket
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from tests.kit.client import StartProxy
from tests.kit.raw_upstream import RawUpstream, answer
from tests.kit.waiting import until

SOON = 15.0
"""Seconds in which everything must have ended on a busy machine. Work that misses the disconnect takes 60."""

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
SUMMARY = answer(json.dumps({"choices": [{"message": {"content": "They talked about nothing."}}]}).encode())
POLICY = {
    "trigger": {"tokens": 1000},
    "keep": {"messages": 2},
    "summary": {"max_tokens": 100},
    "user_messages": {"max_tokens": 200},
    "index": {"max_tokens": 50},
}
TRIGGERED = {"policies": {"default": POLICY}}


class Watched:
    """Around a proxy: knows the tasks on its event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._usual: set[asyncio.Task[object]] = set()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            self._loop = asyncio.get_running_loop()
            await app(scope, receive, send)

        return watched

    def left_over(self) -> list[str]:
        """The tasks that were not there when it was asked first."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._left_over(), self._loop).result(5)

    async def _left_over(self) -> list[str]:
        tasks = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        if not self._usual:
            self._usual = tasks
        return [repr(task) for task in tasks - self._usual]

    def comes_to_rest(self) -> bool:
        return until(lambda: not self.left_over(), SOON)


class House:
    """A proxy that is watched, and its upstream."""

    def __init__(self, start_proxy: StartProxy, upstream: RawUpstream) -> None:
        self.upstream = upstream
        self.watched = Watched()
        self.url = start_proxy(upstream.url, TRIGGERED, wrap=self.watched.wrap)
        self.watched.left_over()

    def check_at_rest(self, left: float, index: int = -1) -> None:
        """The upstream's connection was closed soon after the client left, and nothing goes on."""
        ended = self.upstream.wait_left(index, seconds=SOON)
        assert ended is not None
        assert ended - left < SOON
        assert self.watched.comes_to_rest(), self.watched.left_over()


def leave(connection: socket.socket) -> float:
    connection.close()
    return time.monotonic()


def talk(turns: int = 12) -> list[dict[str, str]]:
    """Most of it is the assistant's, because the proxy keeps the user's own words."""
    roles, sizes = ("user", "assistant"), (3, 200)
    return [
        {"role": roles[turn % 2], "content": f"{turn}. " + "some words " * sizes[turn % 2]} for turn in range(turns)
    ]
