"""A large body has media if one of its messages or another field has. Known messages aren't searched again."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.dialects import request
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.messages.request import MessagesRequest
from proxy.dialects.request import SEARCHED, Request
from proxy.dialects.responses.request import ResponsesRequest
from proxy.tokens import has_remote_media

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
SPOKEN = {"role": "assistant", "audio": {"id": "audio_1"}}
LONG = "x" * SEARCHED
KINDS: tuple[type[Request], ...] = (ChatRequest, MessagesRequest, ResponsesRequest)

WRITERS: dict[str, Callable[[Any], str]] = {
    "compact": lambda body: json.dumps(body, separators=(",", ":")),
    "spaced": json.dumps,
    "pretty": lambda body: json.dumps(body, indent=2),
}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": LONG}, *parts]}


RESULTS = user({"type": "tool_result", "tool_use_id": "a"}, {"type": "tool_result", "tool_use_id": "b"})
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "texts": [user(), {"role": "assistant", "content": "Yes."}, user()],
    "an image first": [user(IMAGE), {"role": "assistant", "content": "Yes."}],
    "an image last": [user(), {"role": "assistant", "content": "Yes."}, user(IMAGE)],
    "speech": [user(), SPOKEN, user()],
    "only one": [user()],
    "only an image": [user(IMAGE)],
    "the same twice": [user(), user()],
    "results": [user(), RESULTS, user()],
    "an image in results": [user(), {**RESULTS, "content": [*RESULTS["content"], IMAGE]}],
    "a compaction": [user(IMAGE), {"role": "assistant", "content": [{"type": "compaction", "content": "…"}]}, user()],
    "a compaction item": [user(IMAGE), {"type": "compaction", "encrypted_content": "…"}, user()],
    "an image as text": [user({"type": "text", "text": json.dumps(IMAGE)})],
    "none": [],
}
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "speech wanted": {"audio": {"voice": "alloy"}},
    "a message's beginning": {"metadata": {"copy": user(), "image": IMAGE}},
    "an unlike field": {"tools": [{"type": "function", "name": "image", "note": LONG}]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
def test_media_anywhere_in_a_body_are_seen(
    kind: type[Request], write: Callable[[Any], str], messages: list[dict[str, Any]]
) -> None:
    sent = {kind.CONVERSATION: messages}
    for name, fields in FIELDS.items():
        for body in (fields | sent, sent | fields):
            raw = write({"model": "m", **body}).encode()
            assert kind.parse(raw).has_remote_media() is has_remote_media(raw), name


@pytest.mark.parametrize("kind", KINDS)
def test_known_messages_are_not_searched_again(kind: type[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [user({"type": "text", "text": f"{kind.__name__} {number}"}) for number in range(4)]
    bodies = [json.dumps({"model": "m", kind.CONVERSATION: texts[:count]}).encode() for count in (3, 4)]
    assert not kind.parse(bodies[0]).has_remote_media()
    searched: list[int] = []
    seen = lambda raw: bool(searched.append(len(raw)))  # noqa: E731 - as `has_remote_media`
    monkeypatch.setattr(request, "has_remote_media", seen)
    monkeypatch.setattr(request._media, "_compute", seen)
    assert not kind.parse(bodies[1]).has_remote_media()
    assert sum(searched) < len(json.dumps(texts[3])) + 100
    released = kind.parse(bodies[1])
    released.release()
    assert not released.received
