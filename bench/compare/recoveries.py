"""Generated requests, most of which meet a recovery: the upstream refuses something, or ends its answer early."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

from bench.compare.case import Case, Reply
from bench.compare.setup import BUDGETS, NOTHING_AHEAD, PLAIN_POLICIES, small_model
from bench.compare.upstream import decoded
from tests.kit.generator import ANY_DIRT, conversation
from tests.kit.overflow_wordings import WORDINGS, Refused
from tests.kit.raw_upstream import Arrived, End, Step, answer, chunk, stream_head, streamed
from tests.kit.three_apis import (
    APIS,
    TOOLS,
    Answer,
    Call,
    cut_off,
    error_body,
    event,
    failed_response,
    gzipped,
    is_system,
    request,
    tools,
)

RECALL = "recall_earlier_messages"
"""The name of the hidden tool."""

FAILED = "500 Internal Server Error"

GROUP = 240
"""Most requests in one group. Each group has servers and a store of its own."""

When = Callable[[Arrived], bool]

_SHORT, _GROWING, _LONG, _VERY_LONG = (0.4, 0.55, 0.7), (0.15, 0.25), (1.3, 1.6, 2.0), (2.0, 2.6)
"""Sizes of conversations, as multiples of the input budget."""


@dataclass(slots=True)
class Talk:
    """A generated conversation with one API. ``number`` distinguishes it from the others of its family."""

    family: str
    api: str
    number: int
    rng: random.Random
    policy: str = NOTHING_AHEAD
    kind: str = "small"
    messages: list[Any] = field(default_factory=list)
    budget: int = 1_500

    def begin(self, rooms: Sequence[float], *, budgets: Sequence[int] = BUDGETS[:2]) -> None:
        """Generate the messages. ``rooms`` are the sizes to choose from, as multiples of the input budget."""
        self.budget = self.rng.choice(budgets)
        self.messages = [*conversation(self.rng, self.budget, "", rooms)]

    @property
    def model(self) -> str:
        """The name of a model that no other conversation uses."""
        return small_model(self.budget, family=self.kind, api=self.api, suffix=f"-x{self.number}")

    @property
    def stream(self) -> bool:
        """True if the client asks for a stream."""
        return self.number % 2 == 1

    def grow(self, room: float) -> None:
        """Add generated messages, and a question. ``room`` is their size, as a multiple of the input budget."""
        added = conversation(self.rng, self.budget, "", (room,))
        self.messages.append({"role": "assistant", "content": f"Part {len(self.messages)} is done."})
        self.messages += [message for message in added if not is_system(message)]

    def case(self, what: str, *replies: Reply, summary: Sequence[Step] | None = None, **fields: object) -> Case:
        """Return a request with all messages so far, and further fields."""
        if self.stream and self.api == "chat" and self.number % 3 == 0:
            fields["stream_options"] = {"include_usage": True}
        body = request(self.api, self.model, self.messages, stream=self.stream, **fields)
        return self.of_body(what, body, replies, summary)

    def of_body(
        self, what: str, body: bytes, replies: tuple[Reply, ...] = (), summary: Sequence[Step] | None = None
    ) -> Case:
        """Return a request with a body of its own."""
        group, name = f"{self.family}, {self.api}", f"{self.number}, {what}{', streaming' if self.stream else ''}"
        return Case(group, name, body, self.policy, replies, self.api, summary, generated=True)

    def reply(self, made: Answer, *when: When) -> Reply:
        """Return an answer as the client asked for it."""
        return Reply(made.steps(self.api, stream=self.stream), *when)

    def refusal(self, message: str, code: str | None = None, *when: When) -> Reply:
        """Return an error of status 400 in the API's shape."""
        return Reply(_error(error_body(self.api, message, code)), *when)

    def goes_on(self, *messages: Any) -> None:
        """Add messages, and a question of the user's."""
        self.messages += [*messages, {"role": "user", "content": "And what does that mean for the release?"}]

    @property
    def tokens(self) -> int:
        """The rough size of the messages."""
        return len(json.dumps(self.messages)) // 4

    def answer(self, text: str = "", *calls: Call, **fields: Any) -> Answer:
        """Return an answer whose ids no other answer has. Its prompt's size is that of the messages."""
        prompt = {"prompt": self.tokens}
        return Answer(text, calls, id=f"{self.number}", **{**prompt, **fields})


def plain(talk: Talk) -> Iterator[Case]:
    """Send a conversation that the upstream accepts, a third of them with faults, some in two turns."""
    number, rng = talk.number, talk.rng
    talk.policy = [*PLAIN_POLICIES][number % len(PLAIN_POLICIES)]
    talk.kind = "strict" if number % 5 == 4 else "small"
    talk.budget = rng.choices(BUDGETS, (8, 3, 1))[0]
    dirt = ANY_DIRT if number % 3 == 2 and talk.api == "chat" else ""
    messages = conversation(rng, talk.budget, dirt)
    name = small_model(talk.budget, family=talk.kind, api=talk.api)
    ends = (len(messages) * 2 // 3, len(messages)) if number % 4 == 0 and len(messages) > 6 else (len(messages),)
    for end in ends:
        shown = messages[:end]
        if talk.api != "chat" and not any(message["role"] == "user" for message in shown):
            continue
        yield talk.of_body(f"{end} messages", request(talk.api, name, shown, stream=talk.stream))


def overflow(talk: Talk) -> Iterator[Case]:
    """Refuse a prompt as too long once or twice, with and without a limit, in the words of several servers."""
    rng = talk.rng
    talk.policy = rng.choice((NOTHING_AHEAD, NOTHING_AHEAD, NOTHING_AHEAD, "stages-at-once", "keep-output", "no-retry"))
    talk.begin(rng.choice((_SHORT, _LONG)))
    counted = talk.tokens
    limit = int(counted * rng.choice((0.3, 0.5, 0.7, 0.9)))
    times = rng.choice((1, 1, 2, 3))
    kind, replies = "", []
    for _ in range(times):
        kind, steps = _overflow(talk, counted, limit)
        replies.append(Reply(steps))
        counted, limit = limit, int(limit * 0.8)
    yield talk.case(f"{kind}, {times} times", *replies)
    if talk.number % 3 == 0:
        talk.goes_on({"role": "assistant", "content": "It was refused before."})
        yield talk.case(f"after {kind}")


def output_limit(talk: Talk) -> Iterator[Case]:
    """Refuse the output that a request asks for."""
    rng = talk.rng
    talk.policy = rng.choice((NOTHING_AHEAD, "keep-output"))
    talk.begin(rng.choice((_SHORT, _LONG)))
    asked, limit = rng.choice((400, 500, 2_000)), rng.choice((100, 256))
    total, counted = talk.budget, talk.tokens
    messages = (
        f"max_tokens is too large: {asked}. This model supports at most {limit} completion tokens.",
        f"max_tokens: {asked} > {limit}, which is the maximum allowed number of output tokens for {talk.model}",
        f"input length and `max_tokens` exceed context limit: {counted} + {asked} > {total}, decrease input length or "
        "`max_tokens` and try again",
        f"This model's maximum context length is {total} tokens. However, you requested {counted + asked} tokens "
        f"({counted} in the messages, {asked} in the completion). Please reduce the length of the messages or "
        "completion.",
    )
    place = rng.choice((0, 1, 2, 2, 3, 3))
    code = "invalid_value" if place < 2 else "context_length_exceeded"
    field: dict[str, Any] = {"max_output_tokens" if talk.api == "responses" else "max_tokens": asked}
    yield talk.case("output", talk.refusal(messages[place], code), **field)
    yield talk.case("output again", **field)


def reasoning(talk: Talk) -> Iterator[Case]:
    """Refuse bound reasoning behind a prompt that the proxy changed, and in one that it didn't change."""
    rng = talk.rng
    talk.begin(rng.choice((_LONG, _LONG, _LONG, _SHORT)))
    talk.messages = [
        {**message, "thinking": f"Thought {at}."} if message["role"] == "assistant" else message
        for at, message in enumerate(talk.messages)
    ]
    wording = rng.choice(
        (
            "messages.1.content.0: This thinking block is bound to a different conversation.",
            "messages.1.content.0: Invalid `signature` in `thinking` block",
        )
        if talk.api == "messages"
        else ("Item 'rs_1' of type 'reasoning' was provided without its required following item.",)
    )
    refused = talk.refusal(wording, None, _has_reasoning)
    for turn in range(3):
        yield talk.case(f"reasoning, turn {turn}", refused, **_thinks(talk))
        called = _client_call(talk, turn)
        made = talk.answer("It works.", called, thinking=f"New thought {turn}.")
        done = {"role": "tool", "tool_call_id": called.id, "content": f"Result {turn}."}
        talk.messages += [made.as_message(), done]
        if turn:
            talk.goes_on()


def recall(talk: Talk) -> Iterator[Case]:
    """Let the model call the hidden tool, alone or with the client's tools, or refuse the tool."""
    rng = talk.rng
    talk.policy = "recall"
    talk.begin(_VERY_LONG)
    talk.messages.insert(0, {"role": "user", "content": "The password of staging is orchardplum."})
    what = rng.choice(("once", "once", "twice", "mixed", "mixed", "text", "too often", "refused", "cut", "compressed"))
    rounds = {"twice": 2, "too often": 5}.get(what, 1)
    queries = [{"query": f"password staging {n}", "id": None, "offset": None} for n in range(rounds)]
    hidden = [Call(f"own_r{talk.number}_{n}", RECALL, json.dumps(query)) for n, query in enumerate(queries)]
    final = talk.answer("The password is orchardplum.")
    if what == "refused":
        replies = [talk.refusal(f"tools: {RECALL} isn't supported", None, _has_tool)]
    elif what == "mixed":
        final = talk.answer("I look.", _client_call(talk, 0))
        replies = [talk.reply(talk.answer("I look.", hidden[0], *final.calls), _has_tool)]
    elif what == "compressed":
        replies = [Reply(gzipped(final.parts(talk.api, stream=False)[1], stream=False), _has_tool)]
    elif what == "cut":
        parts, whole = talk.answer("", hidden[0]).parts(talk.api, stream=talk.stream)
        steps: Sequence[Step] = [stream_head(), *map(chunk, parts[:-1]), End.CLOSE] if talk.stream else cut_off(whole)
        replies = [Reply(steps, _has_tool)]
    else:
        text = "I look it up. " if what == "text" else ""
        replies = [talk.reply(talk.answer(text, call), _has_tool) for call in hidden]
        replies.append(talk.reply(final, _has_tool))
        final = talk.answer(text + final.text, *final.calls)
    yield talk.case(what, *replies, tools=tools(talk.api))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "A result."} for call in final.calls]
    talk.goes_on(final.as_message(), *results)
    again = talk.reply(talk.answer("", Call(f"own_s{talk.number}", RECALL, hidden[0].arguments)), _has_tool)
    yield talk.case(f"after {what}", again, tools=tools(talk.api))


def early_ends(talk: Talk) -> Iterator[Case]:
    """End an answer early, or answer with nothing, with a server's error, or compressed."""
    rng = talk.rng
    talk.begin(rng.choice((_SHORT, _LONG)))
    made = talk.answer("A long answer that may end early.")
    parts, whole = made.parts(talk.api, stream=talk.stream)
    first = parts[:1]
    gives_up = [*first, b"data: [DONE]\n\n"]
    endings: dict[str, Sequence[Step]] = {
        "closed before a byte": [End.CLOSE],
        "reset before a byte": [End.RESET],
        "server error": _error({"error": {"message": "no", "type": "server_error"}}, FAILED),
        "rate limit": [answer(b'{"error": {"message": "slow"}}', "429 Too Many Requests", [("Retry-After", "1")])],
        "nothing": streamed([]) if talk.stream else [answer(b"")],
        "no text": talk.answer("", output=0).steps(talk.api, stream=talk.stream),
        "compressed": gzipped(b"".join(parts) if talk.stream else whole, stream=talk.stream),
        "cut": [stream_head(), *map(chunk, parts[:-2]), End.CLOSE] if talk.stream else cut_off(whole),
        "cut at once": [stream_head(), *map(chunk, first), End.CLOSE] if talk.stream else cut_off(whole[:9]),
        "given up": streamed(gives_up) if talk.stream else [answer(b'{"choices": []}')],
        "given up twice": streamed(gives_up) if talk.stream else [answer(b"{}")],
        "only a comment": streamed([b": wait\n\n", b"data: [DONE]\n\n"]) if talk.stream else [answer(b" ")],
    }
    name = rng.choice([*endings])
    times = 2 if name.endswith("twice") or rng.random() < 0.3 else 1
    yield talk.case(f"{name}, {times} times", *[Reply(endings[name])] * times)


def summaries(talk: Talk) -> Iterator[Case]:
    """Fail summaries, also those of the conversation's own model, and let others succeed."""
    rng = talk.rng
    talk.policy = rng.choice(("continue", "continue", "fallback", NOTHING_AHEAD))
    talk.begin(_GROWING, budgets=BUDGETS[2:])
    failures: tuple[Sequence[Step], ...] = (
        _error({"error": {"message": "out of order"}}, FAILED),
        _error({"error": {"message": "slow down"}}, "429 Too Many Requests"),
        [answer(b"no JSON")],
        Answer("I'm sorry, but I can't help with that.").steps(talk.api, stream=False),
        Answer("").steps(talk.api, stream=False),
    )
    # Failures in a row would open the circuit breaker, and the end of its pause would depend on the time.
    summary = failures[talk.number % len(failures)]
    for turn in range(4):
        yield talk.case(f"turn {turn}", summary=summary if turn == talk.number % 4 else None)
        talk.grow(0.06)


def spending(talk: Talk) -> Iterator[Case]:
    """Spend a team's budget, and go on when it's spent."""
    talk.policy = "spending"
    talk.begin(talk.rng.choice((_SHORT, _LONG)))
    yield talk.case("spending", talk.reply(talk.answer("It costs.", output=400)))


Scenario = Callable[[Talk], Iterator[Case]]

SCENARIOS: tuple[tuple[str, int, Sequence[str], Scenario], ...] = (
    ("conversations", 27, APIS, plain),
    ("overflows", 38, APIS, overflow),
    ("refused output", 4, APIS, output_limit),
    ("refused reasoning", 6, ("messages", "responses"), reasoning),
    ("recall", 16, APIS, recall),
    ("early ends", 5, APIS, early_ends),
    ("summaries", 3, APIS, summaries),
    ("spending", 1, APIS, spending),
)
"""The name of each kind, its share of the requests in percent, its APIs, and what makes its requests."""


def generated(number_of: int, seed: int = 0) -> Iterator[Case]:
    """Send this number of generated requests, or a few more, in groups."""
    for name, share, apis, scenario in SCENARIOS:
        for api in apis:
            wanted = -(-number_of * share // (100 * len(apis)))
            talks = (Talk(name, api, n, random.Random(f"compare {seed} {name} {api} {n}")) for n in count())
            for number, case in enumerate(islice(chain.from_iterable(map(scenario, talks)), wanted)):
                part = number // GROUP
                yield replace(case, group=f"{case.group} {part + 1}") if part else case


def _overflow(talk: Talk, counted: int, limit: int) -> tuple[str, Sequence[Step]]:
    """Return a name and an answer for a prompt that is too long."""
    rng, api = talk.rng, talk.api
    refused = Refused(counted, limit, 400)
    names = [*(name for name, wording in WORDINGS.items() if talk.stream or not wording.only_streams)]
    name = rng.choice([*names, "413", "no limit", "error event", "error event", "window full"])
    if name == "413":
        error = {"message": "Request too large", "code": "request_too_large"}
        return name, _error({"error": error}, "413 Too Large")
    if name == "no limit":
        return name, _error(error_body(api, "The prompt is too long for this model.", "context_length_exceeded"))
    if name == "error event":
        message = f"prompt is too long: {counted} tokens > {limit} maximum"
        error = error_body(api, message, "context_length_exceeded")
        if not talk.stream:
            return name, _error(error, "200 OK")
        return name, streamed([event(failed_response(message) if api == "responses" else error)])
    if name == "window full":
        return name, _window_full(talk, counted)
    wording = WORDINGS[name]
    made = wording.body(refused)
    if isinstance(made, str):
        return name, streamed([made.encode()])
    return name, _error(made, "200 OK" if wording.status == 200 else "400 Bad Request")


def _error(error: Any, status: str = "400 Bad Request") -> Sequence[Step]:
    return [answer(json.dumps(error).encode(), status)]


def _window_full(talk: Talk, counted: int) -> Sequence[Step]:
    """Return an answer of status 200 without text, because the prompt fills the window."""
    ends: dict[str, dict[str, Any]] = {
        "chat": {"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}]},
        "responses": {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
        "messages": {"stop_reason": "model_context_window_exceeded"},
    }
    return talk.answer("", prompt=counted, output=1, more=ends[talk.api]).steps(talk.api, stream=talk.stream)


def _client_call(talk: Talk, turn: int) -> Call:
    return Call(f"own_{talk.number}_{turn}", TOOLS[turn % len(TOOLS)], json.dumps({"path": f"src/{talk.number}.py"}))


def _thinks(talk: Talk) -> dict[str, Any]:
    if talk.api == "messages":
        return {"thinking": {"type": "adaptive"}, "tools": tools("messages")}
    return {"store": False, "include": ["reasoning.encrypted_content"], "tools": tools("responses")}


def _has_reasoning(arrived: Arrived) -> bool:
    return b'"signature"' in arrived.body or b'"encrypted_content"' in arrived.body.replace(b"reasoning.encrypted", b"")


def _has_tool(arrived: Arrived) -> bool:
    return any(RECALL in json.dumps(tool) for tool in decoded(arrived).get("tools") or ())
