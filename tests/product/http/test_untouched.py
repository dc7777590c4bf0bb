"""Requests that need no change, and their answers, pass through all three APIs byte for byte, streamed and not.

Streams of chat completions differ in one field, by which the proxy asks for their usage.
"""

from itertools import cycle

import pytest

from proxy.dialects.chat.answers import without_usage
from tests.kit.client import CHAT, JSON, Got, StartProxy, ask
from tests.kit.combinations import combined
from tests.kit.odd_bodies import with_stream
from tests.kit.raw_upstream import Arrived, Stage, Step
from tests.kit.varied_answers import Varied, answers, streams
from tests.kit.varied_bodies import bodies

LEAST = 200
"""Bodies, and answers of each kind, for each API."""

PATHS = {"chat": CHAT, "responses": "/v1/responses", "messages": "/v1/messages"}
QUERIES = ("", "?beta=true", "?beta=true&x=%C3%A9%2F+%20&x=2")
HEADERS = (
    ("accept", "text/event-stream"),
    ("anthropic-beta", "context-management-2025-06-27,unknown-2031-01-01"),
    ("anthropic-beta", "interleaved-thinking-2025-05-14"),
    ("anthropic-version", "2023-06-01"),
    ("openai-beta", "responses=v1; é".encode().decode("latin-1")),
    ("x-unknown", "1"),
)
ASKED = b',"stream_options":{"include_usage":true}'
SPEAKS_ALL = {"upstreams": {"main": {"speaks": list(PATHS)}}}


@pytest.mark.parametrize(("api", "streaming"), combined(2, PATHS, [False, True]))
def test_bodies_and_answers_are_equal_to_the_byte(
    start_proxy: StartProxy, stage: Stage, api: str, *, streaming: bool
) -> None:
    sent = bodies(api)
    count = len(sent)
    given = streams(api, count) if streaming else answers(api, count)
    assert len({body for _, body in sent}) >= LEAST
    assert len(set(given)) >= LEAST
    current = given[0]

    def script(_: Arrived) -> list[Step]:
        return current.steps

    faults = []
    with stage(script) as upstream:
        url = start_proxy(upstream.url, SPEAKS_ALL)
        for (name, text), query, current in zip(sent, cycle(QUERIES), given, strict=False):
            body = with_stream(text, streaming or None)
            before = len(upstream.arrived)
            got = ask(url, PATHS[api] + query, body, [JSON, *HEADERS])
            hidden = any(ASKED in one.body for one in upstream.arrived[before:]) and ASKED not in body
            wrong = [
                *_changes(upstream.arrived[before:], PATHS[api] + query, body),
                *_differences(got, current, hidden=hidden),
            ]
            faults += [f"{name}: {fault}" for fault in wrong]
    assert faults == [], "\n".join(faults)


def _changes(arrived: list[Arrived], target: str, body: bytes) -> list[str]:
    """Return the differences between a request that the client sent and the one that the upstream got."""
    if len(arrived) != 1:
        return [f"the upstream got {len(arrived)} requests"]
    (one,) = arrived
    names = {name for name, _ in HEADERS}
    headers = [(name, value) for name, value in one.headers if name in names]
    sent = one.body if ASKED in body else one.body.replace(ASKED, b"")
    same = {"target": one.target == target, "headers": headers == list(HEADERS), "body": sent == body}
    return [f"the upstream got another {what}" for what, equal in same.items() if not equal]


def _differences(got: Got, given: Varied, *, hidden: bool) -> list[str]:
    """Return the differences between the upstream's answer and the client's."""
    shown = {
        "status": (got.status, int(given.status[:3])),
        "content type": (got.header("content-type"), given.content_type),
        "encoding": (got.header("content-encoding"), given.encoding),
        "x-request-id": (got.header("x-request-id"), "req_é".encode().decode("latin-1")),
        "verdict": (got.header("x-compaction") in ("none", "unsupported"), True),
        "retries": (got.header("x-compaction-retries"), "0"),
        "body": (got.body, without_usage(given.body) if hidden else given.body),
        "whole": (got.whole, True),
    }
    return [f"the client got {is_!r} as {what}, not {was!r}" for what, (is_, was) in shown.items() if is_ != was]
