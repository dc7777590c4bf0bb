"""Overflows without an error: streams that are over before they began, prompts that were cut, answers without room."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.messages import assistant, call, result, user
from tests.kit.scripted import behind, client, words
from tests.kit.three_apis import APIS, PATHS, Answer
from tests.kit.three_apis import request as body_of
from tests.kit.upstream import RequestCounter, text_tokens

REAL = 4_096
BELIEVED = {"context_window": 12_000, "tokenizer": "o200k_base"}
TURNS = 30
SAID = "All is well there."

Ending = Callable[[int, dict[str, Any]], Response]


@dataclass
class Quiet:
    """An upstream that never refuses. If a prompt exceeds ``window`` tokens, its answer has another form."""

    ending: Ending
    window: int = REAL
    sizes: list[int] = field(default_factory=list)
    """Tokens of all conversations that came."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counter = RequestCounter()
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        size = self._counter.request(body)
        tokens = size.messages + size.functions
        if body["messages"][0]["content"] != INSTRUCTION:
            return answer(body, "A summary of what was said, in a few words.", tokens)
        self.sizes.append(tokens)
        self.bodies.append(body)
        return self.ending(tokens, body) if tokens > self.window else answer(body, SAID, tokens)

    @property
    def too_long(self) -> int:
        """How many requests did not fit."""
        return sum(tokens > self.window for tokens in self.sizes)


INSTRUCTION = "Be brief."


def answer(
    body: Mapping[str, Any], content: str, prompt: int | None, reason: str = "stop", output: int = 5
) -> Response:
    """An answer as OpenAI sends it, or a stream of it. ``prompt`` is reported in its usage, if that is known."""
    usage = {} if prompt is None else {"prompt_tokens": prompt, "completion_tokens": output}
    counts = {"usage": {**usage, "total_tokens": prompt + output}} if prompt is not None else {}
    base = {"id": "c", "created": 1, "model": "m"}
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
        return JSONResponse({**base, "object": "chat.completion", "choices": [choice], **counts})
    deltas = [({"role": "assistant", "content": ""}, None), ({"content": content}, None), ({}, reason)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": why}]} for delta, why in deltas
    ]
    if not content:
        del chunks[1]
    if counts:
        chunks.append({"choices": [], **counts})
    events = [json.dumps({**base, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return Response(text, media_type="text/event-stream")


def nothing_at_all(tokens: int, body: dict[str, Any]) -> Response:
    return Response(b"", media_type="text/event-stream") if body.get("stream") else answer(body, SAID, None)


def only_the_end(tokens: int, body: dict[str, Any]) -> Response:
    return Response(b": ping\n\ndata: [DONE]\n\n", media_type="text/event-stream")


def cut_at_the_front(tokens: int, body: dict[str, Any]) -> Response:
    return answer(body, "Which question?", REAL)


def whole_messages_dropped(tokens: int, body: dict[str, Any]) -> Response:
    """Ollama's own way: the oldest messages go until the rest fits."""
    return answer(body, "Which question?", REAL - 40 - tokens % 300)


def window_exceeded(tokens: int, body: dict[str, Any]) -> Response:
    """Anthropic's: the text up to the end of the window."""
    return answer(body, "It was in the", tokens, "model_context_window_exceeded", REAL - tokens)


@contextlib.contextmanager
def before(upstream: Quiet, folder: Path, policy: Mapping[str, Any] | None = None) -> Iterator[openai.OpenAI]:
    """A client of a proxy that takes the upstream's window for larger than it is."""
    with behind(upstream.app, folder, profile=BELIEVED, policy=policy) as url, client(url) as caller:
        yield caller


def said(caller: openai.OpenAI, messages: list[Any], *, stream: bool, **fields: Any) -> str:
    # The client transforms ``messages``, which takes time. It sends ``extra_body`` unchanged.
    asked: Any = {"model": "m", "messages": [], "extra_body": {"messages": messages}, **fields}
    if not stream:
        whole = caller.chat.completions.create(**asked)
        return whole.choices[0].message.content or ""
    options: Any = {"include_usage": True}
    chunks = caller.chat.completions.create(**asked, stream=True, stream_options=options)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def talk(turns: int, size: int = 150) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": INSTRUCTION}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + words(size, f"q{number}x")})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + words(size, f"a{number}x")})
    return [*messages, {"role": "user", "content": f"What now, after {turns}?"}]


# How often a prompt may be too long: an empty stream is sent again, and believed when a second request has one.
SESSIONS = [("nothing at all", nothing_at_all, True, 4), ("only the end", only_the_end, True, 4)]


@pytest.mark.parametrize(("ending", "stream", "most"), [row[1:] for row in SESSIONS])
def test_an_answer_without_anything_in_it_is_asked_for_again(
    ending: Ending, stream: bool, most: int, tmp_path: Path
) -> None:
    upstream = Quiet(ending)
    with before(upstream, tmp_path) as caller:
        for turns in range(1, TURNS):
            assert said(caller, talk(turns), stream=stream) == SAID
    assert 1 <= upstream.too_long <= most
    assert all(body["messages"][-1]["content"].startswith("What now, after") for body in upstream.bodies)


@pytest.mark.parametrize(
    ("case", "stream"),
    combined(
        2,
        [
            (cut_at_the_front, REAL, 26, 3),
            (cut_at_the_front, REAL, 1, 3),
            (whole_messages_dropped, REAL, 1, 5),
            (window_exceeded, REAL - 700, 1, 2),
        ],
        [True, False],
    ),
)
def test_what_was_sent_stays_and_the_next_turns_are_compacted(
    case: tuple[Ending, int, int, int], stream: bool, tmp_path: Path
) -> None:
    """The client has what was written before it is known that the prompt was too long.

    A prompt that is cut by a little only is told from a tokenizer of another kind once the conversation has grown.
    """
    ending, room, first, most = case
    upstream = Quiet(ending, window=room)
    with before(upstream, tmp_path) as caller:
        answers = [said(caller, talk(turns), stream=stream) for turns in range(first, first + 26)]
    assert 1 <= upstream.too_long <= most
    assert answers.count(SAID) == 26 - upstream.too_long
    assert answers[-10:] == [SAID] * 10


def test_an_upstream_that_drops_reasoning_is_sent_the_whole_conversation(tmp_path: Path) -> None:
    """As the chat templates of Qwen3 and DeepSeek-R1 do with the reasoning of earlier turns."""
    upstream = Quiet(lambda tokens, body: answer(body, SAID, sum(map(visible, body["messages"]))), window=0)
    thoughts = {"reasoning_content": words(400, "perhaps ")}
    messages = talk(18, 30)
    messages = [message | (thoughts if message["role"] == "assistant" else {}) for message in messages]
    with before(upstream, tmp_path, {"trigger": {"fraction": 1.0}}) as caller:
        for turn in range(3, len(messages) + 1, 2):
            assert said(caller, messages[:turn], stream=False) == SAID
    assert [len(body["messages"]) for body in upstream.bodies] == list(range(3, len(messages) + 1, 2))


def visible(message: Mapping[str, Any]) -> int:
    return len(message["content"]) // 8 // 2 * 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("usage", [True, False])
def test_a_reasoning_model_that_uses_up_its_output_is_sent_the_whole_conversation(
    usage: bool, stream: bool, tmp_path: Path
) -> None:
    """Hidden reasoning used all of the output: nothing is written, and nothing says that it was reasoning."""
    upstream = Quiet(lambda tokens, body: answer(body, "", tokens if usage else None, "length", 0), window=0)
    with before(upstream, tmp_path) as caller:
        for turns in range(7, 26):
            assert said(caller, talk(turns), stream=stream, max_completion_tokens=200) == ""
        upstream.window = REAL * 10
        assert said(caller, talk(26), stream=stream) == SAID
    assert [len(body["messages"]) for body in upstream.bodies] == [2 * turns + 2 for turns in range(7, 27)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("turns", "reply", "fields"),
    [
        (1, lambda tokens, body: answer(body, "", tokens, "stop", 0), {}),
        (26, lambda tokens, body: answer(body, "", tokens, "stop", 0), {}),
        (26, lambda tokens, body: answer(body, "", tokens, "length", 1), {"max_tokens": 1}),
        (26, lambda tokens, body: answer(body, "", tokens, "length", 400), {"max_tokens": 400}),
        (1, lambda tokens, body: answer(body, "", tokens, "length", 0), {}),
        (26, lambda tokens, body: answer(body, "", None, "length"), {}),
        (26, lambda tokens, body: answer(body, "", None, "length"), {"max_tokens": 400}),
    ],
)
def test_other_empty_answers_are_passed_on(
    turns: int, reply: Ending, fields: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    upstream = Quiet(reply, window=0)
    with before(upstream, tmp_path) as caller:
        assert said(caller, talk(turns), stream=stream, **fields) == ""
    assert len(upstream.sizes) == 1


@pytest.mark.parametrize(("times", "heard", "requests"), [(1, SAID, 2), (2, "", 2)])
def test_a_stream_that_is_given_up_before_it_says_anything_is_asked_for_again(
    times: int, heard: str, requests: int, tmp_path: Path
) -> None:
    """Once, unchanged: the server turned to another request."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
    given_up = Response(f"data: {json.dumps(role)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
    left = [times]

    def ending(tokens: int, body: dict[str, Any]) -> Response:
        left[0] -= 1
        return given_up if left[0] >= 0 else answer(body, SAID, tokens)

    upstream = Quiet(ending, window=0)
    with before(upstream, tmp_path) as caller:
        assert said(caller, talk(3), stream=True) == heard
    assert upstream.bodies == [upstream.bodies[0]] * requests


@dataclass
class Honest:
    """An upstream of all three APIs. It reports what it read: the prompt, or the newest part that fits ``window``."""

    window: int | None = None
    summaries: int = 0
    too_long: int = 0

    def __post_init__(self) -> None:
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        self.summaries += "<transcript>" in json.dumps(body)
        sizes = [text_tokens(json.dumps(unit)) for unit in body.get("messages", body.get("input"))]
        self.too_long += self.window is not None and sum(sizes) > self.window
        while self.window is not None and sum(sizes) > self.window:
            del sizes[0]
        events, whole = Answer("ok", prompt=sum(sizes)).parts(api, stream=body.get("stream", False))
        media_type = "text/event-stream" if events else "application/json"
        return Response(b"".join(events) or whole, media_type=media_type)


Steps = list[list[Any]]


def steps(count: int, size: int) -> Steps:
    """Tool calls with their results, and now and then an answer and a question."""
    made: Steps = []
    for number in range(count):
        text = words(size, f"s{number}x")
        if number % 4 == 3:
            made.append([assistant(text), user(f"Question {number}?")])
        else:
            read = call(f"c{number}", path=f"/srv/app/m{number}.py")
            made.append([assistant("Next.", read), result(f"c{number}", text)])
    return made


def rewritten(done: Steps, change: Callable[[int, str], str]) -> Steps:
    """Change the texts of all but the newest four steps."""
    old = [
        [{**message, "content": change(index, message["content"])} for message in step]
        for index, step in enumerate(done[:-4])
    ]
    return [*old, *done[-4:]]


PRUNING: dict[str, Callable[[Steps], Steps]] = {
    "clears old texts": lambda done: rewritten(done, lambda *_: "[Old content cleared]"),
    "shortens old texts": lambda done: rewritten(done, lambda _, text: text[:60]),
    "clears at every fifth turn": lambda done: [
        *rewritten(done[: len(done) // 5 * 5], lambda *_: "[cleared]"),
        *done[len(done) // 5 * 5 :],
    ],
    "names repeated results": lambda done: rewritten(done, lambda index, _: f"(as result {index + 4})"),
    "drops the oldest": lambda done: done[-5:],
    "drops the middle": lambda done: [*done[:2], *done[2:][-4:]],
    "reorders": lambda done: [*done[:-4][::-1][:3], *done[-4:]],
    "replaces the old by a note": lambda done: [[assistant(f"Notes on {len(done) // 5} parts.")], *done[-5:]],
    "replaces the old by growing notes": lambda done: [[assistant(words(3 * len(done), "n"))], *done[-5:]],
    "ends with a shrinking state": lambda done: [*done, [user(words(24 * (40 - len(done)), "e"))]],
}


def session(url: str, api: str, case: str, turns: int, change: Callable[[Steps], Steps]) -> list[str]:
    """Return the header ``x-compaction`` of each turn. Half of the turns are streamed."""
    done = steps(turns, 100)
    verdicts = []
    with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {case} {api}"}) as http:
        for turn in range(1, turns + 1):
            messages = [user(f"Fix the tests: {case}."), *chain.from_iterable(change(done[:turn]))]
            body = body_of(api, "m", messages, stream=turn % 2 == 0)
            response = http.post(f"{url}{PATHS[api]}", content=body)
            assert response.status_code == 200, response.text
            verdicts.append(response.headers["x-compaction"])
    return verdicts


@contextlib.contextmanager
def reporting(upstream: Honest, folder: Path) -> Iterator[str]:
    with serve(upstream.app) as url:
        main = {"base_url": f"{url}/v1", "api_key": "sk-upstream", "speaks": list(APIS)}
        with behind(upstream.app, folder, profile=BELIEVED, upstreams={"main": main}) as entrance:
            yield entrance


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Honest, str]]:
    upstream = Honest()
    with reporting(upstream, tmp_path_factory.mktemp("honest")) as url:
        yield upstream, url


@pytest.mark.parametrize(("api", "case"), [*zip(cycle(APIS), PRUNING, strict=False)])
def test_a_client_that_prunes_its_own_messages_shows_no_limit(api: str, case: str, honest: tuple[Honest, str]) -> None:
    """A small reported size then says nothing about the upstream."""
    upstream, url = honest
    assert session(url, api, case, 25, PRUNING[case]) == ["none"] * 25
    assert upstream.summaries == 0


@pytest.mark.parametrize("api", APIS)
def test_an_upstream_that_drops_the_oldest_messages_is_found_out_on_each_api(api: str, tmp_path: Path) -> None:
    upstream = Honest(window=2_000)
    with reporting(upstream, tmp_path) as url:
        verdicts = session(url, api, "m", 34, list)
    assert 1 <= upstream.too_long <= 10
    assert verdicts[-5:] == ["compacted"] * 5
