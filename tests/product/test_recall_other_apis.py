"""A model reads archived messages on ``/v1/messages`` and ``/v1/responses`` through a hidden tool, by official SDKs."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.recall.tool import NAME
from proxy.server.loopback import serve
from tests.kit.agent_script import Received, Step
from tests.kit.front_door import ARCHIVE_ID
from tests.kit.front_door import talk as texts_of_talk
from tests.kit.held_end import HeldEnd
from tests.kit.scripted import PROFILE, client, proxied
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Reply, StandIn, ToolCall

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FACT = "The password of the staging vault is orchardplum."
ON = {"recall": {"tool": "auto"}, "prepare": None}
REFUSED = "refused"
"""A step with this text is a refusal of the upstream."""


class Upstream:
    """A strict stand-in of a model that checks its thinking, with a script of the next answers."""

    def __init__(self, api: str) -> None:
        kind: Any = {"messages": StrictMessages, "responses": StrictResponses}[api]
        self.strict: StrictMessages | StrictResponses = kind(1_000_000, script=lambda *_: self.steps.pop(0))
        self.steps: list[Step] = []
        self.provider = {"messages": "anthropic", "responses": "openai"}[api]
        self.app = self._refusing(self.strict.app)

    def _refusing(self, strict: ASGIApp) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            refuses = scope["type"] == "http" and bool(self.steps) and self.steps[0].text == REFUSED
            if refuses:
                self.steps.pop(0)
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
            await (JSONResponse(error, 400) if refuses else strict)(scope, receive, send)

        return app


@contextlib.contextmanager
def replicas(folder: Path, upstream: Upstream | ChatUpstream, *stores: str) -> Iterator[list[str]]:
    """The URLs of proxies. Those with the same name have the same store."""
    with serve(upstream.app) as url, contextlib.ExitStack() as stack:
        urls = []
        for name in stores:
            (folder / name).mkdir(exist_ok=True)
            main: dict[str, Any] = {"provider": upstream.provider, "base_url": f"{url}/v1", "api_key": "sk-upstream"}
            if isinstance(upstream, ChatUpstream):
                main["speaks"] = ["chat"]
            settings = {
                "upstreams": {"main": main},
                "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
                "policies": {"default": ON},
            }
            urls.append(stack.enter_context(proxied(settings, folder / name)))
        yield urls


class ChatUpstream:
    """An upstream that has chat completions only."""

    provider = "openai"

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.strict: Any = StandIn(window=1_000_000, responder=self._next)
        self.app = self.strict.app

    def _next(self, body: dict[str, Any]) -> Reply:
        made = self.steps.pop(0)
        return Reply(content=made.text, tool_calls=made.calls)


class Talk(ABC):
    """A conversation by an official client, streaming or not."""

    units: str
    """The field with the conversation."""
    tools: ClassVar[list[Any]]
    none: ClassVar[Any]

    def __init__(self, upstream: Upstream | ChatUpstream, url: str, seed: str, stream: bool) -> None:
        self.upstream, self.stream, self.url = upstream, stream, url
        self.key = f"sk-{seed}-{stream}"
        self.messages = [*texts_of_talk(7, 1_000, self.key), {"role": "user", "content": "What now?"}]
        text = self.messages[3]["content"]
        self.messages[3] = {"role": "assistant", "content": f"{text[:2_000]} {FACT} {text[2_000:]}"}
        self.headers: Any = {}

    def ask(self, *steps: Step, **fields: Any) -> list[dict[str, Any]]:
        """Return the bodies that the upstream got for one turn. The client's message joins the conversation."""
        before = len(self.upstream.strict.conversations)
        self.upstream.steps = list(steps)
        self.request({"tools": self.tools, **fields})
        assert self.upstream.steps == []
        self.received = self.upstream.strict.conversations[before:]
        return [received.body for received in self.received]

    @abstractmethod
    def request(self, fields: dict[str, Any]) -> None:
        """Send the conversation, and add the response to it."""

    @abstractmethod
    def say(self, text: str, *answered: str) -> None:
        """Add the results of calls, and a text of the user's."""

    @abstractmethod
    def open(self) -> contextlib.AbstractContextManager[None]:
        """Stream a response, and add it to the conversation at its last event. The stream stays open."""

    @property
    @abstractmethod
    def parts(self) -> list[Any]:
        """The blocks or items of the response."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The texts of the response."""

    @property
    @abstractmethod
    def calls(self) -> list[tuple[str, str]]:
        """The ids and names of the calls in the response."""

    @property
    @abstractmethod
    def prompt(self) -> int:
        """The reported tokens of the prompt."""

    @abstractmethod
    def results(self, body: dict[str, Any]) -> list[str]:
        """Return the results of calls in a request."""


class MessagesTalk(Talk):
    units = "messages"
    tools: ClassVar[list[Any]] = [{"name": name, "input_schema": SCHEMA} for name in ("read_file", "recall_earlier")]
    none: ClassVar[Any] = {"type": "none"}
    message: anthropic.types.Message

    def _options(self) -> Any:
        fixed = {"model": "claude-opus-5-5", "max_tokens": 500, "system": "Be brief.", "messages": self.messages}
        return {**fixed, "extra_body": {"thinking": {"type": "adaptive"}}}

    def _client(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=self.key, max_retries=0)

    def request(self, fields: dict[str, Any]) -> None:
        options = {**self._options(), **fields}
        with self._client() as caller:
            if self.stream:
                with caller.messages.stream(**options) as events:
                    self.message = events.get_final_message()
            else:
                raw = caller.messages.with_raw_response.create(**options)
                self.headers, self.message = raw.headers, raw.parse()
        self._add()
        assert self.message.stop_reason == ("tool_use" if self.calls else "end_turn")

    def _add(self) -> None:
        content = [block.model_dump(exclude_none=True) for block in self.message.content]
        self.messages.append({"role": "assistant", "content": content})

    def say(self, text: str, *answered: str) -> None:
        results = [{"type": "tool_result", "tool_use_id": id, "content": f"content of {id}"} for id in answered]
        blocks = [*results, {"type": "text", "text": text}] if text else results
        self.messages.append({"role": "user", "content": blocks})

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with self._client() as caller, caller.messages.stream(**self._options(), tools=self.tools) as events:
            next(event for event in events if event.type == "message_stop")
            self.message = events.current_message_snapshot
            self._add()
            yield

    @property
    def parts(self) -> list[Any]:
        return list(self.message.content)

    @property
    def text(self) -> str:
        return "|".join(block.text for block in self.message.content if block.type == "text")

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(block.id, block.name) for block in self.message.content if block.type == "tool_use"]

    @property
    def prompt(self) -> int:
        usage = self.message.usage
        return usage.input_tokens + (usage.cache_read_input_tokens or 0)

    def results(self, body: dict[str, Any]) -> list[str]:
        blocks = (block for message in body["messages"] if message["role"] == "user" for block in message["content"])
        return [block["content"] for block in blocks if isinstance(block, dict) and block["type"] == "tool_result"]


class ResponsesTalk(Talk):
    units = "input"
    tools: ClassVar[list[Any]] = [
        {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
        for name in ("read_file", "recall_earlier")
    ]
    none: ClassVar[Any] = "none"
    response: Any

    def _options(self) -> dict[str, Any]:
        fixed = {"model": "gpt-5", "instructions": "Be brief.", "input": [], "extra_body": {"input": self.messages}}
        return {**fixed, "store": False, "include": ["reasoning.encrypted_content"]}

    def request(self, fields: dict[str, Any]) -> None:
        options = {**self._options(), **fields}
        with client(self.url, self.key) as caller:
            if self.stream:
                with caller.responses.stream(**options) as events:
                    seen = list(events)
                    self.response = events.get_final_response()
                numbers = [event.sequence_number for event in seen]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                assert {event.response.id for event in seen if event.type == "response.created"} == {self.response.id}
            else:
                raw = caller.responses.with_raw_response.create(**options)
                self.headers, self.response = raw.headers, raw.parse()
        shown = [event.response for event in seen if hasattr(event, "response")] if self.stream else [self.response]
        for response in shown:
            assert [tool.name for tool in response.tools] == [tool["name"] for tool in options["tools"]]
            assert response.tool_choice == options.get("tool_choice", "auto")
        self._add()

    def _add(self) -> None:
        for item in self.response.output:
            fields = item.model_dump(mode="json", exclude_unset=True)
            fields.pop("parsed_arguments", None)
            for content in fields.get("content") or ():
                content.pop("parsed", None)
            self.messages.append(fields)

    def say(self, text: str, *answered: str) -> None:
        self.messages += [
            {"type": "function_call_output", "call_id": id, "output": f"content of {id}"} for id in answered
        ]
        self.messages += [{"role": "user", "content": text}] if text else []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        options = {**self._options(), "tools": self.tools, "stream": True}
        with client(self.url, self.key) as caller, caller.responses.create(**options) as events:
            self.response = next(event for event in events if event.type == "response.completed").response
            self._add()
            yield

    @property
    def parts(self) -> list[Any]:
        return list(self.response.output)

    @property
    def text(self) -> str:
        return "|".join(part.text for item in self.response.output if item.type == "message" for part in item.content)

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(item.call_id, item.name) for item in self.response.output if item.type == "function_call"]

    @property
    def prompt(self) -> int:
        return int(self.response.usage.input_tokens)

    def results(self, body: dict[str, Any]) -> list[str]:
        return [item["output"] for item in body["input"] if item.get("type") == "function_call_output"]


TALKS: dict[str, Any] = {"messages": MessagesTalk, "responses": ResponsesTalk}


@pytest.fixture(scope="module", params=TALKS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def upstream(api: str) -> Upstream:
    return Upstream(api)


@pytest.fixture(scope="module")
def url(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with replicas(tmp_path_factory.mktemp("recall"), upstream, "store") as [url]:
        yield url
    assert upstream.strict.faults == []


def ours(call: str = "r1", **arguments: Any) -> ToolCall:
    return ToolCall(call, NAME, json.dumps({"query": None, "id": None, "offset": None, **arguments}))


def theirs(id: str = "c1", name: str = "read_file") -> ToolCall:
    return ToolCall(id, name, '{"path": "a.py"}')


def says(text: str = "", *calls: ToolCall, thinking: str = "Hm.") -> Step:
    return Step(text=text, calls=calls, thinking=thinking)


def names(body: dict[str, Any]) -> list[str]:
    return [tool["name"] for tool in body["tools"]]


def continues(talk: Talk, after: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a request's conversation begins with all of the one before."""
    return bool(after[talk.units][: len(before[talk.units])] == before[talk.units])


def total(received: Sequence[Received]) -> int:
    return sum(one.tokens for one in received)


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_a_search_finds_a_fact_that_compaction_removed(upstream: Upstream, url: str, api: str, stream: bool) -> None:
    talk = TALKS[api](upstream, url, "search", stream)
    first, second = talk.ask(says("Let me look.", ours(query="password of the vault")), says("It is orchardplum."))
    assert names(first) == ["read_file", "recall_earlier", NAME]
    assert "orchardplum" not in json.dumps(first[talk.units])
    (found,) = talk.results(second)
    assert "orchardplum" in found
    assert continues(talk, second, first)
    assert talk.text == "Let me look.|It is orchardplum."
    assert talk.calls == []
    assert len(talk.parts) == 4, "thinking and text of both rounds"
    assert talk.prompt == total(talk.received)
    if not stream:
        assert talk.headers["x-compaction-recall"] == "1"


@both
def test_tools_in_an_item_are_tools_too(tmp_path: Path, stream: bool) -> None:
    """Codex sends its tools this way."""
    upstream = Upstream("responses")
    nested = {"type": "namespace", "name": "functions", "description": "", "tools": ResponsesTalk.tools}
    item = {"type": "additional_tools", "role": "developer", "tools": [nested]}
    with replicas(tmp_path, upstream, "store") as [url]:
        talk = ResponsesTalk(upstream, url, "items", stream)
        talk.messages.insert(0, item)
        first, second = talk.ask(says("A", ours(query="password of the vault")), says("B", theirs()), tools=[])
        assert first["tools"] == []
        assert first["input"][0] == item
        assert [tool["name"] for tool in first["input"][1]["tools"]] == [NAME]
        assert "orchardplum" in talk.results(second)[0]
        assert continues(talk, second, first)
        assert (talk.text, talk.calls) == ("A|B", [("c1", "read_file")])
        talk.say("", "c1")
        third, plain = talk.ask(says("", ours("r2", query="vault")), says(REFUSED), says("Done."), tools=[])
        assert continues(talk, third, second)
        assert plain["input"][0] == item
        assert NAME not in json.dumps(plain["input"][:3])
    assert upstream.strict.faults == []


@both
def test_reading_by_id_pages_through_an_entry(upstream: Upstream, url: str, api: str, stream: bool) -> None:
    talk = TALKS[api](upstream, url, "read", stream)
    (body,) = talk.ask(says("Fine."))
    id = ARCHIVE_ID.findall(json.dumps(body[talk.units][:2]))[0]
    talk.say("And now?")
    _, second, third = talk.ask(
        says("", ours(id=id)), says("", ours("r2", id=id, offset=5_000)), says("Read.", thinking="")
    )
    assert "Characters 0 to" in talk.results(second)[0]
    assert FACT in talk.results(third)[1]
    assert talk.text == "Read."


@both
def test_the_next_turns_have_the_hidden_rounds_again(upstream: Upstream, url: str, api: str, stream: bool) -> None:
    """The thinking after a hidden round is bound to it, and stays valid."""
    talk = TALKS[api](upstream, url, "again", stream)
    _, second = talk.ask(says("A", ours(query="vault"), ours("r2", query="x")), says("B", theirs()))
    talk.say("", "c1")
    (third,) = talk.ask(says("Done.", thinking=""))
    assert continues(talk, third, second)
    assert "r2" not in json.dumps(third[talk.units][len(second[talk.units]) :])
    talk.say("Thanks. What else?")
    (fourth,) = talk.ask(says("Nothing."))
    assert continues(talk, fourth, third)
    assert len(talk.received[0].reasoning) == 2
    assert talk.received[0].dropped == []


@both
@pytest.mark.parametrize("order", ["first", "last"])
def test_a_mixed_round_gives_the_client_its_own_calls(
    upstream: Upstream, url: str, api: str, stream: bool, order: str
) -> None:
    talk = TALKS[api](upstream, url, f"mixed{order}", stream)
    calls = [theirs("c1"), theirs("c2", "recall_earlier")]
    calls.insert(0 if order == "first" else 2, ours(query="vault password"))
    (asked,) = talk.ask(says("Both.", *calls))
    assert talk.calls == [("c1", "read_file"), ("c2", "recall_earlier")]
    talk.say("Go on.", "c1", "c2")
    (body,) = talk.ask(says("Done."))
    added = body[talk.units][len(asked[talk.units]) :]
    written = json.dumps(added)
    assert sorted(calls, key=lambda call: written.index(f'"{call.id}"')) == calls
    assert len(talk.results(body)) == 3
    assert any("orchardplum" in text for text in talk.results(body))
    assert len(added) == {"messages": 2, "responses": 1 + 1 + 3 + 3 + 1}[api]


@both
def test_a_refused_continuation_falls_back(upstream: Upstream, url: str, api: str, stream: bool) -> None:
    talk = TALKS[api](upstream, url, "refused", stream)
    first, plain = talk.ask(says("", ours(query="vault")), says(REFUSED), says("Without."))
    assert NAME in names(first)
    assert names(plain) == ["read_file", "recall_earlier"]
    assert talk.text == "Without."


@both
def test_another_replica_puts_the_hidden_round_back(tmp_path: Path, api: str, stream: bool) -> None:
    upstream = Upstream(api)
    with replicas(tmp_path, upstream, "store", "store") as [one, two]:
        talk = TALKS[api](upstream, one, "replica", stream)
        _, second = talk.ask(says("A", ours(query="vault")), says("B", theirs(), ours("r2", query="staging")))
        talk.say("", "c1")
        talk.url = two
        (third,) = talk.ask(says("C"))
        assert continues(talk, third, second)
        talk.say("And now?")
        (fourth,) = talk.ask(says("D"))
        assert continues(talk, fourth, third)
    assert upstream.strict.faults == []


@both
@pytest.mark.parametrize("text", ["", "A"])
def test_a_request_is_valid_without_its_hidden_rounds(tmp_path: Path, api: str, stream: bool, text: str) -> None:
    """Thinking that is bound to a lost round is refused or dropped. The proxy sends a refused request without it."""
    upstream = Upstream(api)
    with replicas(tmp_path, upstream, "one", "two") as [one, two]:
        talk = TALKS[api](upstream, one, "lost", stream)
        talk.ask(says(text, ours(query="vault")), says("B", ours("r2", query="staging"), theirs()))
        talk.say("", "c1")
        talk.url = two
        *_, body = talk.ask(says("C"))
        assert NAME not in json.dumps(body[talk.units])
        assert talk.received[-1].status == 200
        assert len(upstream.strict.faults) <= 1


@both
def test_an_upstream_of_another_api_gets_the_tool_too(tmp_path: Path, api: str, stream: bool) -> None:
    upstream = ChatUpstream()
    with replicas(tmp_path, upstream, "store") as [url]:
        talk = TALKS[api](upstream, url, "translated", stream)
        first, second = talk.ask(says("Look", ours(query="password of the vault")), says("Found", theirs()))
        assert [tool["function"]["name"] for tool in first["tools"]] == ["read_file", "recall_earlier", NAME]
        assert "orchardplum" in second["messages"][-1]["content"]
        assert (talk.text, talk.calls) == ("Look|Found", [("c1", "read_file")])
        assert talk.prompt == total(talk.received)
        talk.say("", "c1")
        (third,) = talk.ask(says("Done."))
        assert third["messages"][: len(second["messages"])] == second["messages"]
        assert [message["role"] for message in third["messages"][len(second["messages"]) :]] == ["assistant", "tool"]


def test_a_client_may_ask_again_before_its_stream_ends(tmp_path: Path, api: str) -> None:
    """Some clients, such as codex, continue at the event that ends the response."""
    upstream, end = Upstream(api), HeldEnd('"c0"')
    upstream.app = end.before(upstream.app)
    with replicas(tmp_path, upstream, "store") as [url]:
        for first in ([ours(query="vault")], [theirs("c0"), ours(query="vault")]):
            talk = TALKS[api](upstream, url, f"open{len(first)}", True)
            upstream.steps = [says("A" if len(first) == 1 else "END", *first)]
            upstream.steps += [says("END", theirs("c0"))] if len(first) == 1 else []
            with talk.open():
                sent = upstream.strict.conversations[-1].body
                talk.say("", "c0")
                (body,) = talk.ask(says("Done."))
                end.release()
            assert continues(talk, body, sent)
            assert NAME in json.dumps(body[talk.units])
            assert talk.text == "Done."
    assert not end.late
    assert upstream.strict.faults == []
