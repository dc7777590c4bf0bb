"""The counts of the check of real clients, with clients that need no installation."""

import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.recall.tool import NAME
from proxy.server.loopback import serve
from soak.clients import page
from soak.clients.command import TURNS, WINDOW, Row, check
from soak.clients.programs import CLIENTS, DRIVERS, TASK, Client, Tool
from soak.clients.scripts import DONE, WAYS, Loop, Reading
from soak.clients.strict_chat import StrictChat
from tests.kit.agent_script import Step
from tests.kit.upstream import ToolCall

SESSION = """
import json, os, openai
from tests.kit.agent_sessions import responses_session
client = openai.OpenAI(max_retries=0)
for turn in responses_session(client, int(os.environ["SOAK_TURNS"]), "references", "gpt-4.1"):
    print(json.dumps({"turn": turn, "error": None}), flush=True)
"""
FAILING = """print('{"turn": 1, "error": "RuntimeError: no"}')\nraise SystemExit(1)"""


def python(code: str, tool: Tool | None = None) -> Client:
    def command(folder: Path, work: Path, url: str) -> list[str]:
        return [sys.executable, "-c", code]

    def variables(url: str) -> dict[str, str]:
        path = str(Path(__file__).parents[2])
        return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "sk-soak", "PYTHONPATH": path}

    return Client(lambda packages, folder: "1.0", ("none",), command, variables, tool=tool, windows=8_000 / WINDOW)


@pytest.mark.full
def test_a_session_with_references_reaches_its_end(tmp_path: Path) -> None:
    row = check("session", python(SESSION), 24, tmp_path)
    assert (row.errors, row.faults, row.refused, row.skipped) == ([], [], 0, "")
    assert (row.turns, row.version) == (24, "1.0")
    assert row.results >= 12
    assert 0 < row.compacted <= row.requests == 24
    assert row.summaries > 0
    assert row.met(24)
    assert not row.met(50)


def test_errors_of_a_client_count(tmp_path: Path) -> None:
    row = check("failing", python(FAILING), 24, tmp_path)
    assert row.errors == ["exit status 1: ", "RuntimeError: no"]
    assert row.met(24) is False


def test_an_agent_calls_its_own_tool_until_the_task_is_done() -> None:
    loop = Loop(Tool("shell", {"command": "ls"}), 3)
    first = loop.step(TASK, None)
    assert [call.name for call in first.calls] == ["shell"]
    assert loop.step(None, first.calls[0].id).calls[0].id == "call_loop_1"
    assert loop.step(None, "call_loop_2").text == DONE
    assert loop.step(f"Write a title for <x>{TASK}</x>", None).text == "Fine."


def test_a_model_reads_in_each_way_and_then_goes_on() -> None:
    answered: list[str] = []

    def script(text: str | None, call_id: str | None) -> Step:
        answered.append(f"{text}")
        return Step(calls=(ToolCall(f"own_{text}", "shell", "{}"),))

    reading = Reading(script, lambda: True)
    names = []
    for way in WAYS:
        step = reading.step(way, None)
        names.append([[call.name for call in step.calls]])
        while all(call.name == NAME for call in step.calls):
            step = reading.step(None, step.calls[-1].id)
            names[-1].append([call.name for call in step.calls])
        assert step.calls[-1].id == f"own_{way}" or step.calls[0].id == f"own_{way}"
    one, own = [NAME], ["shell"]
    assert names == [[one, own], [[*one, *own]], [own], [[*one, *one], own], [[*own, *one]], [one, one, own]]
    assert reading.reads == 7
    assert set(answered) == set(WAYS)


def test_the_stand_in_of_chat_completions_follows_the_script_and_counts() -> None:
    upstream = StrictChat(8_000, script=Loop(Tool("shell", {"command": "ls"}), 2).step)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}]}]
    with serve(upstream.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="sk-soak", max_retries=0) as client:
        for _ in range(3):
            answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            calls = answer.tool_calls or []
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "a.txt"} for call in calls]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=messages[:2])
    assert answer.content == DONE
    assert [len(received.body["messages"]) for received in upstream.conversations] == [1, 3, 5, 2]
    assert [received.status for received in upstream.requests] == [200, 200, 200, 400]
    assert len(upstream.refused) == len(upstream.faults) == 1


@pytest.mark.parametrize("name", list(CLIENTS))
def test_every_client_has_a_command_and_its_driver_exists(name: str, tmp_path: Path) -> None:
    parts = CLIENTS[name].command(tmp_path, tmp_path, "http://127.0.0.1:1")
    assert all(Path(part).exists() for part in parts if str(DRIVERS) in part)
    variables = CLIENTS[name].variables("http://127.0.0.1:1").values()
    files = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.json")]
    assert any("127.0.0.1:1" in text for text in [*variables, *parts, *files])


def test_a_row_without_compaction_or_reads_fails() -> None:
    assert Row("x", turns=TURNS, compacted=3).met(TURNS)
    assert not Row("x", turns=TURNS).met(TURNS)
    assert Row("x", turns=1, results=TURNS - 1, compacted=1).met(TURNS)
    assert Row("x", turns=TURNS, compacted=3, reads=1).met(TURNS)
    assert not Row("x", turns=TURNS, compacted=3, reads=0).met(TURNS)


def test_the_page_keeps_the_rows_of_clients_that_did_not_run(tmp_path: Path) -> None:
    file = tmp_path / "conformance.md"
    old, other = (["A", "1.0", "chat", *["1"] * 8], ["B", "1.0", "chat", *["1"] * 8])
    page.written(file, [other, old])
    newer, translated = (["A", "2.0", *old[2:]], ["A", "2.0", "chat, chat upstream", *old[3:]])
    page.written(file, [newer])
    page.written(file, [translated])
    text = file.read_text()
    assert text.startswith(page.HEAD)
    rows = text.removeprefix(page.HEAD).splitlines()
    assert rows[0] == f"| {' | '.join(page.COLUMNS)} |"
    assert rows[2:] == [f"| {' | '.join(row)} |" for row in (newer, translated, other)]
