"""Each way from a parsed body to the response that the client gets, with an upstream that is a script."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from proxy.access.authenticator import Caller
from proxy.config import load
from proxy.config.policy import Policy
from proxy.dialects.apis import CHAT, MESSAGES, RESPONSES, Dialect
from proxy.errors import ConfigurationError, ProxyError
from proxy.limits.prices import Price, Rates
from proxy.limits.profiles import Profile
from proxy.pipeline.answering import Answering
from proxy.pipeline.attempt import Attempt, Reply
from proxy.pipeline.billing import Bill, Pricing
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.exchange import Exchange, TimeLeft
from proxy.pipeline.features.recall import reserved
from proxy.server.app import Proxy
from proxy.telemetry.record import Reason, RequestRecord
from proxy.telemetry.record_json import reason_text
from proxy.upstream.transport import Answer, Outgoing, Transport

WINDOW = 8_000
CLAUDE = "claude-sonnet-5-5"
"""A model that binds all reasoning to the prompt before it."""
JSON, EVENTS = ("content-type", "application/json"), ("content-type", "text/event-stream")


@dataclass
class Said:
    """An answer of the upstream: its status, its body, and its headers."""

    status: int
    body: bytes
    headers: Sequence[tuple[str, str]] = (JSON,)

    def answer(self, closed: list[int]) -> Answer:
        async def chunks() -> AsyncIterator[bytes]:
            yield self.body

        async def close() -> None:
            closed.append(self.status)

        headers = [*self.headers, ("content-length", str(len(self.body)))]
        return Answer(self.status, headers, chunks(), close)


def overflow(limit: int | None = WINDOW) -> Said:
    text = "Your input exceeds the context window of this model."
    if limit is not None:
        text = f"This model's maximum context length is {limit} tokens. However, your messages resulted in 9999 tokens."
    error = {"message": text, "type": "invalid_request_error", "code": "context_length_exceeded"}
    return Said(400, json.dumps({"error": error}).encode())


def refusal(message: str, status: int = 400) -> Said:
    return Said(status, json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode())


def stream(*events: str) -> Said:
    return Said(200, "".join(f"data: {event}\n\n" for event in events).encode(), (EVENTS,))


def packed(answer: Said) -> Said:
    """Return an answer with status 200 that is compressed unasked."""
    return Said(200, gzip.compress(answer.body), (*answer.headers, ("content-encoding", "gzip")))


FINE = Said(200, b'{"choices":[{"index":0,"message":{"role":"assistant","content":"fine"},"finish_reason":"stop"}]}')
FINE_MESSAGE = Said(200, b'{"type":"message","role":"assistant","content":[{"type":"text","text":"fine"}]}')
FINE_STREAM = stream('{"choices":[{"index":0,"delta":{"content":"fine"},"finish_reason":null}]}', "[DONE]")
SILENT_STREAM = stream("[DONE]")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
"""The client's tools. Without any, a request doesn't get the proxy's own."""


@dataclass
class Script:
    """The transport to an upstream that gives these answers, one for each request."""

    answers: Sequence[Said | ProxyError]
    sent: list[dict[str, Any]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    async def send(self, request: Outgoing) -> Answer:
        self.sent.append(json.loads(request.body))
        answer = self.answers[len(self.sent) - 1]
        if isinstance(answer, ProxyError):
            raise answer
        return answer.answer(self.closed)


def long_chat(turns: int, **fields: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + f"word{number} " * 100})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + f"said{number} " * 100})
    return {"model": "m", "messages": [*messages, {"role": "user", "content": "And now?"}], **fields}


def thinking(turns: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + f"word{number} " * 100})
        thought = {"type": "thinking", "thinking": "Well.", "signature": f"s{number}"}
        messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": f"Answer {number}."}]})
    return {"model": CLAUDE, "max_tokens": 100, "messages": [*messages, {"role": "user", "content": "And now?"}]}


@dataclass
class Case:
    """A request, and the upstream's answers; then what must happen.

    ``causes`` are those of the retries. ``verdict`` is that of the last attempt, ``status`` the client's.
    """

    body: dict[str, Any]
    answers: Sequence[Said | ProxyError]
    causes: Sequence[str] = ()
    verdict: str = "none"
    status: int = 200
    dialect: Dialect = CHAT
    policy: dict[str, Any] = field(default_factory=dict)
    headers: Sequence[tuple[bytes, bytes]] = ()
    window: int | None = WINDOW
    counts: bool = True
    priced: bool = False


CASES = {
    "it fits": Case(long_chat(3), [FINE]),
    "a stream": Case(long_chat(3, stream=True), [FINE_STREAM]),
    "too long for the window": Case(long_chat(40), [FINE], verdict="compacted"),
    "a stated limit": Case(long_chat(12), [overflow(4_000), FINE], ["overflow"], "compacted"),
    "no stated limit": Case(long_chat(12), [overflow(None), FINE], ["overflow"], "compacted", window=None),
    "a lower limit than stated before": Case(
        long_chat(12), [overflow(4_000), overflow(2_000), FINE], ["overflow", "overflow"], "compacted"
    ),
    "as often as the policy allows": Case(
        long_chat(12),
        [overflow(4_000), overflow(2_000)],
        ["overflow"],
        "compacted",
        400,
        policy={"overflow_retries": 1},
    ),
    "compressed and with the tool, but too long": Case(
        long_chat(40, tools=TOOLS),
        [packed(overflow(4_000))],
        verdict="compacted",
        policy={"overflow_retries": 0, "recall": {"tool": "auto"}},
    ),
    "compressed and with the tool": Case(
        long_chat(40, tools=TOOLS), [packed(FINE), FINE], ["tool"], "compacted", policy={"recall": {"tool": "auto"}}
    ),
    "never": Case(long_chat(12), [overflow(4_000)], status=400, policy={"overflow_retries": 0}),
    "shadow": Case(long_chat(40), [overflow()], verdict="shadow", status=400, policy={"mode": "shadow"}),
    "off": Case(long_chat(40), [overflow()], verdict="off", status=400, policy={"mode": "off"}),
    "off by header": Case(long_chat(40), [FINE], verdict="off", headers=[(b"x-compaction", b"off")]),
    "less output is enough": Case(long_chat(12, max_tokens=6_000), [FINE]),
    "another error": Case(long_chat(12), [refusal("No such tool.")], status=400),
    "a rate limit": Case(long_chat(12), [refusal("Slow down.", 429)], status=429),
    "a silent stream": Case(long_chat(5, stream=True), [SILENT_STREAM, FINE_STREAM], ["empty"]),
    "reasoning that the proxy made invalid": Case(
        thinking(40),
        [refusal("messages.1.content.0: Invalid `signature` in `thinking` block"), FINE_MESSAGE],
        ["reasoning"],
        "compacted",
        dialect=MESSAGES,
    ),
    "reasoning that the client made invalid": Case(
        thinking(2),
        [refusal("messages.1.content.0: Invalid `signature` in `thinking` block")],
        status=400,
        dialect=MESSAGES,
    ),
    "a history at the server": Case(
        {"model": "m", "input": "And now?", "previous_response_id": "r1"},
        [overflow()],
        status=400,
        dialect=RESPONSES,
        policy={"responses": {"state": "off"}},
    ),
    "usage of a stream": Case(
        long_chat(3, stream=True),
        [refusal("Unknown field stream_options."), FINE_STREAM],
        ["added"],
        priced=True,
    ),
    "no counter": Case(long_chat(40), [FINE], verdict="failed", counts=False),
    "no counter, and a price": Case(
        long_chat(3, stream=True), [FINE_STREAM], verdict="failed", counts=False, priced=True
    ),
    "no counter, and off": Case(long_chat(3), [FINE], verdict="off", counts=False, policy={"mode": "off"}),
}


def answered(case: Case, folder: Path, *, deadline: float = 1e12) -> tuple[Reply, Script, Exchange]:
    """Answer a request in a new process."""
    configured = {
        "store": {"url": "sqlite://"},
        "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1"}},
        "models": [{"match": "*", "upstream": "main"}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(configured))
    script = Script(case.answers)

    async def run() -> tuple[Reply, Exchange]:
        service = Proxy(load(folder / "config.yaml", {})).service
        try:
            body = await case.dialect.request.read(json.dumps(case.body).encode())
            configuration = service.configuration
            model = case.body["model"]
            route = configuration.settings.route(model)
            assert route is not None
            profile = Profile(model, context_window=case.window, tokenizer="o200k_base")
            policy = Policy.build("default", case.policy)
            exchange = Exchange(
                record=RequestRecord("", 0.0),
                configuration=configuration,
                scope={"type": "http", "headers": list(case.headers), "query_string": b""},
                via="",
                caller=Caller("key:t", None, policy, None, None),
                bill=Bill(),
                dialect=case.dialect,
                body=body,
                original=body,
                route=route,
                profile=profile,
                counter=service.limits.measures.counter(profile, case.dialect) if case.counts else None,
                memory=service.access.bodies.lease(),
                time=TimeLeft(deadline),
            )
            if case.priced:
                exchange.bill.price_of = Pricing(Price(Rates(1, 1)))
            reply = await Answering(service).through(cast("Transport", script), exchange)
            await exchange.bill.close()
            return reply, exchange
        finally:
            await service.aclose()

    reply, exchange = asyncio.run(run())
    return reply, script, exchange


@pytest.mark.parametrize("name", CASES)
def test_the_way_to_an_answer(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    reply, script, exchange = answered(case, tmp_path)
    assert reply.run.retries == [*case.causes]
    assert len(script.sent) == len(case.answers)
    assert reply.start.answer.status == case.status
    assert reply.sent.outcome.verdict == case.verdict
    results = [call.result for call in exchange.record.calls]
    assert results[:-1] == [*case.causes]
    assert script.closed == [said.status for said in case.answers if isinstance(said, Said)]


def test_the_client_of_a_request_that_stays_too_long_learns_its_parts(tmp_path: Path) -> None:
    reply, _, _ = answered(CASES["never"], tmp_path)
    message = json.loads(reply.start.first)["error"]["message"]
    assert "largest message" in message
    reply, _, _ = answered(CASES["a history at the server"], tmp_path)
    assert "previous_response_id" in (reply.run.advice or "")


def test_a_response_that_cannot_be_judged_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unavailable(*_: object) -> int:
        raise ConfigurationError("The tokenizer is gone.")

    monkeypatch.setattr(Compactor, "sizes", unavailable)
    monkeypatch.setattr(Compactor, "parts", unavailable)
    reply, _, exchange = answered(Case(long_chat(3), [overflow(4_000)]), tmp_path)
    assert reply.start.answer.status == 400
    assert [call.result for call in exchange.record.calls] == ["overflow"]


@pytest.mark.parametrize("tool", ["auto", "off"])
def test_the_attempt_after_an_overflow_shares_its_summary_with_the_next_request(tool: str, tmp_path: Path) -> None:
    case = Case(long_chat(12), [overflow(4_000), FINE], policy={"recall": {"tool": tool}})
    reply, _, exchange = answered(case, tmp_path)
    attempt = reply.sent
    assert isinstance(attempt, Attempt)
    room = attempt.budget.input
    assert room is not None
    assert attempt.case.budget == room - reserved(exchange)
    assert (reserved(exchange) > 0) == (tool == "auto")


def test_records_explain_each_cause_of_a_retry(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("store: {url: 'sqlite://'}")

    async def causes() -> set[str]:
        service = Proxy(load(tmp_path / "config.yaml", {})).service
        found = {recovery.cause for recovery in Answering(service).recoveries}
        await service.aclose()
        return found

    for cause in asyncio.run(causes()):
        assert "The condition" not in reason_text(Reason(cause, 4_000, 5_000))
