"""A summary call carries the whole conversation, so it keeps the limits on its data, and bills the same account."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.messages import words
from tests.kit.scripted import PROFILE, behind, client, proxied
from tests.kit.upstream import EveryApi, Reply, Responder, StandIn

DATA: dict[str, Any] = {"provider": {"data_collection": "deny", "zdr": True, "only": ["eu"]}}
ACCOUNT: dict[str, Any] = {"guardrail_config": {"id": "g1"}, "safety_identifier": "u1"}
MODEL: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
ANSWER: dict[str, Any] = {"temperature": 0.1, "top_p": 0.5}
HEADERS = {"openai-organization": "org", "openai-project": "proj", "x-portkey-config": "pc"}
PRIVATE = {"helicone-omit-request": "true"}
NOTES = Reply(content="Goal: KEPT answers to the questions. Next step: answer the newest one.")


def asked(
    folder: Path,
    path: str,
    body: dict[str, Any],
    summary: dict[str, Any],
    more: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], Any, str]:
    """Send a long conversation. Return the summary call's body and headers, and the upstream that got it."""
    near, far = EveryApi(), EveryApi()
    turns = [(role, f"{role} {n}: {words(1_000, f'w{n}x')}") for n in range(7) for role in ("user", "assistant")]
    messages = [{"role": role, "content": text} for role, text in (*turns, ("user", "What now?"))]
    with serve(near.app) as url, serve(far.app) as other:
        speaks = ["messages"] if path == "messages" else ["chat", "responses"]
        settings = {
            "upstreams": {
                "main": {"base_url": f"{url}/v1", "speaks": speaks},
                "far": {"base_url": f"{other}/v1", "api_key": "sk-far", "speaks": ["chat"]},
            },
            "models": [
                {"match": "elsewhere", "upstream": "far", "profile": PROFILE},
                {"match": "*", "upstream": "main", "profile": PROFILE},
            ],
            "policies": {"default": {"prepare": None, "summary": summary}},
        }
        headers = {"authorization": "Bearer sk-me", **HEADERS, **PRIVATE, **more}
        with proxied(settings, folder) as entrance, httpx.Client(trust_env=False, timeout=60) as http:
            sent = {"model": "m", "input" if path == "responses" else "messages": messages, **body}
            answer = http.post(f"{entrance}/v1/{path}", json=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-compaction-summary"] == "made"
    calls = [(name, one) for name, upstream in (("near", near), ("far", far)) for one in upstream.requests]
    (name, call), *_ = [pair for pair in calls if b"<transcript>" in pair[1].raw or b"<write_notes>" in pair[1].raw]
    return json.loads(call.raw), call.headers, name


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("chat/completions", {"store": False, "service_tier": "flex", "metadata": {"team": "a"}, "user": "u"}),
        ("responses", {"store": False, "service_tier": "flex", "metadata": {"team": "a"}, "user": "u"}),
        ("messages", {"inference_geo": "us", "metadata": {"user_id": "u"}, "service_tier": "standard_only"}),
    ],
)
@pytest.mark.parametrize("method", ["transcript", "continue"])
def test_conditions_go_with_the_call(tmp_path: Path, path: str, own: dict[str, Any], method: str) -> None:
    most = {"max_tokens": 500} if path == "messages" else {}
    conditions = {**DATA, **ACCOUNT, **MODEL, **own}
    body, headers, _ = asked(tmp_path, path, {**conditions, **ANSWER, **most}, {"method": method})
    assert {name: body.get(name) for name in conditions} == conditions
    assert {name: headers.get(name) for name in HEADERS | PRIVATE} == HEADERS | PRIVATE
    assert headers["authorization"] == "Bearer sk-me"
    assert method == "continue" or not ANSWER.keys() & body.keys()


@pytest.mark.parametrize(
    ("path", "method", "initiator"),
    combined(3, ["chat/completions", "responses", "messages"], ["transcript", "continue"], ["user", "agent", None]),
)
def test_the_proxy_is_the_initiator(tmp_path: Path, path: str, method: str, initiator: str | None) -> None:
    most = {"max_tokens": 500} if path == "messages" else {}
    more = {} if initiator is None else {"x-initiator": initiator, "openai-intent": "conversation-edits"}
    _, headers, _ = asked(tmp_path, path, most, {"method": method}, more)
    assert headers.get("x-initiator") == (None if initiator is None else "agent")
    assert headers.get("openai-intent") == more.get("openai-intent")


@pytest.mark.parametrize(
    ("model", "where", "kept", "gone", "named"),
    [
        ("smaller", "near", {**DATA, **ACCOUNT, "store": False}, MODEL, HEADERS | PRIVATE),
        ("elsewhere", "far", {**DATA, "store": False}, {**MODEL, **ACCOUNT}, PRIVATE),
    ],
)
def test_other_models_get_what_applies_to_them(
    tmp_path: Path, model: str, where: str, kept: dict[str, Any], gone: dict[str, Any], named: dict[str, str]
) -> None:
    sent = {**DATA, **ACCOUNT, **MODEL, "store": False}
    body, headers, name = asked(tmp_path, "chat/completions", sent, {"model": model})
    assert name == where
    assert {name: body[name] for name in kept} == kept
    assert not gone.keys() & body.keys()
    assert {name: headers[name] for name in HEADERS | PRIVATE if name in headers} == named


@pytest.mark.parametrize(
    ("field", "value", "goes"),
    [("reasoning_effort", "none", True), ("reasoning_effort", "high", False), ("thinking", {"type": "disabled"}, True),
     ("reasoning", {"effort": "high", "exclude": False}, False), ("store", True, False)],
)  # fmt: skip
def test_some_values_are_no_conditions(tmp_path: Path, field: str, value: object, *, goes: bool) -> None:
    body, _, _ = asked(tmp_path, "chat/completions", {field: value}, {})
    assert (field in body) == goes


def thinks(body: dict[str, Any]) -> Reply:
    """A model that thinks for 2,000 tokens before it writes, under any name."""
    return NOTES if body["max_tokens"] > 2_000 else Reply(content="<reasoning>Let me see", finish_reason="length")


def refuses_system(body: dict[str, Any]) -> Reply:
    refused = any(message["role"] == "system" for message in body["messages"])
    return Reply(status=400, error={"message": "System role not supported"}) if refused else NOTES


def only_streams(body: dict[str, Any]) -> Reply:
    return NOTES if body.get("stream") else Reply(status=400, error="Stream must be set to true")


@pytest.mark.parametrize("rule", [thinks, refuses_system, only_streams])
def test_a_server_is_asked_as_it_wants_and_remembered(tmp_path: Path, rule: Responder) -> None:
    upstream = StandIn(
        window=64_000,
        max_output=20_000,
        summariser=rule,
        responder=lambda body: rule(body) if "<transcript>" in str(body) else Reply(content="ok"),
    )
    origins, profile = [], {**PROFILE, "context_window": 64_000, "max_output_tokens": 20_000}
    with (
        behind(upstream, tmp_path, profile=profile, policy={"prepare": None, "trigger": {"tokens": 12_000}}) as url,
        client(url) as caller,
    ):
        for seed in ("one", "two"):
            messages = [{"role": "user", "content": f"{seed} {n}: {words(1_000, f'{seed}{n}x')}"} for n in range(14)]
            answer = caller.chat.completions.with_raw_response.create(model="mine", messages=messages)  # type: ignore[arg-type]
            origins.append(answer.headers["x-compaction-summary"])
    assert origins == ["made", "made"]
    calls = [json.loads(request.raw) for request in upstream.requests if b"<transcript>" in request.raw]
    assert len(calls) == 3, "one refusal, and then never again"
    assert "Goal: KEPT" in str(upstream.requests[-1].body)
