"""The CPU of a translated turn, compared with LiteLLM.

The proxy's bridge and LiteLLM's ``anthropic_messages`` and ``aresponses`` run in this process, in turn. Both call the
benchmark's upstream, which has chat completions. Neither server is part of the figures, and neither is compaction.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import msgspec

from bench import servers
from bench.bodies import APIS, Api
from bench.client import Broken
from bench.rows import MICRO, Row, Scale
from bench.upstream import TEXT
from proxy import litellm_package
from proxy.upstream.bridge.transport import Bridge
from proxy.upstream.relay import Address, RelayTransport
from proxy.upstream.transport import Outgoing

SIZES = {"small request": 0, "100 kB": 100_000}
FUNCTIONS = {"messages": "anthropic_messages", "responses": "aresponses"}

Turn = Callable[[], Awaitable[str]]
"""Runs a turn, and returns its answer as JSON."""


def measure(place: servers.Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Return the rows. Raises ``Broken`` if an answer lacks the upstream's text."""
    with servers.pinned(place.core):
        return asyncio.run(_measure(f"{place.upstream.url}/v1", scale, [name for name in FUNCTIONS if name in apis]))


async def _measure(url: str, scale: Scale, apis: Sequence[str]) -> list[Row]:
    litellm = await litellm_package.load()
    # LiteLLM looks for its server in each call. Without the server's packages, it would compile that module each time.
    sys.modules["litellm.proxy.proxy_server"] = cast(ModuleType, SimpleNamespace(llm_router=None))
    relay = RelayTransport(Address(url), upstream="main", api_key="sk-bench", headers={})
    rows = []
    for api, size in ((api, size) for api in apis for size in SIZES):
        body = APIS[api].conversation("bench", SIZES[size]) if SIZES[size] else APIS[api].small()
        row = Row(f"/v1/{api}, {size}, translated: CPU", "µs", compared="LiteLLM")
        both = _ours(APIS[api], body, relay), _theirs(getattr(litellm, FUNCTIONS[api]), body, url)
        for turn in both:
            if TEXT[:30] not in await turn():
                raise Broken(f"{row.name}: the answer has another text")
        for _ in range(scale.rounds):
            for turn, ours in zip(both, (True, False), strict=True):
                began = time.process_time()
                for _ in range(scale.translated):
                    await turn()
                row.add(MICRO * (time.process_time() - began) / scale.translated, ours=ours)
        rows.append(row)
    await relay.aclose()
    return rows


def _ours(api: Api, body: bytes, relay: RelayTransport) -> Turn:
    """Return the turn over the proxy's bridge."""
    bridge = Bridge("responses" if api.name == "responses" else "messages", "chat", relay)

    async def turn() -> str:
        asked = Outgoing(body=body, model="bench", stream=False, headers=[], credential=None, timeout=60.0)
        answer = await bridge.send(asked)
        return b"".join([part async for part in answer.body]).decode()

    return turn


def _theirs(function: Callable[..., Awaitable[Any]], body: bytes, url: str) -> Turn:
    """Return the turn by a function of LiteLLM, from the body to the answer's JSON."""

    async def turn() -> str:
        fields = {**msgspec.json.decode(body), "model": "hosted_vllm/bench", "stream": False}
        answer = await function(**fields, api_base=url, api_key="sk-bench", max_retries=0)
        made = answer if isinstance(answer, dict) else answer.model_dump(mode="json")
        return msgspec.json.encode(made).decode()

    return turn
