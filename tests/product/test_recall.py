"""A model reads archived messages through a tool that the client never sees, through the official SDK."""

import asyncio
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.recall import tool
from proxy.recall.search import Index, Passage
from proxy.recall.tool import NAME
from tests.kit.front_door import WINDOW, Front, archive_id, front, key, long_talk
from tests.kit.held_end import HeldEnd
from tests.kit.messages import assistant, words
from tests.kit.upstream import Reply, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
    for name in ("read_file", "recall_earlier")
]
FACT = "The password of the staging vault is orchardplum."
ON = {"recall": {"tool": "auto"}}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(
        {"default": ON, "off": {}, **{f"{most}": {"recall": {"tool": "auto", "max_rounds": most}} for most in (1, 10)}},
        folder(tmp_path_factory),
    ) as door:
        yield door


def folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("recall")


def ours(call: str = "r1", **arguments: Any) -> ToolCall:
    return ToolCall(call, NAME, json.dumps({"query": None, "id": None, "offset": None, **arguments}))


def theirs(id: str = "c1", name: str = "read_file") -> ToolCall:
    return ToolCall(id, name, '{"path": "a.py"}')


def script(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    waiting = list(replies)
    return lambda body: waiting.pop(0)


def conversation(seed: str) -> list[Any]:
    messages = long_talk(seed)
    text = messages[4]["content"]
    messages[4] = assistant(f"{text[:2_000]} {FACT} {text[2_000:]}")
    return messages


class Talk:
    """A conversation by the official client, streaming or not."""

    def __init__(self, door: Front, seed: str, stream: bool, policy: str = "default", caller: int = 0) -> None:
        self.door, self.stream = door, stream
        self.messages = conversation(f"{seed}{stream}")
        self.client = openai.OpenAI(base_url=f"{door.url}/v1", api_key=key(policy, caller), max_retries=0)
        self.key = key(policy, caller)
        self.usage: Any = None
        self.reason: str | None = None
        self.headers: Any = {}

    def ask(self, *replies: Reply, tools: Sequence[Any] = TOOLS, **fields: Any) -> list[dict[str, Any]]:
        """Return the bodies that the upstream got for one turn. The client's message joins the conversation."""
        before = len(self.door.upstream.conversations)
        with self.door.scripted(responder=script(*replies)):
            options = {"model": "m", "messages": self.messages, "tools": list(tools), **fields}
            if self.stream:
                with self.client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
                    answer = events.get_final_completion()
            else:
                raw = self.client.chat.completions.with_raw_response.create(**options)
                self.headers, answer = raw.headers, raw.parse()
        message = answer.choices[0].message
        self.reason, self.usage = answer.choices[0].finish_reason, answer.usage
        self.message = message
        known: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            known["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in message.tool_calls
            ]
        self.messages.append(known)
        return [request.body for request in self.door.upstream.conversations[before:]]

    def answer(self, *ids: str) -> None:
        for id in ids:
            self.messages.append({"role": "tool", "tool_call_id": id, "content": f"content of {id}"})

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


def names(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body.get("tools", [])]


def results(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


both = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.parametrize(("query", "finds"), [("{} " + "." * 60_000 + "x", True), ("." * 2_000 + " {}", False)])
def test_a_long_query_counts_with_its_beginning(door: Front, query: str, finds: bool) -> None:
    talk = Talk(door, f"long {finds}", stream=False)
    reply = Reply(content=None, tool_calls=(ours(query=query.format("staging vault's orchardplum?!")),))
    (result,) = results(talk.ask(reply, Reply(content="Yes."))[1])
    assert ("orchardplum" in result) == finds


@both
def test_a_search_finds_a_fact_that_compaction_removed(door: Front, stream: bool) -> None:
    talk = Talk(door, "search", stream)
    first, second = talk.ask(
        Reply(content="Let me look.", tool_calls=(ours(query="password of the staging vault"),)),
        Reply(content="It is orchardplum."),
        extra_headers={"idempotency-key": "once"},
    )
    keys = [request.headers.get("idempotency-key") for request in door.upstream.conversations[-2:]]
    assert keys == ["once", None], "a server may answer a repeated key with its first response"
    assert names(first) == ["read_file", "recall_earlier", NAME]
    assert "orchardplum" not in json.dumps(first["messages"])
    (found,) = results(second)
    assert "orchardplum" in found
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert talk.message.content in ("Let me look.\n\nIt is orchardplum.", "Let me look.It is orchardplum.")
    assert talk.message.tool_calls is None
    assert talk.reason == "stop"
    assert talk.usage.prompt_tokens == sum(request.tokens for request in door.upstream.conversations[-2:])
    if not stream:
        assert talk.headers["x-compaction-recall"] == "1"


@both
@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tool_choice": "required"}, {"tools": []}])
def test_a_request_without_the_tool_has_its_hidden_rounds(door: Front, stream: bool, fields: dict[str, Any]) -> None:
    talk = Talk(door, f"choice{fields}", stream)
    _, second = talk.ask(Reply(tool_calls=(ours(query="vault"),)), Reply(tool_calls=(theirs(),)))
    talk.answer("c1")
    (third,) = talk.ask(Reply(content="Done."), **fields)
    assert NAME not in names(third)
    assert third["messages"][: len(second["messages"])] == second["messages"]
    talk.say("Next?")
    (fourth,) = talk.ask(Reply(content="Fine."))
    assert NAME in names(fourth)
    assert fourth["messages"][: len(third["messages"])] == third["messages"]


def test_conversations_with_the_same_beginning_keep_their_own_rounds(door: Front) -> None:
    talks = [Talk(door, "fork", False) for _ in range(3)]
    seconds = []
    for number, talk in enumerate(talks):
        talk.say(f"Question {number % 2}?")
        seconds.append(talk.ask(Reply(tool_calls=(ours(query=f"vault{number}"),)), Reply(content=f"A{number}"))[1])
    for talk, second in zip(talks, seconds, strict=True):
        talk.say("Next?")
        (third,) = talk.ask(Reply(content="Fine."))
        assert third["messages"][: len(second["messages"])] == second["messages"]


@both
def test_a_call_after_the_last_round_ends_the_response(door: Front, stream: bool) -> None:
    talk = Talk(door, "more", stream, "1")
    again = Reply(tool_calls=(ours(query="vault"),))
    bodies = talk.ask(
        again, again, Reply(content="Once more.", tool_calls=(ours(query="vault"),)), Reply(content="No.")
    )
    assert len(bodies) == 3
    assert (talk.message.content, talk.message.tool_calls, talk.reason) == ("Once more.", None, "stop")


RATE = Reply(status=429, error={"error": {"message": "Slow down."}}, headers={"retry-after": "1"})
FAILURES = {
    "rate limit": RATE,
    "page": Reply(error="<html>hi</html>", headers={"content-type": "text/html"}),
    "error": Reply(error={"error": {"message": "no", "type": "server_error"}}),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("text", [None, "Let me look."])
@both
def test_a_hidden_round_fails(door: Front, stream: bool, text: str | None, failure: str) -> None:
    """The client gets a response without the tool, unless it has a part of this one."""
    talk = Talk(door, f"fails{text}{failure}", stream)
    call, failing = Reply(content=text, tool_calls=(ours(query="vault"),)), FAILURES[failure]
    replies = [call, failing, *([failing] if text else [])]
    if stream and text:
        with pytest.raises(openai.APIError, match="did not continue"):
            talk.ask(*replies)
        return
    *_, plain = talk.ask(*replies, Reply(content="Final."))
    assert NAME not in names(plain)
    assert (talk.message.content, talk.reason) == ("Final.", "stop")


@both
def test_all_rounds_fit(door: Front, stream: bool) -> None:
    """The texts of the rounds count, too."""
    talk = Talk(door, "room", stream, "10")
    (first,) = talk.ask(Reply(content="Fine."))
    talk.say("Read it all.")
    id, said = archive_id(json.dumps(first)), words(700, "said")
    reads = [Reply(content=said, tool_calls=(ours(f"r{n}", id=id, offset=2_500 * n),)) for n in range(5)]
    bodies = talk.ask(*reads, Reply(content="Done."), max_tokens=1_000)
    sizes = [request.tokens for request in door.upstream.conversations[-len(bodies) :]]
    assert max(sizes) + 1_000 <= WINDOW
    assert ["no room" in text for text in results(bodies[-1])[-5:]] == [False] * 3 + [True, False]
    assert ["tool_choice" in body for body in bodies] == [False] * 5 + [True]
    assert "orchardplum" in "".join(results(bodies[-1]))
    assert talk.message.content.endswith("Done.")


@both
def test_after_a_text_a_refusal_gets_shorter_results(door: Front, stream: bool) -> None:
    refusal = Reply(status=400, error={"error": {"message": "no", "type": "invalid_request_error"}})
    talk = Talk(door, "refused with text", stream)
    (first,) = talk.ask(Reply(content="Fine."))
    talk.say("Read it all.")
    read = Reply(content="A", tool_calls=(ours(id=archive_id(json.dumps(first))),))
    _, long, short = talk.ask(read, refusal, Reply(content="B"))
    assert len(results(short)[-1]) < 0.6 * len(results(long)[-1])
    assert (talk.message.content or "").split() == (["AB"] if stream else ["A", "B"])
    talk.say("And again.")
    if not stream:
        *_, plain = talk.ask(read, refusal, refusal, Reply(content="Plain."))
        assert (talk.message.content, NAME in names(plain)) == ("Plain.", False)
        return
    with pytest.raises(openai.APIError, match="did not continue"):
        talk.ask(read, refusal, refusal)


@both
def test_a_response_has_one_index_and_few_results(door: Front, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class Counted(Index):
        def __init__(self, passages: Sequence[Passage]) -> None:
            built.append(len(passages))
            super().__init__(passages)

    monkeypatch.setattr(tool, "Index", Counted)
    talk = Talk(door, "many calls", stream)
    many = Reply(tool_calls=tuple(ours(f"r{number}", query=f"vault {number}") for number in range(20)))
    *_, last = talk.ask(many, Reply(tool_calls=(ours(query="more"),)), Reply(content="Fine."), max_tokens=100)
    assert [text.startswith("Only the first 8") for text in results(last)] == [False] * 8 + [True] * 12 + [False]
    assert len(built) == 1


def test_nothing_is_added_before_the_first_checkpoint_or_without_the_conditions(door: Front) -> None:
    short = Talk(door, "short", False)
    short.messages = short.messages[-3:]
    assert names(short.ask(Reply(content="x"))[0]) == ["read_file", "recall_earlier"]
    for fields in ({"tool_choice": "required"}, {"n": 2}, {"tools": [*TOOLS, _named(NAME)]}):
        talk = Talk(door, f"conditions{sorted(fields)}", False)
        options = {"tools": TOOLS, **fields}
        (body,) = talk.ask(Reply(content="x"), **options)
        assert body["tools"] == options["tools"]
    assert names(Talk(door, "off", False, "off").ask(Reply(content="x"))[0]) == ["read_file", "recall_earlier"]


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@both
def test_an_upstream_that_refuses_the_tool_gets_none(tmp_path: Path, stream: bool) -> None:
    refusal = Reply(status=400, error={"error": {"message": "tools: too many", "type": "invalid_request_error"}})
    with front({"default": ON}, tmp_path) as other:
        talk = Talk(other, "never", stream)
        first, second = talk.ask(refusal, Reply(content="Fine."))
        assert NAME in names(first)
        assert NAME not in names(second)
        talk.say("Next?")
        assert NAME not in names(talk.ask(Reply(content="Fine."))[0])
        assert NAME in names(Talk(other, "never", stream, caller=1).ask(Reply(content="Fine."))[0])


@both
def test_a_refusal_of_hidden_rounds_takes_them_out(tmp_path: Path, stream: bool) -> None:
    refusal = Reply(status=400, error={"error": {"message": "no such call", "type": "invalid_request_error"}})
    with front({"default": ON}, tmp_path) as other:
        talk = Talk(other, "refused rounds", stream)
        talk.ask(Reply(tool_calls=(ours(query="vault"),)), Reply(content="Fine."))
        talk.say("Next?")
        with pytest.raises(openai.BadRequestError, match="no such call"):
            talk.ask(refusal, refusal)
        (body,) = talk.ask(Reply(content="Fine."))
        assert NAME not in json.dumps(body)


def compressing(app: ASGIApp) -> ASGIApp:
    """Compress all responses of an upstream, although nobody asked for it."""

    async def compressed(scope: Scope, receive: Receive, send: Send) -> None:
        packer = zlib.compressobj(wbits=31)

        async def packed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"content-length"]
                message = {**message, "headers": [*headers, (b"content-encoding", b"gzip")]}
            else:
                body = packer.compress(message.get("body", b""))
                end = zlib.Z_SYNC_FLUSH if message.get("more_body") else zlib.Z_FINISH
                message = {**message, "body": body + packer.flush(end)}
            await send(message)

        await app(scope, receive, packed if scope["type"] == "http" else send)

    return compressed


@both
def test_no_tool_is_in_a_response_that_cannot_be_read(tmp_path: Path, stream: bool) -> None:
    with front({"default": ON}, tmp_path, around=compressing) as other:
        talk = Talk(other, "compressed", stream)
        first, second = talk.ask(Reply(tool_calls=(ours(query="vault"),)), Reply(content="Fine."))
        assert (NAME in names(first), NAME in names(second)) == (True, False)
        assert (talk.message.content, talk.message.tool_calls) == ("Fine.", None)
        talk.say("Next?")
        assert NAME not in names(talk.ask(Reply(content="Fine."))[0])


class Lockstep:
    """Chat completions that send an event only after the client has the text of the one before.

    ``held`` are the texts that didn't reach the client before the next event was due.
    """

    def __init__(self) -> None:
        self.rounds: list[Sequence[dict[str, Any]]] = []
        self.held: list[str] = []
        self._seen = threading.Semaphore(0)

    def seen(self) -> None:
        """Send the next event: the client has a text."""
        self._seen.release()

    def before(self, other: ASGIApp) -> ASGIApp:
        """Answer with ``rounds``, and let ``other`` answer all other requests."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (self._answer(receive, send) if self.rounds else other(scope, receive, send))

        return app

    async def _answer(self, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for choice in self.rounds.pop(0):
            event = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
            text = choice["delta"].get("content")
            if text and not await asyncio.to_thread(self._seen.acquire, timeout=15):
                self.held.append(text)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def delta(content: str | None = None, *calls: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    fields = {"content": content, "tool_calls": list(calls)}
    return {"index": 0, "delta": {name: value for name, value in fields.items() if value}, "finish_reason": reason}


def opened(index: int, id: str, name: str) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}


def more(index: int, arguments: str = "", name: str = "") -> dict[str, Any]:
    parts = {"name": name, "arguments": arguments}
    return {"index": index, "function": {key: value for key, value in parts.items() if value}}


ALONE = [
    delta("Let "),
    delta("me ", opened(0, "r1", "recall_")),
    delta("look", more(0, name="earlier_messages")),
    delta(" at ", more(0, '{"query": "vault')),
    delta("it", more(0, '", "id": null, "offset": null}')),
    delta(".", reason="tool_calls"),
]
MIXED = [
    delta("First", opened(0, "c1", "read")),
    delta(" both", more(0, name="_file"), opened(1, "r2", NAME)),
    delta(" of", more(0, '{"path": "a.py"}'), more(1, '{"query": "vault", "id": null, "offset": null}')),
    delta(" them."),
    delta(" Now", reason="tool_calls"),
]


def test_the_client_has_every_text_before_the_upstream_sends_more(tmp_path: Path) -> None:
    """A text arrives when it would arrive without the tool, also in the middle of a hidden call."""
    lockstep = Lockstep()
    texts = {}
    with front({"default": ON, "off": {}}, tmp_path, around=lockstep.before) as door:
        for policy, rounds in (("off", [ALONE]), ("default", [ALONE, MIXED])):
            talk = Talk(door, "lockstep", True, policy)
            talk.ask(Reply(content="The summary is made now."))
            talk.say("And now?")
            lockstep.rounds = list(rounds)
            texts[policy] = []
            events = talk.client.chat.completions.create(model="m", messages=talk.messages, tools=TOOLS, stream=True)
            for choice in (choice for chunk in events for choice in chunk.choices if choice.delta.content):
                texts[policy].append(choice.delta.content)
                lockstep.seen()
    assert lockstep.held == []
    assert texts["off"] == [choice["delta"]["content"] for choice in ALONE]
    assert texts["default"] == [choice["delta"]["content"] for choice in (*ALONE, *MIXED)]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_client_may_ask_again_before_its_stream_ends(tmp_path: Path, mixed: bool) -> None:
    """Some clients continue at the event with the finish reason."""
    end = HeldEnd('"c1"')
    with front({"default": ON}, tmp_path, around=end.before) as door:
        talk = Talk(door, "open", True)
        alone = [Reply(content="A", tool_calls=(ours(query="vault"),)), Reply(content="END", tool_calls=(theirs(),))]
        both = [Reply(content="END", tool_calls=(theirs(), ours(query="vault")))]
        with door.scripted(responder=script(*(both if mixed else alone))):
            events = talk.client.chat.completions.create(model="m", messages=talk.messages, tools=TOOLS, stream=True)
            next(chunk for chunk in events if chunk.choices and chunk.choices[0].finish_reason)
        sent = door.upstream.requests[-1].body
        text = "END" if mixed else "AEND"
        calls = [{"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": theirs().arguments}}]
        talk.messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        talk.answer("c1")
        body = talk.ask(Reply(content="Done."))[-1]
        end.release()
        events.close()
        assert body["messages"][: len(sent["messages"])] == sent["messages"]
        assert NAME in json.dumps(body["messages"])
    assert not end.late
