"""The requests: recorded sessions, odd spellings, and a catalogue of upstream errors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from http.client import responses
from itertools import islice
from pathlib import Path
from typing import Any

from bench.compare.case import Case, Reply
from bench.compare.setup import NOTHING_AHEAD, model
from tests.kit import three_apis, varied_answers
from tests.kit.odd_bodies import with_stream
from tests.kit.raw_upstream import Step, answer, streamed
from tests.kit.varied_bodies import bodies

CODING_WINDOWS = (32_768, 65_536, 131_072)
AIRLINE_WINDOWS = (8_192, *CODING_WINDOWS)
"""Tokens. The airline sessions are short, so only the smallest window makes the proxy compact them."""

DEFAULT_WINDOW = 131_072
"""Tokens, for lines of the catalogue that don't name a window."""

ANSWERS = 150
"""Odd answers for each API, for requests that stream and for those that don't."""

ERROR_TURNS = 30
"""Questions before the request that the upstream refuses, of about 260 tokens each with their answers."""


def recorded(folder: Path, most: int | None) -> Iterator[Case]:
    """Replay the recorded sessions turn by turn, over the other APIs with one window each.

    Send at most ``most`` requests for each of the two recordings, each API, and each window.
    """
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
    for api in ("responses", "messages"):
        yield from islice(_turns("coding", coding, CODING_WINDOWS[0], api), most)
        short = (case for number, one in enumerate(airline) for case in _turns(f"airline {number}", one, 8_192, api))
        yield from islice(short, most)


def _turns(
    name: str, messages: Sequence[Any], window: int, api: str = "chat", *, only_last: bool = False
) -> Iterator[Case]:
    """Yield a request for each answer of the assistant. Every other one asks for a stream."""
    raws = [json.dumps(message, ensure_ascii=False).encode() for message in messages]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
    for index in turns[-1:] if only_last else turns:
        stream = bool(index % 2)
        if api == "chat":
            body = three_apis.body(api, model(window), raws[:index], stream=stream)
        else:
            body = three_apis.request(api, model(window, api), messages[:index], stream=stream)
        yield Case(f"recorded sessions, {api}, {window // 1024}K", f"{name}, message {index}", body, api=api)


def fidelity(most: int | None) -> Iterator[Case]:
    """Send the odd spellings: with ``stream`` omitted, false, and true. ``most`` limits each API's spellings."""
    for api in three_apis.APIS:
        replies = {False: varied_answers.answers(api, ANSWERS), True: varied_answers.streams(api, ANSWERS)}
        for number, (name, body) in enumerate(islice(bodies(api), most)):
            for streams in (None, False, True):
                reply = Reply(replies[bool(streams)][number % ANSWERS].steps)
                sent = with_stream(body, streams)
                yield Case(f"fidelity bodies, {api}", f"{name}, stream {streams}", sent, replies=(reply,), api=api)


def errors(catalogue: Path, most: int | None) -> Iterator[Case]:
    """Send a conversation that the upstream refuses once with each line of the catalogue, and a stream that it
    refuses twice. Lines without a stream's transport are sent over all APIs."""
    with catalogue.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, most)]
    for api in three_apis.APIS:
        for row in rows:
            for streams in (False, True):
                if row["transport"] == "sse" and (not streams or api != "chat"):
                    continue
                yield _refused(row, api, streams=streams)


def _refused(row: Any, api: str, *, streams: bool) -> Case:
    name = f"{row['id']}{', streaming' if streams else ''}"
    words = random.Random(name)
    messages: list[Any] = [{"role": "system", "content": f"Case {name}."}]
    for number in range(ERROR_TURNS):
        text = " ".join(f"{words.choice(_WORDS)}{words.randrange(99)}" for _ in range(50))
        messages.append({"role": "user", "content": f"Question {number}: {text}"})
        messages.append({"role": "assistant", "content": f"Answer {number}: {text[::-1]}"})
    messages.append({"role": "user", "content": "And now?"})
    window = row.get("window_known") or DEFAULT_WINDOW
    field = {"max_output_tokens" if api == "responses" else "max_tokens": 4_000}
    body = three_apis.request(api, f"{model(window, api)}-{name.replace(', ', '-')}", messages, stream=streams, **field)
    replies = (Reply(_error(row)),) * (2 if streams else 1)
    return Case(f"overflow catalogue, {api}", name, body, NOTHING_AHEAD, replies, api)


def _error(row: Any) -> Sequence[Step]:
    headers = tuple((str(name), str(value)) for name, value in (row.get("headers") or {}).items())
    raw = row["body"].encode()
    if row["transport"] == "sse":
        return streamed([raw], headers=headers)
    status = row["http_status"]
    reason = responses.get(status, "Unknown")
    return [answer(raw, f"{status} {reason}", [("Content-Type", "application/json"), *headers])]


_WORDS = ("amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "iris", "juniper")
