"""A model reads archived messages on ``/v1/messages`` through a tool that the client never sees."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.demo.replies import ToolCall
from proxy.demo.serving import serve
from proxy.recall.tool import NAME
from tests.kit.agent_script import Received, Step
from tests.kit.front_door import ARCHIVE_ID, talk
from tests.kit.scripted import PROFILE, proxied
from tests.kit.strict_messages import StrictMessages

MODEL = "claude-opus-5-5"
TOOLS: list[Any] = [
    {"name": name, "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
    for name in ("read_file", "recall_earlier")
]
FACT = "The password of the staging vault is orchardplum."
ON = {"recall": {"tool": "auto"}, "prepare": None}
REFUSED = "refused"
"""A step with this text is a refusal of the upstream."""


class Upstream(StrictMessages):
    """The strict stand-in of a model that checks its thinking, with a script of the next answers."""

    def __init__(self) -> None:
        super().__init__(1_000_000, script=self._next)
        self.steps: list[Step] = []
        self.refusing = self._refusing(self.app)

    def _next(self, text: str | None, call: str | None) -> Step:
        return self.steps.pop(0)

    def _refusing(self, strict: ASGIApp) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            refuses = scope["type"] == "http" and bool(self.steps) and self.steps[0].text == REFUSED
            if refuses:
                self.steps.pop(0)
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
            await (JSONResponse(error, 400) if refuses else strict)(scope, receive, send)

        return app


@contextlib.contextmanager
def replicas(folder: Path, upstream: Upstream, *stores: str) -> Iterator[list[str]]:
    """The URLs of proxies. Those with the same name have the same store."""
    with serve(upstream.refusing) as url, contextlib.ExitStack() as stack:
        urls = []
        for name in stores:
            (folder / name).mkdir(exist_ok=True)
            settings = {
                "upstreams": {"main": {"provider": "anthropic", "base_url": f"{url}/v1", "api_key": "sk-upstream"}},
                "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
                "policies": {"default": ON},
            }
            urls.append(stack.enter_context(proxied(settings, folder / name)))
        yield urls


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(scope="module")
def url(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with replicas(tmp_path_factory.mktemp("recall"), upstream, "store") as [url]:
        yield url
    assert upstream.faults == []


class Talk:
    """A conversation by the official client, streaming or not."""

    def __init__(self, upstream: Upstream, url: str, seed: str, stream: bool) -> None:
        self.upstream, self.stream = upstream, stream
        self.key = f"sk-{seed}-{stream}"
        self.messages = [*talk(7, 1_000, self.key), {"role": "user", "content": "What now?"}]
        text = self.messages[3]["content"]
        self.messages[3] = {"role": "assistant", "content": f"{text[:2_000]} {FACT} {text[2_000:]}"}
        self.move(url)

    def move(self, url: str) -> None:
        """Send further turns to this replica."""
        self.url = url

    def client(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=self.key, max_retries=0)

    def ask(self, *steps: Step, tools: Sequence[Any] = TOOLS, **fields: Any) -> list[dict[str, Any]]:
        """Return the bodies that the upstream got for one turn. The client's message joins the conversation."""
        before = len(self.upstream.conversations)
        self.upstream.steps = list(steps)
        options: Any = {
            "model": MODEL, "max_tokens": 500, "system": "Be brief.", "messages": self.messages, "tools": tools,
            "extra_body": {"thinking": {"type": "adaptive"}}, **fields,
        }  # fmt: skip
        with self.client() as client:
            if self.stream:
                with client.messages.stream(**options) as events:
                    self.message = events.get_final_message()
            else:
                raw = client.messages.with_raw_response.create(**options)
                self.headers, self.message = raw.headers, raw.parse()
        content = [block.model_dump(exclude_none=True) for block in self.message.content]
        self.messages.append({"role": "assistant", "content": content})
        assert self.upstream.steps == []
        self.received = self.upstream.conversations[before:]
        return [received.body for received in self.received]

    @property
    def text(self) -> str:
        return "|".join(block.text for block in self.message.content if block.type == "text")

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(block.id, block.name) for block in self.message.content if block.type == "tool_use"]

    def say(self, text: str, *answered: str) -> None:
        results = [{"type": "tool_result", "tool_use_id": id, "content": f"content of {id}"} for id in answered]
        blocks = [*results, {"type": "text", "text": text}] if text else results
        self.messages.append({"role": "user", "content": blocks})


def ours(call: str = "r1", **arguments: Any) -> ToolCall:
    return ToolCall(call, NAME, json.dumps({"query": None, "id": None, "offset": None, **arguments}))


def theirs(id: str = "c1", name: str = "read_file") -> ToolCall:
    return ToolCall(id, name, '{"path": "a.py"}')


def says(text: str = "", *calls: ToolCall, thinking: str = "Hm.") -> Step:
    return Step(text=text, calls=calls, thinking=thinking)


def names(body: dict[str, Any]) -> list[str]:
    return [tool["name"] for tool in body["tools"]]


def results(body: dict[str, Any]) -> list[str]:
    blocks = (block for message in body["messages"] if message["role"] == "user" for block in message["content"])
    return [block["content"] for block in blocks if isinstance(block, dict) and block["type"] == "tool_result"]


def total(received: Sequence[Received]) -> int:
    return sum(one.tokens for one in received)


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_a_search_finds_a_fact_that_compaction_removed(upstream: Upstream, url: str, stream: bool) -> None:
    talk = Talk(upstream, url, "search", stream)
    first, second = talk.ask(says("Let me look.", ours(query="password of the vault")), says("It is orchardplum."))
    assert names(first) == ["read_file", "recall_earlier", NAME]
    assert "orchardplum" not in json.dumps(first["messages"])
    (found,) = results(second)
    assert "orchardplum" in found
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert talk.text == "Let me look.|It is orchardplum."
    assert talk.calls == []
    assert [block.type for block in talk.message.content] == ["thinking", "text"] * 2
    assert talk.message.stop_reason == "end_turn"
    usage = talk.message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == total(talk.received)
    if not stream:
        assert talk.headers["x-compaction-recall"] == "1"


@both
def test_reading_by_id_pages_through_an_entry(upstream: Upstream, url: str, stream: bool) -> None:
    talk = Talk(upstream, url, "read", stream)
    (body,) = talk.ask(says("Fine."))
    id = ARCHIVE_ID.findall(json.dumps(body["messages"][:2]))[0]
    talk.say("And now?")
    _, second, third = talk.ask(
        says("", ours(id=id)), says("", ours("r2", id=id, offset=5_000)), says("Read.", thinking="")
    )
    assert "Characters 0 to" in results(second)[0]
    assert FACT in results(third)[1]
    assert talk.text == "Read."


@both
def test_the_next_turns_have_the_hidden_rounds_again(upstream: Upstream, url: str, stream: bool) -> None:
    """The thinking after a hidden round is bound to it, and stays valid."""
    talk = Talk(upstream, url, "again", stream)
    _, second = talk.ask(says("A", ours(query="vault"), ours("r2", query="x")), says("B", theirs()))
    talk.say("", "c1")
    (third,) = talk.ask(says("Done.", thinking=""))
    assert third["messages"][: len(second["messages"])] == second["messages"]
    last = third["messages"][len(second["messages"]) :]
    assert [message["role"] for message in last] == ["assistant", "user"]
    assert [block["type"] for block in last[0]["content"]] == ["thinking", "text", "tool_use"]
    talk.say("Thanks. What else?")
    (fourth,) = talk.ask(says("Nothing."))
    assert fourth["messages"][: len(third["messages"])] == third["messages"]
    assert len(talk.received[0].reasoning) == 2
    assert talk.received[0].dropped == []


@both
@pytest.mark.parametrize("order", ["first", "last"])
def test_a_mixed_round_gives_the_client_its_own_calls(upstream: Upstream, url: str, stream: bool, order: str) -> None:
    talk = Talk(upstream, url, f"mixed{order}", stream)
    calls = [theirs("c1"), theirs("c2", "recall_earlier")]
    calls.insert(0 if order == "first" else 2, ours(query="vault password"))
    talk.ask(says("Both.", *calls))
    assert talk.calls == [("c1", "read_file"), ("c2", "recall_earlier")]
    assert talk.message.stop_reason == "tool_use"
    talk.say("Go on.", "c1", "c2")
    (body,) = talk.ask(says("Done."))
    *_, said, answered = body["messages"]
    assert [block["id"] for block in said["content"] if block["type"] == "tool_use"] == [call.id for call in calls]
    kinds = [block["type"] for block in answered["content"]]
    assert kinds == ["tool_result"] * 3 + ["text"]
    assert any("orchardplum" in text for text in results(body))


@both
def test_the_number_of_rounds_is_limited(upstream: Upstream, url: str, stream: bool) -> None:
    talk = Talk(upstream, url, "limit", stream)
    again = [says("", ours(f"r{number}", query="vault")) for number in range(4)]
    *_, before, last = talk.ask(*again, says("Enough."))
    assert "Answer with what you have" in results(before)[-1]
    assert last["tool_choice"] == {"type": "none"}
    assert "tool_choice" not in before
    assert talk.text == "Enough."


@both
def test_a_refused_continuation_falls_back(upstream: Upstream, url: str, stream: bool) -> None:
    talk = Talk(upstream, url, "refused", stream)
    first, plain = talk.ask(says("", ours(query="vault")), says(REFUSED), says("Without."))
    assert NAME in names(first)
    assert names(plain) == ["read_file", "recall_earlier"]
    assert talk.text == "Without."


@both
def test_an_unknown_id_and_bad_arguments_are_answered(upstream: Upstream, url: str, stream: bool) -> None:
    talk = Talk(upstream, url, "unknown", stream)
    _, second = talk.ask(says("", ours(id="0" * 20), ToolCall("r2", NAME, '{"x": 1}')), says("Oh."))
    assert "no entry" in results(second)[0]
    assert "query" in results(second)[1]
    assert len(second["messages"][-1]["content"]) == 2, "the results are in one message"


def test_nothing_is_added_without_the_conditions(upstream: Upstream, url: str) -> None:
    short = Talk(upstream, url, "short", False)
    short.messages = short.messages[-3:]
    assert names(short.ask(says("x"))[0]) == ["read_file", "recall_earlier"]
    same: list[Any] = [*TOOLS, {"name": NAME, "input_schema": {"type": "object", "properties": {}}}]
    for fields in ({"tool_choice": {"type": "none"}}, {"tools": same}):
        options: dict[str, Any] = {"tools": TOOLS, **fields}
        (body,) = Talk(upstream, url, f"conditions{sorted(fields)}", False).ask(says("x"), **options)
        assert body["tools"] == options["tools"]


@both
def test_another_replica_puts_the_hidden_round_back(tmp_path: Path, stream: bool) -> None:
    upstream = Upstream()
    with replicas(tmp_path, upstream, "store", "store") as [one, two]:
        talk = Talk(upstream, one, "replica", stream)
        _, second = talk.ask(says("A", ours(query="vault")), says("B", theirs(), ours("r2", query="staging")))
        talk.say("", "c1")
        talk.move(two)
        (third,) = talk.ask(says("C"))
        assert third["messages"][: len(second["messages"])] == second["messages"]
        talk.say("And now?")
        (fourth,) = talk.ask(says("D"))
        assert fourth["messages"][: len(third["messages"])] == third["messages"]
    assert upstream.faults == []


@both
def test_a_request_is_valid_without_its_hidden_rounds(tmp_path: Path, stream: bool) -> None:
    """Thinking that is bound to a lost round is refused, and the proxy sends the request again without it."""
    upstream = Upstream()
    with replicas(tmp_path, upstream, "one", "two") as [one, two]:
        talk = Talk(upstream, one, "lost", stream)
        talk.ask(says("A", ours(query="vault")), says("B", ours("r2", query="staging"), theirs()))
        talk.say("", "c1")
        talk.move(two)
        *_, body = talk.ask(says("C"))
        assert NAME not in json.dumps(body["messages"])
        assert len(upstream.faults) == 1
        assert "Invalid `signature` in `thinking` block" in upstream.faults[0]
        assert talk.received[-1].status == 200


def test_texts_and_blocks_keep_their_borders(upstream: Upstream, url: str) -> None:
    """The client gets the deltas of a response without the tool, in blocks of ascending numbers."""
    text = "One two three four five six seven eight nine ten."
    talk = Talk(upstream, url, "deltas", True)
    deltas: list[list[str]] = [[], []]
    indices: list[list[int]] = [[], []]
    for number, steps in enumerate(([says(text)], [says(text, ours(query="vault")), says(text)])):
        upstream.steps = list(steps)
        options: Any = {
            "model": MODEL,
            "max_tokens": 500,
            "messages": talk.messages,
            "tools": TOOLS,
            "system": "Be brief.",
        }
        with talk.client() as client, client.messages.stream(**options) as events:
            for event in events:
                if event.type == "content_block_start":
                    indices[number].append(event.index)
                if event.type == "text":
                    deltas[number].append(event.text)
    assert deltas[1] == deltas[0] * 2
    assert indices == [[0], [0, 1]]
