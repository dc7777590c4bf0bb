"""A plan serves small requests exactly as the general lane does, and ends with everything that it depends on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from proxy.access.admin import key_digest
from proxy.limits.learned import LearnedLimit
from proxy.pipeline import serving
from proxy.pipeline.answering import Answering
from proxy.pipeline.runtime import Runtime
from proxy.server.app import Proxy, create_app
from proxy.telemetry.record import RequestRecord
from tests.conftest import settings_for
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head

MODEL = "gpt-4o-mini"
FINE = json.dumps(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }
).encode()
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"fine"},"finish_reason":null}]}\n\n'
OVERFLOW = json.dumps(
    {
        "error": {
            "message": "This model's maximum context length is 2000 tokens. However, your messages resulted in 9999.",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
        }
    }
).encode()
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


@dataclass
class Front:
    """A proxy in this process, and the requests that took its general lane."""

    app: Proxy
    client: httpx.AsyncClient
    general: list[str]
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def service(self) -> Runtime:
        return self.app.service

    async def ask(self, body: Any, key: str = "a", path: str = PATHS["chat"], **headers: str) -> httpx.Response:
        given = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        return await self.client.post(path, json=body, headers=given)

    async def is_planned(self, *asked: Any, **given: Any) -> bool:
        before = len(self.general)
        assert (await self.ask(*asked, **given)).status_code == 200
        return len(self.general) == before


def run(
    upstream: RawUpstream,
    folder: Path,
    work: Callable[[Front], Awaitable[Any]],
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, Any] | None = None,
) -> Any:
    """Do something with a proxy whose plans last."""
    general: list[str] = []
    first = Answering._first

    async def noted(self: Answering, run: Any) -> Any:
        general.append(run.exchange.caller.tenant)
        return await first(self, run)

    monkeypatch.setattr(Answering, "_first", noted)
    monkeypatch.setattr(serving, "LASTS", 1e9)
    folder.mkdir(exist_ok=True)

    async def working() -> Any:
        app = create_app(settings_for(upstream.url, folder, overrides))
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                front = Front(app, client, general)
                app.service.records.recorder._sinks.append(front.records.append)  # type: ignore[attr-defined]
                return await work(front)
        finally:
            await app.service.aclose()

    try:
        return asyncio.run(working())
    finally:
        monkeypatch.undo()


def hello(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}


def fine(arrived: Arrived) -> Sequence[Step]:
    if b'"stream":true' in arrived.body:
        return [stream_head(), chunk(EVENT), chunk(b"data: [DONE]\n\n"), chunk(b"")]
    return [answer(FINE)]


async def planned(front: Front, **given: Any) -> None:
    """Have a plan made: the headers come twice, and the third request is served by the plan."""
    assert [await front.is_planned(hello(), **given) for _ in range(3)] == [False, False, True]


TEAM = {
    "auth": {"mode": "keys"},
    "teams": {"red": {"keys": [{"hash": f"sha256:{key_digest('a')}", "expires": "2900-01-01"}]}},
    "upstreams": {"main": {"api_key": "sk-own"}},
}


def test_a_plan_serves_the_third_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path, planned, monkeypatch)
        first, _, third = upstream.arrived
        assert (third.head, third.body) == (first.head, first.body)


async def _reloaded(front: Front) -> None:
    await front.service.reconfigure(front.service.settings)


async def _learned(front: Front) -> None:
    tenant = f"key:{key_digest('a')}"
    front.service.limits.learned.learn("main", MODEL, tenant, LearnedLimit(input=20_000))


async def _ratio(front: Front) -> None:
    for _ in range(20):
        front.service.limits.calibration.note("main", MODEL, f"key:{key_digest('a')}", 1_000, 1_500)


async def _forgotten(front: Front) -> None:
    for conversations in front.app._conversations.values():
        assert conversations._plans.forget(lambda _: True) == {
            tenant for tenant in [f"key:{key_digest('a')}"] if conversations._dialect.name == "chat"
        }


async def _late(front: Front) -> None:
    for conversations in front.app._conversations.values():
        conversations._plans._clock = lambda: 1e12


@pytest.mark.parametrize("event", [_reloaded, _learned, _ratio, _forgotten, _late])
def test_a_plan_ends(
    event: Callable[[Front], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(front: Front) -> None:
        await planned(front)
        await event(front)
        assert not await front.is_planned(hello())

    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path, work, monkeypatch)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (hello(), {"x_compaction": "off"}),
        (hello(), {"x_other": "1"}),
        (hello(), {"key": "b"}),
        (hello(model="gpt-4o"), {}),
        (hello(max_tokens=100), {}),
        (hello(stream=True), {}),
    ],
    ids=["mode", "another header", "another key", "another model", "another output", "a stream"],
)
def test_another_request_has_no_plan(
    body: dict[str, Any], headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(front: Front) -> None:
        await planned(front)
        assert not await front.is_planned(body, **headers)

    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path, work, monkeypatch)


def test_an_expired_or_revoked_key_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def expired(front: Front) -> None:
        await planned(front)
        late = lambda: 1e11  # noqa: E731
        front.service.configuration.teams._clock = late
        await_late = front.app._conversations[PATHS["chat"]]._plans
        await_late._clock = late
        assert (await front.ask(hello())).status_code == 401

    async def revoked(front: Front) -> None:
        await planned(front)
        other = {**TEAM, "teams": {"red": {"keys": [{"hash": f"sha256:{key_digest('b')}"}]}}}
        await front.service.reconfigure(settings_for(upstream.url, tmp_path / "2", other))
        assert (await front.ask(hello())).status_code == 401

    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path / "1", expired, monkeypatch, TEAM)
        run(upstream, tmp_path / "2", revoked, monkeypatch, TEAM)


def test_a_large_request_takes_the_general_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(front: Front) -> None:
        await planned(front)
        large = hello()
        large["messages"][0]["content"] = "word " * 40_000
        assert not await front.is_planned(large)
        picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
        large["messages"][0]["content"] = [picture]
        assert not await front.is_planned(large)
        assert await front.is_planned(hello())

    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path, work, monkeypatch)


def conversation(turns: int) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[n % 2], "content": f"Turn {n}: " + f"word{n} " * 80} for n in range(turns)]
    return hello(messages=[*said, {"role": "user", "content": "And now?"}])


def test_the_general_lane_recovers_a_planned_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(arrived: Arrived) -> Sequence[Step]:
        return [answer(OVERFLOW, "400 Bad Request")] if len(arrived.body) > 8_000 else [answer(FINE)]

    async def work(front: Front, *, plan: bool) -> list[Any]:
        if plan:
            await planned(front)
        got = await front.ask(conversation(20))
        return [got.status_code, got.content, got.headers["x-compaction"], got.headers["x-compaction-retries"]]

    with RawUpstream(script) as upstream:
        with_plan = run(upstream, tmp_path / "1", lambda front: work(front, plan=True), monkeypatch)
        sent = [arrived.body for arrived in upstream.arrived][3:]
        upstream.arrived.clear()
        assert with_plan == run(upstream, tmp_path / "2", lambda front: work(front, plan=False), monkeypatch)
        assert sent == [arrived.body for arrived in upstream.arrived]
        assert with_plan[2:] == ["compacted", "1"]


def test_new_headers_neither_take_memory_nor_displace_other_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TENANT_BYTES", 20_000)
    monkeypatch.setattr(serving, "MOST_TENANTS", 2)

    async def work(front: Front) -> None:
        plans = front.app._conversations[PATHS["chat"]]._plans
        await planned(front, key="b")
        for number in range(30):
            for _ in range(number % 3):
                await front.is_planned(hello(), x_number=str(number))
        tenant = plans._tenants[f"key:{key_digest('a')}"]
        assert 0 < tenant.size <= 20_000
        assert tenant.size == sum(known.size for known in tenant.known.values())
        assert not any((b"x-number", b"1") in headers[1] for headers in plans._known)
        assert not await front.is_planned(hello(), key="c")
        assert set(plans._tenants) == {f"key:{key_digest(key)}" for key in "ab"}
        assert await front.is_planned(hello(), key="b")

    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path, work, monkeypatch)


def test_tenants_get_their_own_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(front: Front) -> None:
        for key in ("a", "b"):
            await planned(front, key=key)

    with RawUpstream(fine) as upstream:
        run(upstream, tmp_path, work, monkeypatch)
        assert [one.header("authorization") for one in upstream.arrived] == ["Bearer a"] * 3 + ["Bearer b"] * 3


def generated(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the API, the body, and the headers of a request. Most come again with small changes."""
    api = rng.choice([*PATHS])
    text = rng.choice(["Hello", "word " * rng.randrange(1, 400), "ü" * 300])
    said = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": rng.choice([MODEL, "gpt-4o", "unknown"]), "messages": said}
    if api == "responses":
        body = {"model": body["model"], "input": said}
    if api == "messages" or rng.random() < 0.3:
        body["max_output_tokens" if api == "responses" else "max_tokens"] = rng.choice([50, 4_000])
    if rng.random() < 0.3:
        body["stream"] = True
    headers = {"x_one": rng.choice(["1", "2"])} if rng.random() < 0.5 else {}
    if rng.random() < 0.2:
        headers["x_compaction"] = rng.choice(["off", "shadow"])
    return api, body, headers


@pytest.mark.parametrize("seed", range(4))
def test_everything_is_the_same_with_plans_and_without(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(arrived: Arrived) -> Sequence[Step]:
        if len(arrived.body) % 17 == 0:
            return [answer(OVERFLOW, "400 Bad Request")]
        return [answer(b"{}")] if len(arrived.body) % 13 == 0 else fine(arrived)

    async def work(front: Front) -> tuple[list[Any], list[Any], int]:
        rng, got = random.Random(seed), []
        for _ in range(120):
            api, body, headers = generated(rng)
            response = await front.ask(body, rng.choice("ab"), PATHS[api], **headers)
            shown = [pair for pair in response.headers.raw if pair[0] not in (b"x-compaction-id", b"date")]
            got.append((response.status_code, shown, response.content))
        records = [_comparable(record) for record in front.records]
        return got, records, len(front.general)

    with RawUpstream(script) as upstream:
        with_plans = run(upstream, tmp_path / "1", work, monkeypatch)
        sent = [_comparable_head(arrived) for arrived in upstream.arrived]
        upstream.arrived.clear()
        monkeypatch.setattr(serving.ServingPlans, "remember", lambda *_: None)
        without = run(upstream, tmp_path / "2", work, monkeypatch)
        assert with_plans[:2] == without[:2]
        assert sent == [_comparable_head(arrived) for arrived in upstream.arrived]
        assert with_plans[2] < without[2]


def _comparable(record: RequestRecord) -> Any:
    built = msgspec.to_builtins(record)
    for name in ("id", "time", "phases"):
        built.pop(name, None)
    for call in built.get("calls", ()):
        call.pop("ms", None)
    return built


def _comparable_head(arrived: Arrived) -> Any:
    via = "x-compaction-via"
    return arrived.target, [pair for pair in arrived.headers if pair[0].lower() != via], arrived.body
