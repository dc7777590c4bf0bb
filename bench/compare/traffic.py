"""The requests: recorded sessions, odd spellings, a catalogue of upstream errors, and generated conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import responses
from itertools import islice
from pathlib import Path
from typing import Any

from bench.compare.setup import BUDGETS, NOTHING_AHEAD, POLICIES, key, model, small_model
from tests.kit.client import JSON
from tests.kit.generator import ANY_DIRT, conversation, encoded
from tests.kit.odd_bodies import generated, hand_written, with_stream
from tests.kit.raw_upstream import Step, answer, streamed

CODING_WINDOWS = (32_768, 65_536, 131_072)
AIRLINE_WINDOWS = (8_192, *CODING_WINDOWS)
"""Tokens. The airline sessions are short, so only the smallest window makes the proxy compact them."""

DEFAULT_WINDOW = 131_072
"""Tokens, for lines of the catalogue that don't name a window."""

ERROR_TURNS = 30
"""Questions before the request that the upstream refuses, of about 260 tokens each with their answers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. ``answers`` are the upstream's first answers to the conversation; later ones are completions."""

    group: str
    name: str
    body: bytes
    policy: str = "default"
    answers: tuple[Sequence[Step], ...] = ()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers that the client sends."""
        return [JSON, ("authorization", f"Bearer {key(self.policy)}")]


def recorded(folder: Path, most: int | None) -> Iterator[Case]:
    """Replay the recorded sessions turn by turn. Send at most ``most`` requests for each of the two recordings
    and each window."""
    coding = json.loads((folder / "coding-a.json").read_text())["messages"]
    airline = [session["messages"] for session in json.loads((folder / "airline-40.json").read_text())]
    for window in AIRLINE_WINDOWS:
        if window in CODING_WINDOWS:
            yield from islice(_turns("coding", coding, window), most)
        cases = (
            case
            for number, messages in enumerate(airline)
            for case in _turns(f"airline {number}", messages, window, only_last=window in CODING_WINDOWS)
        )
        yield from islice(cases, most)


def _turns(name: str, messages: Sequence[Any], window: int, *, only_last: bool = False) -> Iterator[Case]:
    """Yield a request for each answer of the assistant. Every other one asks for a stream."""
    raws = [json.dumps(message, ensure_ascii=False).encode() for message in messages]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
    for index in turns[-1:] if only_last else turns:
        body = _body(raws[:index], model(window), stream=bool(index % 2))
        yield Case(f"recorded sessions, {window // 1024}K", f"{name}, message {index}", body)


def fidelity(most: int | None) -> Iterator[Case]:
    """Send the odd spellings: with ``stream`` omitted, false, and true. ``most`` limits the spellings."""
    bodies = islice([*hand_written(), *generated(100)], most)
    for number, body in enumerate(bodies):
        for streams in (None, False, True):
            sent = with_stream(body, streams)
            answers = STREAMS if streams else PLAIN
            yield Case(
                "fidelity bodies",
                f"body {number}, stream {streams}",
                sent,
                answers=(answers[number % len(answers)],),
            )


def errors(catalogue: Path, most: int | None) -> Iterator[Case]:
    """Send a conversation that the upstream refuses once with each line of the catalogue, and a stream that it
    refuses twice."""
    with catalogue.open(encoding="utf-8") as file:
        for line in islice(file, most):
            row = json.loads(line)
            for streams in (False, True):
                if row["transport"] == "sse" and not streams:
                    continue
                yield _refused(row, streams=streams)


def _refused(row: Any, *, streams: bool) -> Case:
    name = f"{row['id']}{', streaming' if streams else ''}"
    words = random.Random(name)
    messages: list[Any] = [{"role": "system", "content": f"Case {name}."}]
    for number in range(ERROR_TURNS):
        text = " ".join(f"{words.choice(_WORDS)}{words.randrange(99)}" for _ in range(50))
        messages.append({"role": "user", "content": f"Question {number}: {text}"})
        messages.append({"role": "assistant", "content": f"Answer {number}: {text[::-1]}"})
    messages.append({"role": "user", "content": "And now?"})
    raws = [json.dumps(message).encode() for message in messages]
    window = row.get("window_known") or DEFAULT_WINDOW
    body = _body(raws, f"{model(window)}-{name.replace(', ', '-')}", stream=streams, extra=b', "max_tokens": 4000')
    answers = (_error(row),) * (2 if streams else 1)
    return Case("overflow catalogue", name, body, NOTHING_AHEAD, answers)


def _error(row: Any) -> Sequence[Step]:
    headers = tuple((str(name), str(value)) for name, value in (row.get("headers") or {}).items())
    raw = row["body"].encode()
    if row["transport"] == "sse":
        return streamed([raw], headers=headers)
    status = row["http_status"]
    reason = responses.get(status, "Unknown")
    return [answer(raw, f"{status} {reason}", [("Content-Type", "application/json"), *headers])]


def conversations(count: int) -> Iterator[Case]:
    """Send ``count`` generated conversations under every policy, a third of them with faults. Every fourth comes
    in two turns, so that the proxy can use a stored summary."""
    policies = [*POLICIES]
    for number in range(count):
        rng = random.Random(f"compare {number}")
        budget = rng.choices(BUDGETS, (8, 3, 1))[0]
        dirt = ANY_DIRT if number % 3 == 2 else ""
        raws = encoded(conversation(rng, budget, dirt))
        target = small_model(budget, strict=number % 5 == 4)
        ends = (len(raws) * 2 // 3, len(raws)) if number % 4 == 0 and len(raws) > 6 else (len(raws),)
        for end in ends:
            body = _body(raws[:end], target, stream=number % 2 == 1)
            name = f"conversation {number}, {end} messages"
            yield Case("generated conversations", name, body, policies[number % len(policies)])


def _body(raws: Sequence[bytes], name: str, *, stream: bool, extra: bytes = b"") -> bytes:
    extra += b', "stream": true' if stream else b""
    return b'{"model": "%b", "messages": [%b], "temperature" : 1.0%b}' % (name.encode(), b", ".join(raws), extra)


_WORDS = ("amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "iris", "juniper")
_CHUNK = b'{"id":"c","choices":[{"index":0,"delta":{"content":"\xc3\xa9 \\u00e9\\/"},"finish_reason":null}],"x":1.10}'
PLAIN: tuple[Sequence[Step], ...] = (
    [answer(b'{"id":"x","choices":[{"index":0,"message":{"content":"\\u00e9\\/ \\ud800"}}],"x":-0.0,"y":1e400}')],
    [answer(b'\r\n { "choices" : [ ] ,\t"unknown" : {"error":null} }\n')],
    [answer(b"")],
    [answer(b"no JSON at all \xff\xfe")],
    [answer(b'{"a": 1.0}', "429 Too Many Requests", [("Retry-After", "1"), ("Set-Cookie", "a=1"), ("X-Empty", "")])],
)
STREAMS: tuple[Sequence[Step], ...] = (
    streamed([b"data: " + _CHUNK + b"\n\n", b"data: [DONE]\n\n"]),
    streamed([b": comment\n\nid: 7\nevent: chunk\nretry: 10\nda", b"ta: " + _CHUNK + b"\n\ndata:[DONE]\n\n"]),
    streamed([b"data: " + _CHUNK + b"\r\r", b"data: [DONE]\r\r"]),
    streamed([b"\xef\xbb\xbfdata: " + _CHUNK + b"\n\ndata: [DONE]"]),
    streamed([b"data: no JSON \xff\n\n"]),
)
