"""Upstreams with a limit on images or files, which grows with a conversation, and tool loops with pictures."""

import base64
import contextlib
import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.overflow_wordings import MEDIA_NEAR_MISSES, MEDIA_WORDINGS
from tests.kit.scripted import PROFILE, protected, proxied
from tests.kit.three_apis import APIS, PATHS, Answer
from tests.kit.upstream import StandIn

MOST = 8
NOTE = "The compaction proxy left out"
MANY_IMAGES = "At least one of the image dimensions exceed max allowed size for many-image requests: 2000 pixels"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(number: int) -> str:
    """Return a picture of 400 by 300 in Base64. Each number has another one."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 400, 300, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + bytes([number % 256]) * 400) * 300))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")).decode()


def shown(api: str, text: str, numbers: range) -> dict[str, Any]:
    """Return a user's message with pictures."""
    kind = {"chat": "text", "messages": "text", "responses": "input_text"}[api]
    return {"role": "user", "content": [{"type": kind, "text": text}, *(picture(api, number) for number in numbers)]}


def picture(api: str, number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{png(number)}"
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": png(number)}
        return {"type": "image", "source": source}
    if api == "responses":
        return {"type": "input_image", "image_url": url}
    return {"type": "image_url", "image_url": {"url": url}}


def pictures(value: Any) -> list[Any]:
    """Return all pictures in a body, in order."""
    if isinstance(value, dict):
        if value.get("type") in ("image", "image_url", "input_image"):
            return [value]
        value = list(value.values())
    return [one for inner in value for one in pictures(inner)] if isinstance(value, list) else []


class Counting:
    """An upstream of all three APIs that refuses more than ``most`` pictures, in a wording."""

    def __init__(self, wording: str, most: int = MOST) -> None:
        self.wording = wording
        self.most = most
        self.in_stream = False
        self.requests: list[tuple[int, dict[str, Any]]] = []
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        if (count := len(pictures(body))) > self.most:
            text = self.wording.format(most=self.most, count=count, nouns="images", noun="image")
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": text}}
            self.requests.append((400, body))
            if self.in_stream and body.get("stream"):
                return Response(f"event: error\ndata: {json.dumps(error)}\n\n", media_type="text/event-stream")
            return Response(json.dumps(error), 400, media_type="application/json")
        self.requests.append((200, body))
        stream = bool(body.get("stream"))
        events, whole = Answer("I see.").parts(api, stream=stream)
        return Response(b"".join(events) or whole, media_type="text/event-stream" if stream else "application/json")

    @property
    def statuses(self) -> list[int]:
        return [status for status, _ in self.requests]

    @property
    def sent(self) -> list[dict[str, Any]]:
        return [body for status, body in self.requests if status == 200]


@contextlib.contextmanager
def behind(upstream: Counting, api: str, folder: Path, **policy: Any) -> Iterator[Any]:
    """Return a function that sends messages to a proxy."""
    with serve(upstream.app) as address:
        provider = "anthropic" if api == "messages" else "openai"
        settings = {
            "upstreams": {"main": {"provider": provider, "base_url": f"{address}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": {**PROFILE, "context_window": 400_000}}],
            "policies": {"default": policy},
        }
        with proxied(settings, folder) as url, httpx.Client(trust_env=False, timeout=30) as http:

            def send(messages: list[Any], *, stream: bool = False, model: str = "m") -> httpx.Response:
                units = {"input": messages, "store": False} if api == "responses" else {"messages": messages}
                body = {"model": model, "stream": stream, **units, **({"max_tokens": 50} if api == "messages" else {})}
                return http.post(url + PATHS[api], json=body, headers={"authorization": "Bearer k", "x-api-key": "k"})

            yield send


def conversation(api: str, turns: int) -> list[Any]:
    said = ({"role": "assistant", "content": "I see."} for _ in itertools.count())
    asked = [shown(api, f"Screenshot {number}.", range(number, number + 1)) for number in range(turns)]
    return [one for pair in zip(asked, said, strict=False) for one in pair][:-1]


@pytest.mark.parametrize(("api", "stream"), combined(2, APIS, [False, True]))
def test_a_conversation_goes_on_past_the_limit(api: str, stream: bool, tmp_path: Path) -> None:
    upstream = Counting(MEDIA_WORDINGS[0])
    upstream.in_stream = stream
    messages = conversation(api, 3 * MOST)
    with behind(upstream, api, tmp_path) as send:
        for turns in range(1, 3 * MOST + 1):
            answer = send(messages[: 2 * turns - 1], stream=stream)
            assert answer.status_code == 200, answer.text
            assert b"invalid_request_error" not in answer.content
            last = pictures(upstream.sent[-1])
            assert pictures(messages[: 2 * turns - 1])[-len(last) :] == last, "the newest pictures stay, unchanged"
        text = {"role": "user", "content": "And now?"}
        assert send([*messages, {"role": "assistant", "content": "I see."}, text]).status_code == 200
    assert upstream.statuses.count(400) == 1, "learned once"
    units = [body.get("messages", body.get("input")) for body in upstream.sent]
    breaks = sum(after[: len(before)] != before for before, after in itertools.pairwise(units))
    assert breaks <= 2 * MOST // (MOST // 4) + 1, "most requests begin like the one before"
    assert NOTE in json.dumps(units[-1])


@pytest.mark.parametrize("wording", combined(3, MEDIA_WORDINGS))
def test_every_wording(wording: str, tmp_path: Path) -> None:
    upstream = Counting(wording)
    with behind(upstream, "chat", tmp_path) as send:
        assert send(conversation("chat", 2 * MOST)).status_code == 200
        assert send(conversation("chat", 2 * MOST)).headers["x-compaction-steps"] == "media"
    assert upstream.statuses == [400, 200, 200]


@pytest.mark.parametrize("wording", [*MEDIA_NEAR_MISSES[:6], "Too many images"])
def test_other_refusals_go_back_after_one_request(wording: str, tmp_path: Path) -> None:
    upstream = Counting(wording)
    with behind(upstream, "chat", tmp_path) as send:
        answer = send(conversation("chat", 2 * MOST))
    assert (answer.status_code, upstream.statuses) == (400, [400])
    assert answer.json()["error"]["message"] == wording


@pytest.mark.parametrize("api", APIS)
def test_one_message_with_forty_pictures(api: str, tmp_path: Path) -> None:
    upstream, message = Counting(MEDIA_WORDINGS[5]), shown(api, "Compare them.", range(40))
    with behind(upstream, api, tmp_path) as send:
        assert send([message]).status_code == 200
    sent = upstream.sent[-1].get("messages", upstream.sent[-1].get("input"))[0]["content"]
    kept = pictures(sent)
    assert sent[0] == message["content"][0]
    assert MOST * 3 // 4 < len(kept) <= MOST
    assert sent[-len(kept) :] == message["content"][-len(kept) :]
    assert sum(NOTE in str(part.get("text")) for part in sent) == 40 - len(kept)


def test_twelve_messages_with_ten_pictures_each(tmp_path: Path) -> None:
    upstream = Counting(MEDIA_WORDINGS[2], most=100)
    messages = conversation("messages", 6)
    messages = [{**one, "content": shown("messages", "See.", range(20))["content"]} for one in messages[::2]]
    messages = [one for message in messages for one in (message, {"role": "assistant", "content": "I see."})][:-1]
    with behind(upstream, "messages", tmp_path) as send:
        assert send(messages).status_code == 200
    assert 75 < len(pictures(upstream.sent[-1])) <= 100


def test_a_policy_that_keeps_media_gets_the_refusal(tmp_path: Path) -> None:
    upstream = Counting(MEDIA_WORDINGS[0])
    with behind(upstream, "chat", tmp_path, media=None) as send:
        assert send(conversation("chat", 2 * MOST)).status_code == 400
    assert upstream.statuses == [400]


def test_a_limit_on_large_pictures_holds_for_the_conversation(tmp_path: Path) -> None:
    upstream = Counting(MANY_IMAGES, most=20)
    other = [{"role": "user", "content": "Another conversation."}, *conversation("chat", 24)]
    with behind(upstream, "chat", tmp_path) as send:
        for turns in (24, 24):
            assert send(conversation("chat", turns)).status_code == 200
        assert upstream.statuses == [400, 200, 200]
        assert send(other).status_code == 200
    assert upstream.statuses == [400, 200, 200, 400, 200], "other conversations may have more small pictures"


def test_pinned_messages_keep_their_pictures(tmp_path: Path) -> None:
    upstream = Counting(MEDIA_WORDINGS[0])
    with behind(upstream, "chat", tmp_path, pinned=["Screenshot 0."]) as send:
        assert send(conversation("chat", 2 * MOST)).status_code == 200
        everything = [shown("chat", "Screenshot 0.", range(2 * MOST))]
        assert send(everything).status_code == 400
    first = upstream.sent[-1]["messages"][0]
    assert first == conversation("chat", 1)[0]
    assert upstream.statuses == [400, 200, 400], "a request that can't have fewer is sent once"


PICTURE = {
    "type": "image_url",
    "image_url": {
        "url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
        "awAAAABJRU5ErkJggg=="
    },
}


@pytest.mark.parametrize(("model", "window", "pictures"), [("small-vl", 8_000, 2), ("gpt-4o", 8_000, 9)])
def test_the_text_of_the_task_stays_beside_its_pictures(model: str, window: int, pictures: int, tmp_path: Path) -> None:
    text = "Book a table. Never confirm without asking me. " * 20
    task = {"role": "user", "content": [{"type": "text", "text": text}, *[PICTURE] * pictures]}
    messages: list[object] = [task]
    for number in range(8):
        function = {"name": "f", "arguments": "{}"}
        calls = [{"id": f"c{number}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number} " * 500})
    upstream = StandIn(window=1_000_000)
    with protected(upstream, tmp_path, window, {"evict_results": None}) as caller:
        raw = caller.chat.completions.with_raw_response.create(model=model, messages=messages)  # type: ignore[arg-type]
    assert raw.headers["x-compaction"] == "compacted"
    assert "summary" in raw.headers["x-compaction-steps"]
    assert task in upstream.conversations[-1].body["messages"]
