"""Test that spending, ledger, records, and prices agree with the upstream's ledger, even if usage is left out.

The figures are equal if the upstream reports the usage, and within 15 % otherwise.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from proxy.endpoints import reply
from proxy.server.loopback import serve
from proxy.telemetry.record import RequestRecord
from tests.kit.billing_upstream import PACKERS, Billed, BillingUpstream, Manner, pieces
from tests.kit.combinations import combined
from tests.kit.messages import words
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import behind, key_hash, proxied
from tests.kit.waiting import until

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
PRICES = {"m": {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.00001}}
BUDGET = 100_000_000
KEY = {"authorization": "Bearer cp-team"}
CLOSE = 0.15


class Door:
    """A proxy for a team with a budget, in front of an upstream with a ledger."""

    def __init__(self, url: str, store: Path, upstream: BillingUpstream) -> None:
        self.url = url
        self.store = store
        self.upstream = upstream
        self.manner = Manner()
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=60, headers=KEY)
        upstream.manner = lambda path, body: self.manner

    def records(self, count: int) -> list[RequestRecord]:
        """Wait for this many records, and return all of them, newest first."""
        end = time.monotonic() + 30
        while len(found := records_in(self.store)) < count and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def spent(self) -> int:
        """Return the tokens that the team has spent."""
        asked, scripted = [{"role": "user"}], self.upstream.manner
        self.upstream.manner = lambda path, body: (
            Manner(status=404) if body.get("messages") == asked else scripted(path, body)
        )
        answer = self.client.post("/v1/chat/completions", json={"model": "m", "messages": asked})
        self.upstream.manner = scripted
        return BUDGET - int(answer.headers["x-compaction-budget-remaining"].split()[0])


@pytest.fixture
def door(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(reply, "LINGER_SECONDS", 0.05)
    window, policy = getattr(request, "param", (128_000, {}))
    upstream = BillingUpstream(lambda path, body: Manner())
    store = tmp_path / "compaction.db"
    sections = {
        "auth": {"mode": "keys"},
        "teams": {"team": {"keys": [key_hash("cp-team")], "limits": {"spend": {"tokens": BUDGET, "per": "month"}}}},
        "store": {"url": f"sqlite:///{store}"},
        "prices": PRICES,
    }
    profile = {"context_window": window, "tokenizer": "o200k_base"}
    with behind(upstream, tmp_path, profile=profile, policy=policy, **sections) as url:
        door = Door(url, store, upstream)
        with door.client:
            yield door


def body_of(api: str, text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    if api == "responses":
        return {"model": "m", "input": [message], **more}
    return {"model": "m", "messages": [message], **({"max_tokens": 900} if api == "messages" else {}), **more}


def agree(record: RequestRecord, billed: list[Billed]) -> None:
    """Assert that a record has the usage and the price of these calls."""
    prompt, output = sum(one.prompt for one in billed), sum(one.output for one in billed)
    assert record.usage is not None
    assert record.cost is not None
    cost = prompt * 1_000_000 + output * 10_000_000
    found = (record.usage.input or 0), (record.usage.output or 0), record.cost.sent
    if all(one.reported for one in billed):
        assert not record.usage.estimated
    if not record.usage.estimated:
        assert found == (prompt, output, cost)
    else:
        for ours, theirs, least in zip(found, (prompt, output, cost), (8, 8, 8 * 11_000_000), strict=True):
            assert abs(ours - theirs) <= max(CLOSE * theirs, least), (found, billed)


def cases(count: int) -> Iterator[tuple[str, bool, bool, Manner]]:
    """Yield an API, whether it streams, whether the client asks for usage, and the upstream's manner."""
    draw = random.Random(12)
    for number in range(count):
        api, stream = list(PATHS)[number % 3], draw.random() < 0.6
        usages = ["last", "missing", "zeros", "absurd", *(["repeated"] if stream and api == "chat" else ["first"])]
        usage = draw.choice(usages) if not (stream and api != "chat") else draw.choice(usages[:4])
        text = words(draw.choice((5, 60, 700)), f"o{number}x")
        encoding = draw.choice((None, None, *PACKERS))
        stop = None
        if stream and draw.random() < 0.5:
            encoding, stop = None, draw.randrange(len(pieces(text)) + 3)
        yield api, stream, draw.random() < 0.5, Manner(text, usage, encoding, stop)


def test_every_request_is_counted(door: Door, full: bool) -> None:
    number = 0
    for api, stream, asks, manner in cases(600 if full else 30):
        number += 1
        body = body_of(api, words(random.Random(number).choice((20, 300, 900)), f"p{number}x"), stream=stream)
        if stream and asks and api == "chat":
            body["stream_options"] = {"include_usage": True}
        door.manner = manner
        before = len(door.upstream.ledger)
        text = _asked(door, PATHS[api], body, manner)
        if stream and not asks and api == "chat" and manner.usage != "repeated" and manner.encoding is None:
            assert '"usage"' not in text
        record = door.records(number)[0]
        agree(record, door.upstream.ledger[before:])
    _sums_agree(door, number)


def _asked(door: Door, path: str, body: dict[str, Any], manner: Manner) -> str:
    """Send a request, and leave when the upstream has stopped."""
    if manner.stop is None:
        return door.client.post(path, json=body).text
    # The number of events that have text, so that the client leaves when it has all of them.
    with httpx.Client(trust_env=False, headers=KEY, timeout=httpx.Timeout(30, read=0.4)) as leaving:
        try:
            with leaving.stream("POST", f"{door.url}{path}", json=body) as answer:
                return "".join(answer.iter_text())
        except httpx.ReadTimeout:
            return ""


def _sums_agree(door: Door, count: int) -> None:
    end = time.monotonic() + 20
    while True:  # a summary may still be made in the background, and its record follows
        spent = door.spent()
        records = door.records(count)
        used = [record.usage for record in records if record.usage is not None]
        total = sum((one.input or 0) + (one.output or 0) for one in used)
        rows = [sums for _, sums in ledger_in(door.store)]
        ledger = sum(sums.input + sums.output + sums.summary_input + sums.summary_output for sums in rows)
        if spent == ledger == total or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert (spent, ledger) == (total, total)
    money = sum(record.cost.sent for record in records if record.cost is not None)
    assert sum(sums.cost + sums.summary_cost for sums in rows) == money
    assert sum(sums.estimated for sums in rows) == sum(
        1 for record in records if record.kind == "request" and record.usage is not None and _estimated(record)
    )


def _estimated(record: RequestRecord) -> bool:
    return (record.usage is not None and record.usage.estimated) or (record.cost is not None and record.cost.estimated)


@pytest.mark.parametrize("length", [200, 3_000])
def test_a_response_in_the_background_counts_once(door: Door, length: int) -> None:
    door.manner = Manner(words(length, "b"))
    body = body_of("responses", words(300, "p"), background=True)
    answer = door.client.post("/v1/responses", json=body).json()
    (record,) = door.records(1)
    assert record.usage is not None
    assert record.usage.estimated
    (billed,) = door.upstream.ledger
    assert abs((record.usage.input or 0) - billed.prompt) <= CLOSE * billed.prompt
    for _ in range(3):
        assert door.client.get(f"/v1/responses/{answer['id']}").status_code == 200
    records = door.records(4)
    assert sum(one.usage.input or 0 for one in records if one.usage) == billed.prompt
    assert sum(one.usage.output or 0 for one in records if one.usage) == billed.output
    assert sum(one.cost.sent for one in records if one.cost) == billed.prompt * 10**6 + billed.output * 10**7
    _sums_agree(door, 4)


USAGES = ["last", "first", "missing", "zeros", "absurd"]


@pytest.mark.parametrize(
    ("usage", "encoding"),
    [*((usage, None) for usage in USAGES), *zip(USAGES, PACKERS, strict=False), ("zeros", "zstd")],
)
def test_forwarded_paths_are_counted(door: Door, usage: str, encoding: str | None) -> None:
    door.manner = Manner(words(120, "c"), usage, encoding)
    calls = {
        "/v1/completions": {"model": "m", "prompt": words(300, "p")},
        "/v1/embeddings": {"model": "m", "input": [words(100, "e"), words(80, "f")]},
        "/v1/responses/compact": {"model": "m", "input": [{"role": "user", "content": words(300, "q")}]},
    }
    for number, (path, body) in enumerate(calls.items(), 1):
        assert door.client.post(path, json=body).status_code == 200
        agree(door.records(number)[0], door.upstream.ledger[-1:])
    for path in ("/v1/files", "/v1/moderations", "/v1/messages/count_tokens"):
        door.client.post(path, json={"model": "m", "input": "x"})
    free = door.records(6)[:3]
    assert [record.usage for record in free] == [None] * 3
    _sums_agree(door, 6)


SUMMARY = "Summary: the work was done, and the next step is to continue."


@pytest.mark.parametrize(("usage", "api"), combined(2, ["last", "missing"], PATHS))
def test_summaries_hidden_rounds_and_retries_are_counted(door: Door, api: str, usage: str) -> None:
    refused: list[str] = []

    def manner(path: str, body: dict[str, Any]) -> Manner:
        if body.get("tools") and not refused:
            refused.append(path)
            return Manner(status=500)
        return Manner(SUMMARY, usage)

    door.upstream.manner = manner
    tool = {"name": "own", "parameters": {"type": "object", "properties": {}}}
    tools = {
        "chat": {"type": "function", "function": tool},
        "responses": {"type": "function", **tool},
        "messages": {"name": "own", "input_schema": tool["parameters"]},
    }
    talk = [
        {"role": role, "content": words(1_500, f"{number}{role[0]}")}
        for number in range(60)
        for role in ("user", "assistant")
    ]
    talk.append({"role": "user", "content": "go"})
    body = body_of(api, "", tools=[tools[api]])
    body["input" if api == "responses" else "messages"] = talk
    for stream in (False, True, False):
        door.client.post(PATHS[api], json=body | {"stream": stream})

    def agrees() -> bool:
        records = door.records(5)
        ours = sum((one.usage.input or 0) + (one.usage.output or 0) for one in records if one.usage)
        theirs = sum(one.prompt + one.output for one in door.upstream.ledger)
        return ours == theirs if usage == "last" else abs(ours - theirs) <= CLOSE * theirs

    assert until(agrees)  # a summary may still be made in the background
    assert any(record.kind == "summary" for record in door.records(5))
    _sums_agree(door, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("store", "replicas"), [("sqlite", 1), ("sqlite", 2), ("redis", 2)])
def test_many_requests_at_once_overspend_at_most_a_reservation(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    replicas: int,
    stream: bool,
) -> None:
    """60 requests at once, and a budget of five. A store that's slow on a busy machine would let requests through."""
    monkeypatch.setattr("proxy.store.accounts.ADMIT_SECONDS", 30.0)
    monkeypatch.setattr("proxy.store.guarded.READ_SECONDS", 30.0)
    upstream = BillingUpstream(lambda path, body: Manner(words(93, "o")))
    url = request.getfixturevalue("redis").url if store == "redis" else f"sqlite:///{tmp_path}/store.db"
    spend = {"tokens": 5_000, "per": "month"}
    body = body_of("chat", words(900, "p"), stream=stream)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(serve(upstream))
        settings = {
            "upstreams": {"main": {"base_url": f"{base}/v1", "api_key": "none"}},
            "models": [{"match": "*", "upstream": "main", "profile": {"tokenizer": "o200k_base"}}],
            "auth": {"mode": "keys"},
            "teams": {"team": {"keys": [key_hash("cp-team")], "limits": {"spend": spend}}},
            "store": {"url": url},
        }
        folders = [tmp_path / str(number) for number in range(replicas)]
        for folder in folders:
            folder.mkdir()
        doors = [stack.enter_context(proxied(settings, folder)) for folder in folders]
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=60, headers=KEY))
        pool = stack.enter_context(ThreadPoolExecutor(60))

        def ask(number: int) -> int:
            return client.post(doors[number % replicas] + PATHS["chat"], json=body).status_code

        statuses = list(pool.map(ask, range(60)))
        assert {200} < set(statuses) <= {200, 402, 429}
        spent = sum(one.prompt + one.output for one in upstream.ledger)
        each = spent // len(upstream.ledger)
        assert spent <= 5_000 + each
        # Requests in progress reserve more than they cost, so the rest of the budget is left for later ones.
        later = [ask(number) for number in range(8)]
        assert later[-1] == 402
        spent = sum(one.prompt + one.output for one in upstream.ledger)
        assert 5_000 <= spent <= 5_000 + each


MODELS = {
    "padded": (b" " * 1_000_000 + b'{"model": "m", "prompt": "hi"}', "application/json"),
    "UTF-16": ('{"model": "m", "prompt": "hi"}'.encode("utf-16"), "application/json"),
    "byte order mark": (b'\xef\xbb\xbf{"model": "m", "prompt": "hi"}', "application/json"),
    "surrogate": (b'{"model": "m", "prompt": "\\ud800"}', "application/json"),
    "not a number": (b'{"model": "m", "prompt": "hi", "temperature": NaN}', "application/json"),
    "wrong type": (b'{"model": "m", "prompt": "hi"}', "application/x-www-form-urlencoded"),
    "form": (b"prompt=hi&model=m", "application/x-www-form-urlencoded"),
    "parts": (
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n',
        "multipart/form-data; boundary=x",
    ),
    "none": (b"[]", "application/json"),
}


@pytest.mark.parametrize(("named", "form"), combined(2, [False, True], MODELS))
def test_a_budget_in_dollars_counts_forwarded_requests_whose_model_is_hard_to_read(
    tmp_path: Path, form: str, named: bool
) -> None:
    """If neither the request nor the answer names the model, the highest price counts."""
    raw, kind = MODELS[form]

    async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            usage = {"prompt_tokens": 1_000, "completion_tokens": 500}
            answer = {"choices": [{"text": "x"}], "usage": usage, **({"model": "m"} if named else {})}
            while (await receive()).get("more_body", False):
                pass
            await JSONResponse(answer)(scope, receive, send)

    spend = {"usd": 0.015, "per": "month"}
    sections = {
        "auth": {"mode": "keys"},
        "teams": {"team": {"keys": [key_hash("cp-team")], "limits": {"spend": spend}}},
        "prices": PRICES,
    }
    headers = {**KEY, "content-type": kind}
    with behind(upstream, tmp_path, **sections) as url, httpx.Client(base_url=url, trust_env=False) as client:
        statuses = [client.post("/v1/completions", content=raw, headers=headers).status_code for _ in range(8)]
    assert statuses == [200] * 3 + [402] * 5


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/gemini:generateContent",
        "/v1/batches",
        "/v1/messages/batches",
        "/v1/fine_tuning/jobs",
        "/v1/evals/e/runs",
    ],
)
def test_a_team_without_a_rest_gets_nothing_that_costs(tmp_path: Path, path: str) -> None:
    upstream = BillingUpstream(lambda path, body: Manner())
    teams = {"team": {"keys": [key_hash("cp-team")], "limits": {"spend": {"tokens": 5, "per": "day"}}}}
    with (
        behind(upstream, tmp_path, auth={"mode": "keys"}, teams=teams) as url,
        httpx.Client(base_url=url, trust_env=False, headers=KEY) as client,
    ):
        assert client.post(PATHS["chat"], json=body_of("chat", "hi")).status_code == 200
        assert client.post(path, json={"model": "m", "input": "x"}).status_code == 402
    assert [one.path for one in upstream.ledger] == ["/chat/completions"]


def test_a_client_that_leaves_before_the_usage_pays_for_hidden_reasoning(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "LINGER_SECONDS", 20.0)
    hidden = 20_000

    async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        await send(start)
        text = {"choices": [{"index": 0, "delta": {"content": "fine"}}]}
        await send(
            {"type": "http.response.body", "body": b"data: " + json.dumps(text).encode() + b"\n\n", "more_body": True}
        )
        await asyncio.sleep(1.0)
        end = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": hidden}}
        await send(
            {"type": "http.response.body", "body": b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n"}
        )

    monkeypatch.setattr(BillingUpstream, "__call__", lambda self, *scope: upstream(*scope))
    body = body_of("chat", "hi", stream=True)
    with (
        httpx.Client(trust_env=False, headers=KEY, timeout=30) as leaving,
        leaving.stream("POST", door.url + PATHS["chat"], json=body) as answer,
    ):
        next(answer.iter_raw())
    (record,) = door.records(1)
    assert record.usage is not None
    assert (record.usage.output, record.usage.estimated) == (hidden, False)


@pytest.mark.parametrize("body", ['{"model": "dear", "model": "m", %s}', '{"Model": "dear", "model": "m", %s}'])
def test_a_budget_in_dollars_counts_the_model_that_answered(tmp_path: Path, body: str) -> None:
    async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            while (await receive()).get("more_body", False):
                pass
            message = {"role": "assistant", "content": "fine \ud83d"}
            answer = {"model": "dear", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
            usage = {"prompt_tokens": 1_000, "completion_tokens": 500}
            await Response(json.dumps(answer | {"usage": usage}), media_type="application/json")(scope, receive, send)

    sections = {
        "auth": {"mode": "keys"},
        "teams": {"team": {"keys": [key_hash("cp-team")], "limits": {"spend": {"usd": 1.0, "per": "day"}}}},
        "prices": PRICES | {"dear": {"input_cost_per_token": 0.0002, "output_cost_per_token": 0.0004}},
    }
    raw = (body % '"messages": [{"role": "user", "content": "hi"}]').encode()
    with behind(upstream, tmp_path, **sections) as url, httpx.Client(base_url=url, trust_env=False) as client:
        statuses = [client.post(PATHS["chat"], content=raw, headers=KEY).status_code for _ in range(5)]
    assert statuses == [200] * 3 + [402] * 2


@pytest.mark.parametrize("form", ["utf-8-sig", "utf-16", "NaN", "deep"])
@pytest.mark.parametrize("api", PATHS)
def test_a_budget_counts_no_body_that_the_proxy_cannot_read(door: Door, api: str, form: str) -> None:
    text = json.dumps(body_of(api, "hi", stream=True))
    if form in ("NaN", "deep"):
        value = "NaN" if form == "NaN" else "[" * 100_000 + "]" * 100_000
        raw = f'{text[:-1]}, "x": {value}}}'.encode()
    else:
        raw = text.encode(form)
    answer = door.client.post(PATHS[api], content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "isn't plain JSON" in answer.text or "is not plain JSON" in answer.text
    assert door.upstream.ledger == []
