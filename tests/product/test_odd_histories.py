"""Histories that no upstream would take, or that another tool has been at, as they leave the proxy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from proxy.demo.upstream import Reply, StandIn
from proxy.demo.validity import faults
from tests.kit.scripted import protected

WINDOW = 8_000


def last_prompt(tmp_path: Path, messages: list[Any]) -> tuple[str, list[Any], StandIn]:
    """What was done to a request, the messages that reached the upstream, and the upstream."""
    upstream = StandIn(window=WINDOW, responder=lambda body: Reply(content="fine"))
    with protected(upstream, tmp_path, WINDOW) as client, httpx.Client(trust_env=False, timeout=60) as http:
        url = f"{client.base_url}chat/completions"
        answer = http.post(url, json={"model": "m", "messages": messages}, headers={"authorization": "Bearer k"})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-compaction"], upstream.conversations[-1].body["messages"], upstream


def exchange(number: int, *, answered: bool = True) -> list[Any]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if answered:
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"line {number}\n" * 200})
    return messages


def test_what_is_compacted_anyway_is_put_right_on_the_way(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for number in range(12):
        messages += exchange(number, answered=number % 4 != 1)
    messages.append({"role": "tool", "tool_call_id": "nobody", "content": "stray"})
    messages.append({"role": "user", "content": "and now?"})
    assert faults({"messages": messages})
    done, sent, upstream = last_prompt(tmp_path, messages)
    assert done == "compacted"
    assert upstream.faults == []
    assert sent[-1] == messages[-1]


def test_what_is_not_compacted_is_left_for_the_upstream_to_judge(tmp_path: Path) -> None:
    messages = [{"role": "tool", "tool_call_id": "nobody", "content": "stray"}]
    upstream = StandIn(window=WINDOW, responder=lambda body: Reply(content="fine"))
    with protected(upstream, tmp_path, WINDOW) as client, httpx.Client(trust_env=False) as http:
        url = f"{client.base_url}chat/completions"
        answer = http.post(url, json={"model": "m", "messages": messages}, headers={"authorization": "Bearer k"})
    assert (answer.status_code, answer.headers["x-compaction"]) == (400, "none")
    assert len(upstream.faults) == 1


def test_another_tools_summary_is_folded_in_and_not_quoted_as_the_users_words(tmp_path: Path) -> None:
    old = "Here is a summary of the conversation to date:\n\nThe build of VAULT-77 was repaired."
    messages: list[Any] = [{"role": "user", "content": old}, {"role": "user", "content": "go on"}]
    for number in range(12):
        messages += exchange(number)
    done, sent, upstream = last_prompt(tmp_path, messages)
    assert done == "compacted"
    note = sent[0]["content"]
    assert note.startswith("<conversation_summary>")
    quoted = note.split("<user_message>")[1:]
    assert not any("summary of the conversation" in block for block in quoted)
    assert sent[1] == messages[1], "the user's own newest words stay as they are"
    transcript = json.dumps(upstream.summaries[0].body)
    assert "[summary of earlier messages, by" in transcript
    assert "VAULT-77" in note
