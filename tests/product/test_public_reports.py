"""Faults that users of other proxies and agents reported in public, tried on this proxy over HTTP.

Each case names its reports as ``repository#number``. The comments say what the reporters saw, in our words.
"""

import contextlib
import itertools
import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.messages import call, words
from tests.kit.scripted import PROFILE, proxied
from tests.kit.three_apis import APIS, PATHS, Answer, event
from tests.kit.upstream import text_tokens

Items = list[dict[str, Any]]

NOTES = "Goal: KEPT answers to the questions. Next step: answer the newest one, as the user wants."
SAID = "All right, the work continues as planned."
PRICES = {"priced": {"input_cost_per_token": 1e-6, "output_cost_per_token": 0.0}}


@dataclass(frozen=True)
class Sent:
    """A request that the upstream got. ``summary`` is true for the proxy's own."""

    raw: bytes
    body: dict[str, Any]
    api: str
    summary: bool

    def answer(self, text: str = SAID, prompt: int = 40, more: Sequence[Mapping[str, Any]] = ()) -> Response:
        """Return an answer of the API. ``more`` are blocks or items before the text."""
        answer = Answer(text, prompt=prompt)
        made = json.loads(answer.parts(self.api, stream=False)[1])
        if more:
            field = {"messages": "content", "responses": "output"}[self.api]
            made[field] = [*more, *made[field]]
        return JSONResponse(made)


class Upstream:
    """An upstream of all three APIs. ``reply`` answers a conversation, and ``notes`` is the text of each summary."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.reply: Callable[[Sent], Response] = Sent.answer
        self.notes = NOTES
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        sent = Sent(raw, json.loads(raw), api, b"<transcript>" in raw)
        self.sent.append(sent)
        return sent.answer(self.notes) if sent.summary else self.reply(sent)


@dataclass(frozen=True)
class Seen:
    """A response, and what the upstream got on its account."""

    response: httpx.Response
    asked: bytes
    sent: list[Sent]
    summaries: list[Sent]

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def unchanged(self) -> bool:
        """Whether the upstream got the client's bytes, once."""
        return [one.raw for one in self.sent] == [self.asked]

    @property
    def compacted(self) -> bool:
        return self.response.headers["x-compaction"] == "compacted"

    @property
    def units(self) -> Items:
        body = self.sent[-1].body
        return list(body.get("messages") or body["input"])


class Door:
    """A running proxy. Each key is another caller."""

    def __init__(self, url: str, upstream: Upstream, http: httpx.Client) -> None:
        self.upstream = upstream
        self._url, self._http = url, http
        self._keys = map("k{}".format, itertools.count())

    def ask(self, api: str, units: Any, key: str | None = None, model: str | None = None, **fields: Any) -> Seen:
        """Send a conversation. Claude models are Anthropic's."""
        model = model or ("claude-x" if api == "messages" else "m")
        required = {"max_tokens": 500} if api == "messages" else {}
        body = {"model": model, "input" if api == "responses" else "messages": units, **required, **fields}
        raw, before = json.dumps(body).encode(), len(self.upstream.sent)
        headers = {"authorization": f"Bearer {key or next(self._keys)}", "content-type": "application/json"}
        response = self._http.post(self._url + PATHS[api], content=raw, headers=headers)
        sent = self.upstream.sent[before:]
        return Seen(response, raw, [one for one in sent if not one.summary], [one for one in sent if one.summary])

    @contextlib.contextmanager
    def replying(self, reply: Callable[[Sent], Response] = Sent.answer, notes: str = NOTES) -> Iterator[None]:
        self.upstream.reply, self.upstream.notes = reply, notes
        try:
            yield
        finally:
            self.upstream.reply, self.upstream.notes = Sent.answer, NOTES


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Door]:
    upstream = Upstream()
    with serve(upstream.app) as url, httpx.Client(trust_env=False, timeout=60) as http:
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {
                "main": {"base_url": f"{url}/v1", "speaks": ["chat", "responses"], "ask_limits": False},
                "claude": {"provider": "anthropic", "base_url": url, "ask_limits": False},
            },
            "models": [
                {"match": "claude*", "upstream": "claude", "profile": PROFILE},
                {"match": "*", "upstream": "main", "profile": PROFILE},
            ],
            "policies": {"default": {"prepare": None}},
            "prices": PRICES,
        }
        with proxied(settings, folder) as entrance:
            yield Door(entrance, upstream, http)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with opened(tmp_path_factory.mktemp("reports")) as door:
        yield door


def sealed(count: int = 300) -> str:
    """Return as many random bytes in base64."""
    return b64encode(Random(count).randbytes(count)).decode()


def message(api: str, role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text} if api != "responses" else {"type": "message", "role": role, "content": text}


def talk(api: str, turns: int, size: int = 900) -> Items:
    """Return user messages and answers of ``size`` tokens each, and a question. 9 turns of 900 exceed the trigger."""
    roles = [(number, role) for number in range(turns) for role in ("user", "assistant")]
    said = [message(api, role, f"{role} {number}: {words(size, f'{role[0]}{number}x')}") for number, role in roles]
    return [*said, message(api, "user", "What now?")]


def work(api: str, turns: int, size: int = 700, hidden: Mapping[str, Any] | None = None) -> Items:
    """Return turns with a call, its result, and an answer each. ``hidden`` is the reasoning before each call.

    On chat completions, its fields go into the message, and those of ``call`` into the call.
    """
    hidden = hidden or {}
    units: Items = []
    for number in range(turns):
        units.append(message(api, "user", f"Look at {number}. {words(size, f'u{number}x')}"))
        id, text = f"call_{number}", words(size, f"r{number}x")
        if api == "messages":
            use = {"type": "tool_use", "id": id, "name": "read_file", "input": {"path": f"f{number}"}}
            units.append({"role": "assistant", "content": [*([dict(hidden)] if hidden else []), use]})
            units.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})
        elif api == "responses":
            units += [{**hidden, "id": f"rs_{number}"}] if hidden else []
            made = {"call_id": id, "name": "read_file", "arguments": "{}"}
            units.append({"type": "function_call", "id": f"fc_{number}", **made})
            units.append({"type": "function_call_output", "call_id": id, "output": text})
        else:
            fields = {name: value for name, value in hidden.items() if name != "call"}
            calls = [{**call(id, path=f"f{number}"), **hidden.get("call", {})}]
            units.append({"role": "assistant", "content": None, **fields, "tool_calls": calls})
            units.append({"role": "tool", "tool_call_id": id, "content": text})
        units.append(message(api, "assistant", f"Read {number}."))
    return [*units, message(api, "user", "What now?")]


# Requests that leave as they came.

TRIGGER = {"type": "compaction_trigger"}
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAgAAAAIA" + "A" * 400_000
UNTOUCHED: list[tuple[str, str, Any]] = [
    # A proxy put its own message behind codex's trigger, or stored the trigger as an item. The upstream refused both.
    ("sub2api#6366, billion-context#283, Floway#93", "responses", [*talk("responses", 12), TRIGGER]),
    # A proxy knew the trigger in a list only.
    ("claude-code-hub#1404", "responses", TRIGGER),
    # A proxy removed the empty summary of reasoning, which the API requires.
    (
        "Agora#141",
        "responses",
        [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed()}, *talk("responses", 1)],
    ),
    # An image counted by the bytes of its base64, so it never fit.
    (
        "senpi#1455",
        "messages",
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
                            }
                        ],
                    }
                ],
            },
        ],
    ),
]


@pytest.mark.parametrize(("report", "api", "units"), UNTOUCHED, ids=[row[0] for row in UNTOUCHED])
def test_a_request_leaves_as_it_came(door: Door, report: str, api: str, units: Any) -> None:
    seen = door.ask(api, units)
    assert seen.status == 200, seen.response.text
    assert seen.unchanged


# Errors.


OVERFLOWS: list[tuple[str, Any]] = [
    # Agents didn't know these wordings, so each further request failed.
    (
        "copilot-api#210",
        {
            "message": '{"error":{"message":"prompt token count of 8490 exceeds the limit of 5000",'
            '"code":"model_max_prompt_tokens_exceeded"}}\n',
            "type": "error",
        },
    ),
    ("kiro-gateway#88", {"message": "Input content length exceeds threshold."}),
    ("kiro-gateway#88", {"message": "Model context limit reached. Conversation size exceeds model capacity."}),
    ("zed#64560", {"code": 400, "message": "The input token count exceeds the maximum number of tokens allowed 5000."}),
    ("Zoo-Code#648", {"message": "request (9746 tokens) exceeds the available context size (5000 tokens)"}),
]


@pytest.mark.parametrize(("report", "error"), OVERFLOWS, ids=[row[0] for row in OVERFLOWS])
def test_an_overflow_is_recovered(door: Door, report: str, error: Any) -> None:
    def reply(sent: Sent) -> Response:
        return JSONResponse({"error": error}, 400) if text_tokens(sent.raw.decode()) > 5_000 else sent.answer()

    with door.replying(reply):
        seen = door.ask("chat", talk("chat", 5))
    assert seen.status == 200, seen.response.text
    assert seen.compacted
    assert len(seen.sent) == 2


# Figures of upstreams.


def search(api: str, number: int) -> Items:
    if api == "messages":
        use = {"type": "server_tool_use", "id": f"srvtoolu_{number}", "name": "web_search", "input": {"query": "q"}}
        return [use, {"type": "web_search_tool_result", "tool_use_id": f"srvtoolu_{number}", "content": []}]
    return [{"type": "web_search_call", "id": f"ws_{number}", "status": "completed"}] if api == "responses" else []


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("times", [2, 4])
def test_usage_that_counts_a_prompt_several_times_teaches_nothing(door: Door, api: str, times: int) -> None:
    """claude-code#82863, gsd-2#6353, open-webui#27031: usage sums the steps of a turn, and agents compacted at once.

    Here the turns after it looked as if the upstream cut them. So the proxy learned a small window, for all
    conversations of the key.
    """

    def reply(sent: Sent) -> Response:
        units = sent.body.get("messages") or sent.body["input"]
        turn = len(units) // 2
        seen = text_tokens(json.dumps(units)) * (times if turn in (4, 8) else 1)
        return sent.answer(prompt=seen, more=search(api, turn) if turn in (4, 8) else [])

    units: Items = []
    with door.replying(reply):
        for turn in range(15):
            units.append(message(api, "user", f"{turn}: {words(280, f'q{turn}x')}"))
            seen = door.ask(api, units, key=f"several-{times}", model=f"claude-{times}" if api == "messages" else api)
            assert seen.unchanged, turn
            units.append(message(api, "assistant", f"{turn}: {words(280, f'a{turn}x')}"))


# Reasoning that an upstream refuses because the prompt before it has changed.

THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": sealed()}
SUMMED = {"type": "reasoning", "summary": [], "encrypted_content": sealed()}
REFUSED: list[tuple[str, str, str, dict[str, Any], str]] = [
    # Sessions ended for good after a compaction: each further request got 400.
    (
        "opencode#31188",
        "messages",
        "claude-sonnet-4-5",
        THOUGHT,
        "messages.5.content.0: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
        "modified. These blocks must remain as they were in the original response.",
    ),
    (
        "openclaw#90108",
        "messages",
        "claude-sonnet-4-5",
        THOUGHT,
        "messages.3.content.0: Invalid `signature` in `thinking` block",
    ),
    (
        "llmtrim#177, Antigravity-Manager#608",
        "messages",
        "claude-fable-5.1",
        THOUGHT,
        "messages.3.content.0: Invalid signature in thinking block",
    ),
    (
        "openclaw#110075",
        "responses",
        "gpt-5",
        SUMMED,
        "The encrypted content gAAA...AA== could not be verified. Reason: Encrypted content could not be decrypted.",
    ),
    (
        "Antigravity-Manager#3337, syzkaller#7871",
        "chat",
        "gemini",
        {"call": {"extra_content": {"google": {"thought_signature": sealed()}}}},
        "Invalid thought signature",
    ),
    (
        "opencode#14393",
        "chat",
        "openrouter",
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "signature": sealed()}]},
        "messages.3.content.0: Invalid `signature` in `thinking` block",
    ),
    (
        "oh-my-pi#333",
        "chat",
        "litellm",
        {"reasoning_content": "Hm.", "thinking_blocks": [THOUGHT]},
        "messages.3.content.0: Invalid signature in thinking block",
    ),
]


@pytest.mark.parametrize(
    ("report", "api", "model", "hidden", "text"), REFUSED, ids=[f"{row[0]} {row[1]}" for row in REFUSED]
)
def test_refused_reasoning_is_taken_out_once(
    door: Door, report: str, api: str, model: str, hidden: dict[str, Any], text: str
) -> None:
    error = {"error": {"type": "invalid_request_error", "message": text}}

    def reply(sent: Sent) -> Response:
        return JSONResponse(error, 400) if sealed().encode() in sent.raw else sent.answer()

    units = work(api, 12, hidden=hidden)
    with door.replying(reply):
        small = door.ask(api, work(api, 2, hidden=hidden), model=model)
        first = door.ask(api, units, key=report, model=model)
        second = door.ask(api, [*units, *talk(api, 1, 20)], key=report, model=model)
    assert small.unchanged, "the client caused this refusal"
    assert (small.status, small.response.json()) == (400, error)
    assert (first.status, second.status) == (200, 200)
    assert first.compacted
    assert len(first.sent) <= 2
    assert len(second.sent) == 1, "the proxy remembers the refusal"
    if "call" in hidden:
        assert "skip_thought_signature_validator" in json.dumps(first.units), "Gemini wants a signature in each call"


# Summaries.


def test_notes_may_mention_calls(door: Door) -> None:
    with door.replying(notes="Goal: KEPT a parser for `<tool_call>`.\n- Done: `</tool_call>` ends a call, tested."):
        assert door.ask("chat", talk("chat", 9)).response.headers["x-compaction-summary"] == "made"


# Compacted prompts.


def marked(blocks: Items, **ttl: str) -> Items:
    return [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral", **ttl}}]


def test_an_old_empty_text_with_a_breakpoint(door: Door) -> None:
    """claude-code#55302: an empty text with ``cache_control`` in the history made the API refuse all later requests."""
    units = work("messages", 12)
    units[2]["content"] += marked([{"type": "text", "text": ""}])
    seen = door.ask("messages", units)
    assert seen.compacted
    assert "cache_control" not in json.dumps(seen.units)
    assert '"text": ""' not in json.dumps(seen.units)


# Answers.


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_format_of_json_keeps_the_word_that_providers_require(door: Door, api: str) -> None:
    """OpenAI refuses ``json_object`` if no message has the word. Here, only an old answer has it."""
    units = talk(api, 9)
    units[1]["content"] = f"```json\n{units[1]['content']}"
    wanted = {"type": "json_object"}
    fields = {"response_format": wanted} if api == "chat" else {"text": {"format": wanted}}
    seen = door.ask(api, units, **fields)
    assert seen.compacted
    assert "json" in json.dumps(seen.units).lower()
    assert "json" not in json.dumps(door.ask(api, units).units).lower()


def test_usage_that_only_the_proxy_asked_for_is_hidden_whatever_its_event_has(door: Door) -> None:
    """llama.cpp adds ``timings`` to the event, others ``citations``, and clients read the first choice of none."""
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    choice = {"index": 0, "delta": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}
    events = [event({"choices": [choice]}), event({"choices": [], "usage": usage, "timings": {}, "citations": ["a"]})]
    with door.replying(lambda sent: Response(b"".join(events), media_type="text/event-stream")):
        seen = door.ask("chat", talk("chat", 1), model="priced", stream=True)
    assert seen.sent[0].body["stream_options"] == {"include_usage": True}
    assert seen.response.content == events[0]


def test_a_loaded_tool_does_not_end_calibration(door: Door) -> None:
    """Claude Code's prompts have ``tool_reference`` blocks, and the proxy compacted them too early."""
    tools = [
        {"name": name, "input_schema": {"type": "object"}, "defer_loading": name == "Fetch"} for name in ("Fetch", "ls")
    ]
    loading = {"type": "tool_use", "id": "t", "name": "ls", "input": {}}
    loaded = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Fetch"}]}
    units = [message("messages", "user", "Load it."), {"role": "assistant", "content": [loading]}]
    units.append({"role": "user", "content": [loaded]})
    middling = [*units, *talk("messages", 6)]
    assert door.ask("messages", middling, tools=tools).compacted
    with door.replying(lambda sent: sent.answer(prompt=text_tokens(json.dumps(sent.body["messages"])))):
        for _ in range(5):
            assert not door.ask("messages", [*units, *talk("messages", 3)], key="loads", tools=tools).compacted
        assert not door.ask("messages", middling, key="loads", tools=tools).compacted
