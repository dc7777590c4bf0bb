"""Upstreams with a limit on messages or bytes, independent of tokens."""

import base64
import itertools
import json
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from tests.kit.scripted import behind, client
from tests.kit.upstream import Received, StandIn

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

WINDOW = 400_000
MIB = 1 << 20


class Bounded(StandIn):
    """A stand-in that refuses more messages, or more bytes, in the words of OpenAI and of a gateway."""

    def __init__(self, *, messages: int | None = None, size: int | None = None, window: int = WINDOW) -> None:
        super().__init__(window=window)
        self.most_messages = messages
        self.most_bytes = size

    async def _answer(self, received: Received, receive: Receive) -> Response:
        count = len(json.loads(received.raw)["messages"])
        if self.most_bytes is not None and len(received.raw) > self.most_bytes:
            return JSONResponse({"error": {"type": "request_too_large", "message": "Request too large"}}, 413)
        if self.most_messages is not None and count > self.most_messages:
            message = (
                f"Invalid 'messages': array too long. Expected an array with maximum length {self.most_messages}, "
                f"but got an array with length {count} instead."
            )
            error = {
                "message": message,
                "type": "invalid_request_error",
                "param": "messages",
                "code": "array_above_max_length",
            }
            return JSONResponse({"error": error}, 400)
        return await super()._answer(received, receive)


@contextmanager
def bounded(
    upstream: Bounded, folder: Path, *, knows: bool = True, **policy: Any
) -> Iterator[tuple[openai.OpenAI, str]]:
    """A client of a proxy, and the proxy's address; its profile may know what the upstream takes."""
    profile: dict[str, Any] = {
        "context_window": upstream.window,
        "max_output_tokens": upstream.max_output,
        "tokenizer": "o200k_base",
    }
    if knows and upstream.most_messages is not None:
        profile["max_messages"] = upstream.most_messages
    if knows and upstream.most_bytes is not None:
        profile["max_bytes"] = upstream.most_bytes
    with behind(upstream, folder, profile=profile, policy=policy) as url, client(url) as caller:
        yield caller, url


def tiny(count: int, more: str = "") -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(count):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": f"Line {number}.{more}"})
    return messages if messages[-1]["role"] == "user" else [*messages, {"role": "user", "content": "What now?"}]


def png(size: int, seed: int) -> str:
    """Return a valid picture of about this many bytes in Base64, which no compression makes smaller."""
    side = int((size * 3 / 4) ** 0.5)
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(side) for _ in range(side))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def seen(number: int, size: int) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": png(size, number)}}
    return {"role": "user", "content": [{"type": "text", "text": f"Look at picture {number}."}, picture]}


def pictures(count: int, size: int) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(count):
        messages += [seen(number, size), {"role": "assistant", "content": f"I see number {number}."}]
    return messages[:-1]


def archived(url: str, message_text: str) -> list[Any]:
    found = []
    with httpx.Client(trust_env=False) as http:
        for word in message_text.replace(".", " ").replace("]", " ").split():
            if len(word) == 20 and all(digit in "0123456789abcdef" for digit in word):
                answer = http.get(f"{url}/compaction/archive/{word}", headers={"authorization": "Bearer sk-client"})
                if answer.status_code == 200:
                    found += answer.json()["messages"]
    return found


def test_three_thousand_messages_for_an_upstream_that_takes_2048(tmp_path: Path) -> None:
    upstream = Bounded(messages=2_048)
    messages = tiny(3_000)
    with bounded(upstream, tmp_path) as (caller, url):
        answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages)
        sent = upstream.conversations[-1].body["messages"]
        assert answer.headers["x-compaction"] == "compacted"
        kept = archived(url, str(sent[1]["content"]))
    assert upstream.faults == []
    assert {received.status for received in upstream.requests} == {200}
    assert len(sent) <= 2_048
    assert sent[0] == messages[0]
    assert sent[2:] == messages[-len(sent[2:]) :]
    dropped = messages[1 : len(messages) - len(sent[2:])]
    assert kept == dropped, "what was taken out is in the archive, whole"


def test_a_conversation_that_grows_past_the_bound_begins_anew_seldom(tmp_path: Path) -> None:
    upstream = Bounded(messages=100)
    messages = tiny(300)
    with bounded(upstream, tmp_path, prepare=None) as (caller, _):
        for end in range(80, len(messages) + 1, 4):
            assert caller.chat.completions.create(
                model="m", messages=[], extra_body={"messages": messages[:end]}
            ).choices
    assert {received.status for received in upstream.conversations} == {200}
    assert max(len(received.body["messages"]) for received in upstream.conversations) <= 100
    prompts = [received.body["messages"] for received in upstream.conversations]
    breaks = sum(after[: len(before)] != before for before, after in itertools.pairwise(prompts))
    assert 4 <= breaks <= 8, "each checkpoint leaves room for a third of the bound or so"
    assert len(upstream.summaries) == breaks


def test_pictures_of_three_mebibytes_for_an_upstream_that_takes_two(tmp_path: Path) -> None:
    upstream = Bounded(size=2 * MIB)
    messages = pictures(12, MIB // 4)
    assert len(json.dumps(messages)) > 3 * MIB
    with bounded(upstream, tmp_path) as (caller, url):
        answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages)
        received = upstream.conversations[-1]
        labels = " ".join(json.dumps(message) for message in received.body["messages"])
        kept = archived(url, labels.replace('"', " "))
    assert answer.headers["x-compaction-steps"] == "media", "pictures alone are enough"
    assert upstream.faults == []
    assert {received.status for received in upstream.requests} == {200}
    assert len(received.raw) <= 2 * MIB
    assert received.body["messages"][-1] == messages[-1], "the newest picture is there"
    changed = [before for before, after in zip(messages, received.body["messages"], strict=True) if before != after]
    assert changed == [message for message in messages if message["role"] == "user"][: len(changed)], "oldest first"
    assert all(message in kept for message in changed)


def test_one_result_of_too_many_bytes(tmp_path: Path) -> None:
    upstream = Bounded(size=200_000)
    function = {"name": "read_file", "arguments": "{}"}
    messages: list[Any] = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "\n".join(f"line {number}" for number in range(60_000))},
    ]
    with bounded(upstream, tmp_path) as (caller, url):
        assert caller.chat.completions.create(model="m", messages=messages).choices
        sent = upstream.conversations[-1]
        assert messages[2] in archived(url, sent.body["messages"][2]["content"])
    assert sent.status == 200
    assert len(sent.raw) <= 200_000


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_have_fewer_bytes_is_sent_and_the_refusal_goes_back(stream: bool, tmp_path: Path) -> None:
    upstream = Bounded(size=MIB)
    messages = [*pictures(4, MIB // 8), {"role": "assistant", "content": "Well?"}, seen(99, 2 * MIB)]
    with bounded(upstream, tmp_path) as (caller, _), pytest.raises(openai.APIStatusError) as refused:
        caller.chat.completions.create(model="m", messages=messages, stream=stream)
    assert refused.value.status_code == 413
    assert refused.value.body == {"type": "request_too_large", "message": "Request too large"}
    assert [received.status for received in upstream.requests] == [413], "sent once, and no summary was asked for"
    assert json.loads(upstream.requests[0].raw)["messages"] == messages
