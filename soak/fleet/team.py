"""A team with limits: small requests at any replica, and an upstream that counts the concurrent ones."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from proxy.server.loopback import serve
from soak.fleet.load import Tally
from soak.fleet.replicas import Balancer, Replica

MODEL = "limited"
CONCURRENT = 2
LIMITS = {
    "concurrent": CONCURRENT,
    "requests_per_minute": 6_000,
    "summary_tokens_per_day": 1_000_000,
    "spend": {"tokens": 1_000_000_000, "per": "day"},
}
THREADS = 4
RESPONDS_AFTER = 0.2
"""Seconds that the upstream takes for a response."""

RESTS = 0.1
"""Seconds between two requests of a thread, so that the agents get most of the CPU."""

_KEY = "sk-limited"
TEAM = {"keys": [{"hash": f"sha256:{hashlib.sha256(_KEY.encode()).hexdigest()}"}], "limits": LIMITS}
_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
}


class Team:
    """Threads that send more than the team may. ``most`` has the largest number of concurrent requests by phase."""

    def __init__(self, replicas: Sequence[Replica], tally: Tally, phase: list[str]) -> None:
        self.replicas = replicas
        self.most: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._tally = tally
        self._phase = phase
        self._running = 0
        self._stopped = threading.Event()
        self._app = Starlette(routes=[Route("/v1/chat/completions", self._respond, methods=["POST"])])

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Serve the upstream on loopback, and yield its URL."""
        with serve(self._app) as url:
            yield url

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Send requests as long as the block runs."""
        threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join(60)

    async def _respond(self, request: Request) -> JSONResponse:
        await request.body()
        self._running += 1
        phase = self._phase[0]
        self.most[phase] = max(self.most[phase], self._running)
        await asyncio.sleep(RESPONDS_AFTER)
        self._running -= 1
        return JSONResponse(_ANSWER)

    def _run(self, number: int) -> None:
        balancer = Balancer(self.replicas, 1_000 + number)
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"authorization": f"Bearer {_KEY}"}
        with httpx.Client(transport=balancer.transport(httpx), timeout=60, headers=headers) as http:
            while not self._stopped.wait(RESTS):
                began, failed = time.monotonic(), ""
                try:
                    response = http.post("http://127.0.0.1:1/v1/chat/completions", json=body)
                    if response.status_code == 429:
                        self.refused[self._phase[0]] += 1
                    elif response.status_code != 200:
                        failed = response.text
                except httpx.HTTPError as error:
                    failed = f"{type(error).__name__}: {error}"
                phase = self._phase[0]
                self._tally.team_times[phase].append(time.monotonic() - began)
                if failed and any(killed >= began - 0.1 for killed in balancer.used.killed):
                    self._tally.lost[phase] += 1
                elif failed:
                    self._tally.wrong[phase].append(f"team: {failed[:300]}")
