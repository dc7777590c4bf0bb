"""Each cause of a retry has its own limit, and the record names the causes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.recall.tool import NAME
from tests.kit.front_door import Front, Seen, always, front, key, long_talk, tokens
from tests.kit.upstream import Reply, ToolCall
from tests.kit.waiting import until

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ON = {"recall": {"tool": "auto"}}


def refusal(message: str, **fields: Any) -> Reply:
    return Reply(status=400, error={"error": {"message": message, "type": "invalid_request_error", **fields}})


NO_TOOL = refusal("tools: unknown tool")
TOO_LONG = refusal("The prompt is too long.", code="context_length_exceeded")

FINE = Reply(content="Fine.")
NOTES = always(Reply(content="Goal: NOTES."))


def asked(door: Front, *replies: Reply, messages: list[Any] | None = None, **fields: Any) -> Seen:
    """Return a turn in which the upstream gives these replies, one for each request."""
    waiting = list(replies)
    with door.scripted(responder=lambda body: waiting.pop(0)):
        seen = door.ask(messages or long_talk(), tools=TOOLS, **fields)
    assert not waiting
    return seen


def attempts(door: Front, seen: Seen) -> list[dict[str, Any]]:
    return list(record(door, seen)["attempts"])


def record(door: Front, seen: Seen) -> dict[str, Any]:
    address = f"{door.url}/compaction/requests/{seen.headers['x-compaction-id']}"
    headers = {"authorization": f"Bearer {key('default')}"}
    found: list[httpx.Response] = []

    def written() -> bool:
        found[:] = [httpx.get(address, headers=headers, trust_env=False)]
        return found[0].status_code == 200

    assert until(written)
    return dict(found[0].json())


def has_tool(body: dict[str, Any]) -> bool:
    return NAME in json.dumps(body["tools"])


@pytest.mark.parametrize("most", [1, 2])
def test_a_refused_tool_leaves_all_overflow_retries(tmp_path: Path, most: int) -> None:
    with front({"default": {**ON, "overflow_retries": most}}, tmp_path) as door:
        seen = asked(door, NO_TOOL, *[TOO_LONG] * most, FINE)
    assert seen.status == 200
    assert seen.headers["x-compaction-retries"] == str(most + 1)
    assert [has_tool(request.body) for request in seen.conversations] == [True] + [False] * (most + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_its_refused_tool_is_measured_without_it(tmp_path: Path, stream: bool) -> None:
    with front({"default": ON}, tmp_path) as door:
        seen = asked(door, NO_TOOL, FINE, stream=stream)
        first, second = attempts(door, seen)
    tool = json.dumps(seen.conversations[0].body["tools"][-1])
    assert first["tokens"] - second["tokens"] == pytest.approx(tokens(tool), rel=0.2)
    assert int(seen.headers["x-compaction-tokens-after"]) == second["tokens"]


def test_a_request_confirms_a_limit_once(tmp_path: Path) -> None:
    """A limit that an earlier response contradicts is believed after two requests."""
    stated = "This model's maximum context length is 2500 tokens. Your messages have 5000 tokens."
    far_below = refusal(stated, code="context_length_exceeded")
    packed = Reply(content="Fine.", headers={"content-encoding": "gzip"})
    with front({"default": ON}, tmp_path) as door, door.scripted(summariser=NOTES):
        asked(door, FINE, max_tokens=100)
        asked(door, far_below, packed, FINE, max_tokens=100)
        third = asked(door, far_below, FINE, max_tokens=100)
        fourth = asked(door, FINE, max_tokens=100)
    assert third.conversations[0].tokens > 2_500, "one request isn't two"
    assert fourth.conversations[0].tokens < 2_500


ODD = "an odd word that no record may have " * 3


@pytest.mark.parametrize(
    ("reply", "names"),
    [
        (
            refusal(ODD, code="missing_id", param="messages.[3].tool_call_id"),
            ("missing_id", "messages.[3].tool_call_id"),
        ),
        (refusal(ODD, code=ODD, param="p" * 65), (None, None)),
        (Reply(error={"error": {"message": ODD, "type": "invalid_request_error", "code": 429}}), ("429", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_record_names_the_upstreams_error(
    tmp_path: Path, reply: Reply, names: tuple[str | None, str | None], stream: bool
) -> None:
    with front({"default": {}}, tmp_path) as door:
        seen = asked(door, reply, messages=long_talk()[-1:], stream=stream)
        found = record(door, seen)
    code, param = names
    assert found["attempts"][0]["error"] == {"code": code, "type": "invalid_request_error", "param": param}
    assert "odd word" not in json.dumps(found)


def metrics(door: Front, name: str) -> Counter[str]:
    """Return the sums of a metric by its first label. The process may have measured other upstreams before."""
    values: Counter[str] = Counter()
    for line in httpx.get(f"{door.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith(f"{name}{{"):
            values[line.split('"')[1]] += int(float(line.rsplit(" ", 1)[1]))
    return values


RETRIES, OVERFLOWS = "compaction_retries_total", "compaction_overflows_total"
RECALL = Reply(tool_calls=(ToolCall("r1", NAME, '{"query": "q1x", "id": null, "offset": null}'),))


@pytest.mark.parametrize(
    ("replies", "retries", "overflows", "trigger"),
    [
        ([RECALL, RECALL, FINE], {}, {}, "fraction"),
        ([NO_TOOL, FINE], {"added": 1}, {}, "fraction"),
        ([TOO_LONG, RECALL, FINE], {"overflow": 1}, {"recovered": 1}, "fraction"),
        ([TOO_LONG, TOO_LONG, TOO_LONG], {"overflow": 2}, {"returned": 1}, "fraction"),
    ],
)
def test_metrics_and_the_record_name_the_causes(
    tmp_path: Path, replies: list[Reply], retries: dict[str, int], overflows: dict[str, int], trigger: str
) -> None:
    with front({"default": ON}, tmp_path) as door, door.scripted(summariser=NOTES):
        before = [metrics(door, name) for name in (RETRIES, OVERFLOWS)]
        seen = asked(door, *replies)
        found = record(door, seen)
        after = [metrics(door, name) for name in (RETRIES, OVERFLOWS)]
    assert [new - old for old, new in zip(before, after, strict=True)] == [retries, overflows]
    assert found["retries"] == sum(retries.values()) == int(seen.headers["x-compaction-retries"])
    assert found["reason"]["trigger"] == trigger
    assert "The condition" not in found["reason"]["text"]
