"""An agent's long session through the official client, at an upstream that refuses as OpenAI does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit.scripted import protected
from tests.kit.upstream import Reply, StandIn, ToolCall

TURNS, TURNS_FULL = 120, 400
"""Turns of the session, without ``--full`` and with it."""
WINDOW = 16_000
HUGE_EVERY = 20
HUGE_BYTES = 200_000

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]},
        },
    }
    for name in ("read", "search", "run")
]


def decide(body: dict[str, Any]) -> Reply:
    """A call after a user's message, every fourth time three in parallel, then an answer in words."""
    last = body["messages"][-1]
    if last["role"] == "user":
        number = int(last["content"].split()[1])
        names = ["read", "search", "run"][: 3 if number % 4 == 0 else 1]
        calls = [
            ToolCall(f"call_{number}_{n}", name, json.dumps({"target": f"src/part_{number}.py"}))
            for n, name in enumerate(names)
        ]
        return Reply(content=f"I look at part {number}.", tool_calls=tuple(calls))
    return Reply(content="Done: " + " ".join(f"step{n}" for n in range(30)))


def result(number: int, name: str) -> str:
    """A tool's result: as a rule 0.5 to 4 KB, every twentieth turn 200 KB."""
    size = (
        HUGE_BYTES
        if number % HUGE_EVERY == 0 and name == "read"
        else random.Random(f"{number}{name}").randint(500, 4000)
    )
    lines = (f"{number}:{line} value of {name} = {line * 7919 % 10007}" for line in range(size // 30))
    return "\n".join(lines)


def ask(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    # The client transforms ``messages`` needlessly. It sends ``extra_body`` unchanged.
    asked: Any = {"model": "agent-model", "messages": [], "tools": TOOLS, "extra_body": {"messages": messages}}
    if not stream:
        answer = client.chat.completions.create(**asked)
        dumped: dict[str, Any] = answer.choices[0].message.model_dump(
            exclude_none=True, exclude={"refusal", "annotations"}
        )
        return dumped
    with client.chat.completions.stream(**asked) as events:
        final = events.get_final_completion()
    message: dict[str, Any] = final.choices[0].message.model_dump(exclude_none=True, exclude={"refusal", "parsed"})
    for call in message.get("tool_calls", []):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return message


@pytest.mark.long
def test_hundreds_of_turns_with_huge_results_at_16k(tmp_path: Path, full: bool) -> None:
    """Run 120 turns, or 400 with ``--full``."""
    wanted = TURNS_FULL if full else TURNS
    upstream = StandIn(window=WINDOW, responder=decide)
    messages: list[Any] = [{"role": "system", "content": "You are a careful engineer. Use the tools."}]
    with protected(upstream, tmp_path, WINDOW) as client:
        turns = number = 0
        while turns < wanted:
            number += 1
            messages.append({"role": "user", "content": f"Part {number} please; the ticket is PART-{1000 + number}."})
            while turns < wanted:
                answer = ask(client, messages, stream=turns % 2 == 1)
                turns += 1
                messages.append(answer)
                if not answer.get("tool_calls"):
                    break
                for call in answer["tool_calls"]:
                    content = result(number, call["function"]["name"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    statuses = [request.status for request in upstream.requests]
    assert len(upstream.conversations) == wanted, "every turn reached the upstream once"
    assert set(statuses) == {200}
    assert upstream.faults == []
    assert max(request.tokens for request in upstream.requests) <= WINDOW
    assert sum(len(m["content"]) > 150_000 for m in messages if m["role"] == "tool") >= (9 if full else 2)
    # A huge result counts as new conversation once over, up to a window: no summary can be owed to more of it.
    new = sum(min(upstream.counter.message(message), WINDOW) for message in messages)
    assert 1 <= len(upstream.summaries) <= new / (0.6 * WINDOW)
