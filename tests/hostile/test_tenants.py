"""One tenant's traffic, however it is made, changes nothing in another tenant's requests.

A victim's conversation is sent twice: alone, and with a stranger's requests in between. The upstream obeys the
requests, as if a stranger had found out how to control it. It reports any usage, refuses with any limit, answers with
nothing, or fails as a summary model. The victim's upstream requests and response headers must be the same both times.
"""

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.config import Settings
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.scripted import words
from tests.kit.upstream import is_summary_request

WINDOW = 6_000
VICTIM, STRANGER = "sk-victim", "sk-stranger"
ORDER = re.compile(rb"DO (\{.*?\}) DONE")


class Upstream:
    """A server that obeys its requests. ``got`` has the bodies that it received."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw or b"{}")
        found = ORDER.search(raw.replace(b'\\"', b'"'))
        order = json.loads(found[1]) if found else {}
        self.got.append(raw)
        if "limit" in order:
            told = f"This model's maximum context length is {order['limit']} tokens. However, you requested more."
            error = {"message": told, "type": "invalid_request_error", "code": "context_length_exceeded"}
            return JSONResponse({"error": error}, 400)
        if is_summary_request(body) and order.get("summary") == "fails":
            return JSONResponse({"error": {"message": "no"}}, 500)
        text = "" if order.get("empty") else "Notes " + hashlib.sha256(raw).hexdigest()[:8]
        prompt = int(order.get("usage", 1.0) * len(raw) / 5)
        usage = {"prompt_tokens": prompt, "completion_tokens": 5 if text else 0, "total_tokens": prompt + 5}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if text else "length",
        }
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return JSONResponse({**answer, "usage": usage})


class Act(NamedTuple):
    """A request of the stranger's: its size, the order to the upstream, and further fields."""

    turns: int
    order: dict[str, Any]
    fields: dict[str, Any]
    copied: bool = False
    leaves: bool = False
    times: int = 1


ORDERS = st.one_of(
    st.fixed_dictionaries({"usage": st.sampled_from([0.3, 0.5, 0.7, 1.5, 2.9])}),
    st.fixed_dictionaries({"limit": st.sampled_from([300, 1_000, 3_000])}),
    st.just({"summary": "fails"}),
    st.just({"empty": True}),
    st.just({}),
)
FIELDS = st.sampled_from(
    [{}, {"documents": ["word " * 300]}, {"max_tokens": 9_000}, {"user": "victim"}, {"messages": 1, "user": "Stranger"}]
)
ACTS = st.lists(
    st.builds(Act, st.integers(1, 9), ORDERS, FIELDS, st.booleans(), st.booleans(), st.integers(1, 4)), max_size=4
)


def talk(turns: int, who: str, order: dict[str, Any]) -> list[Any]:
    told = f"DO {json.dumps(order)} DONE " if order else ""
    messages: list[Any] = [{"role": "system", "content": f"{told}Be brief."}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"{told}{who} asks {number}: " + words(300, f"q{number}x")})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + words(300, f"a{number}x")})
    return [*messages, {"role": "user", "content": f"{told}And now?"}]


class House:
    """A proxy in this event loop; ``keys`` are those of the victim and the stranger, ``None`` for callers without."""

    def __init__(self, upstream: Upstream, configuration: dict[str, Any], keys: Sequence[str | None]) -> None:
        self.upstream = upstream
        self.keys = keys
        self.app: Proxy = Proxy(Settings.model_validate(configuration))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1:8787", timeout=60
        )

    async def ask(self, key: str | None, body: dict[str, Any]) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def settled(self) -> None:
        """Wait until nothing goes on in the background, so that what comes next depends on nothing but order."""
        summaries, archive = self.app.service.stores.summaries, self.app.service.stores.archive
        tasks = lambda: summaries._flights or summaries._background or summaries._releasing  # noqa: E731
        while tasks() or len(summaries.cache.writes) or len(archive.writes):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def victim(self, turns: int) -> tuple[Any, ...]:
        await self.settled()
        begun = len(self.upstream.got)
        got = await self.ask(self.keys[0], {"model": "m", "messages": talk(turns, "Victim", {})})
        await self.settled()
        told = sorted((name, value) for name, value in got.headers.items() if name.startswith("x-compaction"))
        told = [pair for pair in told if pair[0] != "x-compaction-id"]
        # A request that the stranger left may have been on its way to the upstream.
        sent = sorted(raw for raw in self.upstream.got[begun:] if b"Stranger" not in raw)
        return turns, got.status_code, told, got.content, sent

    async def stranger(self, act: Act, begun: int) -> None:
        for number in range(act.times):
            who = "Victim" if act.copied else f"Stranger {begun} {number}"
            body = {"model": "m", "messages": talk(act.turns, who, act.order), **act.fields}
            asking = asyncio.ensure_future(self.ask(self.keys[1], body))
            if act.leaves and not act.copied:  # a copy that is on its way still would be taken for the victim's
                await asyncio.sleep(0.01)
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    async def close(self) -> None:
        await self.http.aclose()
        await self.app.service.aclose()


TURNS = (1, 3, 5, 7, 8, 9)

MODES: dict[str, tuple[dict[str, Any], Sequence[str | None]]] = {
    "open": ({}, (VICTIM, STRANGER)),
    "teams": (
        {
            "auth": {"mode": "keys"},
            "teams": {
                name: {
                    "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()],
                    "limits": {"requests_per_minute": 60, "concurrent": 2, "summary_tokens_per_day": 200_000},
                }
                for name, key in (("victim", VICTIM), ("stranger", STRANGER))
            },
        },
        (VICTIM, STRANGER),
    ),
    "without keys": ({"auth": {"keyless": "separate"}}, (None, None)),
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[Upstream, str]]:
    found = Upstream()
    with serve(found.app) as url:
        yield found, url


def came_of(house: tuple[Upstream, str], mode: str, acts: Sequence[Act]) -> list[tuple[Any, ...]]:
    """Return the results of the victim's requests, with a stranger's requests between them."""
    server, url = house
    more, keys = MODES[mode]
    configuration = {
        "store": {"url": "sqlite://"},
        "upstreams": {"main": {"base_url": f"{url}/v1"}},
        "models": [
            {"match": "*", "upstream": "main", "profile": {"context_window": WINDOW, "tokenizer": "o200k_base"}}
        ],
        **more,
    }

    async def run() -> list[tuple[Any, ...]]:
        running = House(server, configuration, keys)
        came = []
        try:
            for number, turns in enumerate(TURNS):
                for index in range(number, len(acts), len(TURNS)):
                    await running.stranger(acts[index], index)
                came.append(await running.victim(turns))
        finally:
            await running.close()
        return came

    return asyncio.run(run())


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(ACTS)
@example([Act(3, {"usage": 1.5}, {}, times=4)])
@example([Act(3, {"usage": 0.5}, {}, times=4)])
@example([Act(3, {"limit": 300}, {}, times=2)])
@example([Act(7, {"summary": "fails"}, {}, times=4)])
@example([Act(9, {}, {}, leaves=True), Act(9, {}, {}, copied=True)])
def test_a_stranger_changes_nothing(mode: str, upstream: tuple[Upstream, str], acts: list[Act]) -> None:
    alone = ALONE.get(mode) or ALONE.setdefault(mode, came_of(upstream, mode, []))
    assert any(("x-compaction", "compacted") in told for _, _, told, _, _ in alone)
    assert {status for _, status, _, _, _ in alone} == {200}
    assert came_of(upstream, mode, acts) == alone


ALONE: dict[str, list[tuple[Any, ...]]] = {}
