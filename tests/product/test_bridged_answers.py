"""Answers, errors, and requests that a bridge translates, as the official SDKs see them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs

from proxy.server.loopback import serve
from tests.kit.agent_sessions import chat_session, messages_session, responses_session
from tests.kit.scripted import client, proxied
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Reply, Responder, StandIn, ToolCall
from tests.kit.waiting import until

WINDOW = 16_000
LARGE = {"context_window": 128_000, "max_input_tokens": 128_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
SMALL = {**LARGE, "context_window": WINDOW, "max_input_tokens": WINDOW}
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
FUNCTION: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALLS = (ToolCall("call_1", "look", '{"a": 1}'), ToolCall("call_2", "look", '{"b": 2}'))


class Without:
    """An upstream that lacks some paths, or refuses the bodies with ``only`` there. ``refused`` has the paths."""

    def __init__(
        self,
        app: ASGIApp,
        *missing: str,
        status: int = 404,
        body: bytes = b'{"detail":"Not Found"}',
        only: bytes | None = None,
    ) -> None:
        self.app = app
        self.only = only
        self.missing = missing
        self.status = status
        self.body = body
        self.refused: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not scope["path"].endswith(self.missing):
            await self.app(scope, receive, send)
            return
        if self.only is not None:
            sent = await Request(scope, receive).body()
            if self.only not in sent:
                await self.app(scope, _again(sent), send)
                return
        self.refused.append(scope["path"].removeprefix("/v1"))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def _again(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


@contextlib.contextmanager
def entrance(app: ASGIApp, folder: Path, profile: Any = SMALL, **upstream: Any) -> Iterator[str]:
    """The URL of a proxy in front of an app."""
    with serve(app) as url:
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", **upstream}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
        }
        with proxied(settings, folder) as proxy:
            yield proxy


@contextlib.contextmanager
def clients(url: str) -> Iterator[tuple[anthropic.Anthropic, openai.OpenAI]]:
    with anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as claude, client(url) as gpt:
        yield claude, gpt


def message(caller: anthropic.Anthropic, *, stream: bool, **fields: Any) -> Any:
    asked: Any = {"model": "m", "max_tokens": 500, "messages": HELLO} | fields
    if not stream:
        return caller.messages.create(**asked)
    with caller.messages.stream(**asked) as events:
        return events.get_final_message()


def response(caller: openai.OpenAI, *, stream: bool, **fields: Any) -> Any:
    asked: Any = {"model": "m", "input": HELLO} | fields
    if not stream:
        return caller.responses.create(**asked)
    *_, last = caller.responses.create(**asked, stream=True)
    return last.response


def answering(reply: Reply) -> Responder:
    return lambda body: reply


@pytest.mark.parametrize("stream", [False, True])
def test_text_calls_and_usage(stream: bool, tmp_path: Path) -> None:
    upstream = StandIn(responder=answering(Reply(content="I look at both.", tool_calls=CALLS)))
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        made = message(claude, stream=stream, tools=[TOOL])
        answered = response(gpt, stream=stream, tools=[FUNCTION])
    sent = upstream.requests[0].tokens
    text, *calls = made.content
    assert (text.text, [(call.id, call.name, call.input) for call in calls]) == (
        "I look at both.",
        [("call_1", "look", {"a": 1}), ("call_2", "look", {"b": 2})],
    )
    assert (made.stop_reason, made.usage.input_tokens, made.role, made.id[:4]) == (
        "tool_use",
        sent,
        "assistant",
        "msg_",
    )
    assert made.usage.output_tokens > 0
    assert [item.type for item in answered.output] == ["message", "function_call", "function_call"]
    assert answered.output_text == "I look at both."
    assert [(item.call_id, item.arguments) for item in answered.output[1:]] == [
        (call.id, call.arguments) for call in CALLS
    ]
    assert (answered.status, answered.usage.input_tokens) == ("completed", upstream.requests[1].tokens)
    assert (answered.error, answered.incomplete_details, answered.store) == (None, None, False)
    assert answered.usage.total_tokens == answered.usage.input_tokens + answered.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
    ],
)
def test_an_error_has_the_upstreams_status_and_text(status: int, kind: str, stream: bool, tmp_path: Path) -> None:
    error = {"error": {"message": "The upstream says no.", "type": "some_error", "code": "some_code", "param": None}}
    reply = Reply(status=status, error=error, headers={"retry-after": "7"})
    upstream = StandIn(responder=answering(reply))
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        with pytest.raises(anthropic.APIStatusError) as of_messages:
            message(claude, stream=stream)
        with pytest.raises(openai.APIStatusError) as of_responses:
            response(gpt, stream=stream)
    for raised in (of_messages.value, of_responses.value):
        assert (raised.status_code, raised.response.headers["retry-after"]) == (status, "7")
    assert isinstance(of_responses.value, getattr(openai, kind))
    body: Any = of_messages.value.body
    assert (body["type"], body["error"]["message"]) == ("error", "The upstream says no.")
    assert of_responses.value.code == "some_code"


def test_a_client_that_leaves_ends_the_upstreams_request(tmp_path: Path) -> None:
    upstream = StandIn(responder=answering(Reply(content="word " * 3_000, pause=0.02)))
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        with claude.messages.stream(model="m", max_tokens=4_000, messages=HELLO) as events:
            next(iter(events.text_stream))
        with gpt.responses.create(model="m", input="Hello", stream=True) as stream:
            next(stream)
        assert until(lambda: [received.abandoned for received in upstream.requests] == [True, True])


@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_is_learned_and_retried(stream: bool, tmp_path: Path) -> None:
    words = [{"role": role, "content": f"{n} word" * 700} for n in range(10) for role in ("user", "assistant")]
    upstream = StandIn(window=WINDOW)
    with entrance(upstream.app, tmp_path, LARGE, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        assert message(claude, stream=stream, messages=[*words, *HELLO]).content
        assert response(gpt, stream=stream, input=[*words, *HELLO]).output_text
    refused = [received for received in upstream.conversations if received.status == 400]
    assert len(refused) == 1, "the limit holds for both APIs"
    assert upstream.faults == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_without_remedy_has_anthropics_words(stream: bool, tmp_path: Path) -> None:
    upstream = StandIn(window=600)
    tools = [{**TOOL, "description": "Look around. " * 400}]
    with (
        entrance(upstream.app, tmp_path, LARGE, speaks=["chat"]) as url,
        clients(url) as (claude, _),
        pytest.raises(anthropic.BadRequestError) as raised,
    ):
        message(claude, stream=stream, tools=tools)
    body: Any = raised.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long: This model's maximum context length is 600 tokens.")


def test_parameters_keys_and_headers(tmp_path: Path) -> None:
    upstream = StandIn()
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Seen."}, image]}
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (claude, _):
        claude.beta.messages.create(
            model="m",
            max_tokens=50,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[*HELLO, {"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}],
            tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024},
            stop_sequences=["END"],
            betas=["some-beta"],
            extra_body={"temperature": 0.5, "top_k": 3},
        )
    (received,) = upstream.requests
    assert received.headers["authorization"] == "Bearer sk-client"
    assert not [name for name in received.headers if name.startswith("anthropic-") or name == "x-api-key"]
    body = received.body
    names = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "stop", "temperature"}
    assert body.keys() == names
    assert (body["max_tokens"], body["stop"], body["temperature"]) == (50, ["END"], 0.5)
    assert (body["tool_choice"], body["parallel_tool_calls"], len(body["tools"])) == ("auto", False, 1)
    assert [one["role"] for one in body["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert body["messages"][2]["reasoning_content"] == "Hm."
    assert body["messages"][3]["content"] == "Seen."
    assert body["messages"][4]["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"input": [{"type": "item_reference", "id": "m"}]},
    ],
)
def test_state_at_the_server_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    upstream = StandIn()
    with (
        entrance(upstream.app, tmp_path, speaks=["chat"]) as url,
        clients(url) as (_, gpt),
        pytest.raises(openai.BadRequestError, match="has no Responses API"),
    ):
        response(gpt, stream=False, **fields)
    assert upstream.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_known_references_become_items(stream: bool, tmp_path: Path) -> None:
    """The Vercel AI SDK repeats answers as references, which a server with chat completions can't resolve."""
    upstream = StandIn(responder=answering(Reply(content="I look at both.", tool_calls=CALLS)))
    with entrance(upstream.app, tmp_path, speaks=["chat"]) as url, clients(url) as (_, gpt):
        first = response(gpt, stream=stream, tools=[FUNCTION])
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        outputs = [{"type": "function_call_output", "call_id": call.id, "output": "Seen."} for call in CALLS]
        history = [*HELLO, *references, *outputs]
        assert response(gpt, stream=stream, tools=[FUNCTION], input=history).output_text
        unknown = {"type": "item_reference", "id": "msg_unknown"}
        with pytest.raises(openai.BadRequestError, match="doesn't have one of the items"):
            response(gpt, stream=stream, input=[*history, unknown])
    _, assistant, *results = upstream.requests[-1].body["messages"]
    assert assistant["content"] == "I look at both."
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert [result["tool_call_id"] for result in results] == ["call_1", "call_2"]
    assert upstream.faults == []
    assert len(upstream.requests) == 2


LM_STUDIO = b'{"error":"Unexpected endpoint or method. (POST /v1/messages)"}'


@pytest.mark.parametrize(
    ("status", "body"),
    [*((status, b'{"detail":"Not Found"}') for status in (404, 405, 501)), (200, LM_STUDIO)],
)
def test_a_missing_api_is_learned(status: int, body: bytes, tmp_path: Path) -> None:
    upstream = StandIn()
    app = Without(upstream.app, "/messages", "/responses", status=status, body=body)
    with entrance(app, tmp_path) as url, clients(url) as (claude, gpt):
        for stream in (False, True, False):
            assert message(claude, stream=stream).content[0].text
            assert response(gpt, stream=stream).output_text
    assert app.refused == ["/messages", "/responses"]
    assert len(upstream.requests) == 6


def test_a_server_that_accepts_neither_gets_its_own_error_forwarded(tmp_path: Path) -> None:
    app = Without(StandIn().app, "/messages", "/completions")
    with entrance(app, tmp_path) as url, clients(url) as (claude, _):
        for _ in range(2):
            with pytest.raises(anthropic.NotFoundError) as raised:
                message(claude, stream=False)
            assert raised.value.body == {"detail": "Not Found"}
    assert app.refused == ["/messages", "/chat/completions"] * 2, "nothing is learned"


def test_a_missing_model_isnt_a_missing_api(tmp_path: Path) -> None:
    upstream = StandIn()
    app = Without(upstream.app, "/messages")
    with entrance(app, tmp_path) as url, clients(url) as (claude, _), pytest.raises(anthropic.NotFoundError):
        message(claude, stream=False, model="Not Found")
    assert upstream.requests == []


@pytest.mark.parametrize("worked", [True, False])
def test_an_error_about_a_resource_says_nothing_about_an_api(worked: bool, tmp_path: Path) -> None:
    """A caller names a vector store that doesn't exist. Its own error reaches it, and other callers notice nothing."""
    error = {"message": "Vector store with id 'vs_1' not found.", "type": "invalid_request_error", "param": None}
    upstream = StrictResponses(WINDOW)
    app = Without(upstream.app, "/responses", body=json.dumps({"error": error}).encode(), only=b"vs_1")
    search: Any = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    with entrance(app, tmp_path) as url, client(url) as caller, client(url, "sk-other") as other:
        if worked:
            assert other.responses.create(model="gpt-4.1", input=HELLO).output_text
        for _ in range(2):
            with pytest.raises(openai.NotFoundError) as raised:
                caller.responses.create(model="gpt-4.1", input=HELLO, tools=[search])
            assert raised.value.body == error
        for one in (other, caller):
            first = one.responses.create(model="gpt-4.1", input=HELLO)
            assert one.responses.create(model="gpt-4.1", input=HELLO, previous_response_id=first.id).output_text
    assert upstream.faults == []
    assert upstream.chat.requests == []


def test_a_missing_api_is_missing_for_the_caller_that_found_it(tmp_path: Path) -> None:
    """A gateway may lack an API for one caller's key or model only."""
    upstream = StrictResponses(WINDOW)
    app = Without(upstream.app, "/responses", only=b"elsewhere")
    with entrance(app, tmp_path) as url, client(url) as caller, client(url, "sk-other") as other:
        for _ in range(2):
            assert caller.responses.create(model="elsewhere", input=HELLO).output_text
        assert app.refused == ["/responses"]
        assert len(upstream.chat.requests) == 2
        assert other.responses.create(model="gpt-4.1", input=HELLO).output_text
    assert len(upstream.chat.requests) == 2


def test_an_error_about_a_summary_model_isnt_a_missing_api(tmp_path: Path) -> None:
    """The summary model isn't for chat completions. That doesn't make chat completions a missing API."""
    error = {"message": "This is not a chat model and thus not supported in this endpoint.", "param": "model"}
    of_messages = StrictMessages(WINDOW, check="off")
    app = Without(of_messages.app, "/chat/completions", body=json.dumps({"error": error}).encode())
    with entrance(app, tmp_path) as url, clients(url) as (claude, _):
        assert len(list(messages_session(claude, 16, "claude-haiku-4-5"))) == 16
    summaries = [received for received in of_messages.requests if received.summary]
    assert summaries
    assert len(app.refused) == len(summaries), "each summary tries chat completions first"


@pytest.mark.parametrize("learned", [False, True])
def test_summaries_use_an_api_that_the_upstream_has(learned: bool, tmp_path: Path) -> None:
    """Without chat completions at the upstream, real summaries come through the two other APIs."""
    of_messages, of_responses = StrictMessages(WINDOW, check="off"), StrictResponses(WINDOW)
    for upstream, speaks in ((of_messages, "messages"), (of_responses, "responses")):
        app = Without(upstream.app, "/chat/completions")
        folder = tmp_path / speaks
        folder.mkdir()
        with (
            entrance(app, folder, **({} if learned else {"speaks": [speaks]})) as url,
            clients(url) as (claude, gpt),
        ):
            if speaks == "messages":
                assert len(list(messages_session(claude, 16, "claude-haiku-4-5"))) == 16
            else:
                assert len(list(responses_session(gpt, 16, "items", "gpt-4.1"))) == 16
        assert upstream.faults == []
        summaries = [received for received in upstream.requests if received.summary]
        assert summaries
        assert {received.status for received in summaries} == {200}
        assert bool(app.refused) is learned
        assert len(app.refused) <= 2, "a missing API is tried once, or by two calls at the same time"


def test_chat_and_messages_in_front_of_responses(tmp_path: Path) -> None:
    """Agents with tools, pictures, and summaries, every second answer streamed."""
    upstream = StrictResponses(WINDOW)
    with entrance(upstream.app, tmp_path, speaks=["responses"]) as url, clients(url) as (claude, gpt):
        assert len(list(messages_session(claude, 16, "gpt-4.1"))) == 16
        assert len(list(chat_session(gpt, 16, "gpt-4.1"))) == 16
    assert upstream.faults == []
    assert upstream.chat.requests == []
    assert any(received.summary for received in upstream.requests)
    assert {received.body["store"] for received in upstream.conversations} == {False}
    assert all("include" not in received.body for received in upstream.conversations)


@pytest.mark.parametrize("stream", [False, True])
def test_parameters_usage_and_errors_of_chat_in_front_of_responses(stream: bool, tmp_path: Path) -> None:
    upstream = StrictResponses(600)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    asked: Any = {"model": "m", "messages": HELLO, "tools": tools, "max_tokens": 50, "temperature": 0.5, "seed": 1}
    with entrance(upstream.app, tmp_path, LARGE, speaks=["responses"]) as url, clients(url) as (claude, gpt):
        if stream:
            *_, last = gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            usage = last.usage
        else:
            usage = gpt.chat.completions.create(**asked).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.total_tokens > usage.prompt_tokens) == (upstream.requests[0].tokens, True)
        large: Any = {"role": "system", "content": "Look around. " * 400}
        with pytest.raises(openai.APIError, match="exceeds the context window"):
            list(gpt.chat.completions.create(model="m", messages=[large, *HELLO], stream=stream))
        with pytest.raises(anthropic.APIStatusError, match="prompt is too long"):
            message(claude, stream=stream, system=large["content"])
        for messages in ("x", [1], [{"role": "assistant", "tool_calls": [{}]}]):
            with pytest.raises(openai.BadRequestError, match="can't translate"):
                gpt.chat.completions.create(model="m", messages=HELLO, stream=stream, extra_body={"messages": messages})
    body = upstream.requests[0].body
    assert (body["max_output_tokens"], body["temperature"], body["store"]) == (50, 0.5, False)
    assert body["tools"] == [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]


def test_responses_in_front_of_anthropic(tmp_path: Path) -> None:
    upstream = StrictMessages(WINDOW, check="off")
    with entrance(upstream.app, tmp_path, provider="anthropic") as url, clients(url) as (_, gpt):
        assert len(list(responses_session(gpt, 16, "stateless", "claude-haiku-4-5"))) == 16
    assert upstream.faults == []
    assert upstream.chat.requests == []


def test_another_release_of_litellm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.200.0")
    with capture_logs() as logs, entrance(StandIn().app, tmp_path):
        pass
    assert [line["installed"] for line in logs if line["event"] == "litellm.untested"] == ["1.200.0"]
