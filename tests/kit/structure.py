"""Send long damaged histories through a running proxy, and record the requests to the upstream."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.kit.messages import assistant, result, user, words
from tests.kit.scripted import PROFILE, behind, client
from tests.kit.upstream import Reply, StandIn

WINDOW = 16_000

SYSTEM = {"role": "system", "content": "Be brief."}
LAST = {"role": "user", "content": "And now?"}


@dataclass(frozen=True)
class Arrived:
    """The requests to the upstream: the conversation's messages, and the input of the summary model."""

    messages: list[Any]
    transcript: str

    @property
    def body(self) -> list[Any]:
        assert self.messages[0] == SYSTEM
        assert self.messages[1]["content"].startswith("<conversation_summary>")
        return self.messages[2:]

    def roles(self) -> list[str]:
        return [message["role"] for message in self.messages]


def call(id_: Any, name: str = "look") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}


def calls(*ids: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(id_) for id_ in ids], **more}


def sound(first: int, count: int) -> list[Any]:
    """Return this number of valid exchanges of about 1,100 tokens each."""
    messages: list[Any] = []
    for number in range(first, first + count):
        messages += [
            user(f"Question {number}: {words(400, f'q{number}x')}"),
            calls(f"sound-{number}"),
            result(f"sound-{number}", words(500, f"r{number}x")),
            assistant(f"Answer {number}: {words(150, f'a{number}x')}"),
        ]
    return messages


def history(dropped: Sequence[Any], kept: Sequence[Any], last: Sequence[Any] = (LAST,)) -> list[Any]:
    """A conversation over the trigger with some messages early in what is summarised, and some near its end."""
    return [SYSTEM, *sound(0, 2), *dropped, *sound(2, 12), *kept, *last]


def arrived(
    folder: Path,
    messages: Sequence[Any],
    *,
    status: int = 200,
    profile: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Arrived:
    """Send one request through a new proxy. ``status`` is the upstream's."""
    upstream = StandIn(window=WINDOW, max_output=2_000, responder=lambda body: Reply(content="fine"))
    folder.mkdir(exist_ok=True)
    known = {**PROFILE, **(profile or {})}
    with (
        behind(upstream, folder, profile=known, policy=policy) as url,
        client(url) as caller,
        contextlib.suppress(*[openai.BadRequestError] if status == 400 else []),
    ):
        raw = caller.chat.completions.with_raw_response.create(model="m", messages=list(messages))
        assert raw.headers["x-compaction"] == "compacted"
    received = upstream.conversations[-1]
    assert received.status == status
    assert len(json.dumps(received.body["messages"])) < len(json.dumps(messages)), "it was not compacted"
    assert all(not summary.faults for summary in upstream.summaries)
    transcript = "\n".join(m["content"] for s in upstream.summaries for m in s.body["messages"])
    return Arrived(received.body["messages"], transcript)
