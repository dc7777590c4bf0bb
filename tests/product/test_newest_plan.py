"""An agent's newest plan stays word for word, on all three APIs by official SDKs."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.any_api import Upstream, sdk, strings, units
from tests.kit.combinations import combined
from tests.kit.messages import assistant, call, result, user, words
from tests.kit.three_apis import PATHS

CASES = [
    ("chat", "write_todos"),
    ("chat", "todowrite"),
    ("chat", "todo_write"),
    ("chat", "set_goals"),
    ("responses", "update_plan"),
    ("messages", "TodoWrite"),
    ("messages", "mcp__notes__set_goals"),
]
POLICY = {"keep_newest": ["set_goals", "mcp__notes__set_goals"], "truncate_args": {"tools": ["*"], "max_length": 300}}


def plan(number: int, size: int = 6, note: int = 90) -> str:
    todos = [{"content": f"Step {number}.{i} <b>é</b> {words(5)}", "status": "pending"} for i in range(size)]
    return json.dumps({"todos": todos, "note": words(note)}, ensure_ascii=False)


def planned(tool: str, number: int, **sizes: int) -> list[Any]:
    made = assistant(None, call(f"plan{number}", tool))
    made["tool_calls"][0]["function"]["arguments"] = plan(number, **sizes)
    return [made, result(f"plan{number}", "The plan is updated.")]


def work(start: int, end: int) -> list[Any]:
    turns = (
        [assistant(None, call(f"w{n}", "run", n=n)), result(f"w{n}", words(700, f"w{n}x"))] for n in range(start, end)
    )
    return [message for turn in turns for message in turn]


@pytest.mark.parametrize(("api", "tool"), CASES)
def test_the_newest_plan_is_in_every_prompt(api: str, tool: str, tmp_path: Path) -> None:
    start = [user("Do it all."), *planned(tool, 1), *work(0, 6), *planned(tool, 2)]
    whole = [*start, *work(6, 54)]
    upstream = Upstream()
    with sdk(api, tmp_path, upstream, {**POLICY, "prepare": None}) as send:
        for end in range(len(start), len(whole) + 1, 8):
            send(whole[:end])
    prompts = upstream.bodies
    summarized = ["conversation_summary" in "".join(strings(units(body))) for body in prompts]
    assert not summarized[0]
    assert summarized[-1]
    for body in prompts:
        assert any(plan(2) in text for text in strings(body)), "the newest plan, also after several checkpoints"
    firsts = [json.dumps(units(body)[0]) for body, has in zip(prompts, summarized, strict=True) if has]
    assert len(set(firsts)) >= 2, "several checkpoints"
    assert not any(plan(1) in text for text in strings(prompts[-1]))
    changed = sum(old != new[: len(old)] for old, new in itertools.pairwise(map(units, prompts)))
    assert changed <= len(set(firsts)) + 1, "between checkpoints, prompts only grow"


TASKS = [("accounts", "completed"), ("ledger", "in_progress"), ("invoices", "pending")]
LISTED = [{"title": f"Migrate {name}", "status": state} for name, state in TASKS]
BOXES = "\n".join(f"- [{'x' if state == 'completed' else ' '}] Migrate {name}" for name, state in TASKS)
STEPS = [
    *(("TaskCreate", {"subject": f"Migrate {name}"}, f"Task #{7 + n} created") for n, (name, _) in enumerate(TASKS)),
    ("TaskUpdate", {"taskId": "8", "status": "in_progress"}, "Updated"),
    ("TaskUpdate", {"taskId": "7", "status": "completed"}, "Updated"),
]


SHAPES: list[Any] = [
    ([("update_todo_list", {"todos": BOXES}, "ok")], ["[x] Migrate accounts", "[ ] Migrate ledger"]),
    ([("anything", {"operation": "write", "todoList": LISTED}, "ok")], ["Migrate ledger", "in_progress"]),
    ([("read_file", {"path": "a.py", "task_progress": BOXES}, "text")], ["[ ] Migrate invoices"]),
    ([("task_tracker", {"command": "plan", "task_list": LISTED}, "ok")], ["Migrate invoices", "completed"]),
    (STEPS, ["Task 7: ", "Migrate accounts", "in_progress", "Migrate invoices"]),
    ([("TodoWrite", {"todos": LISTED}, "ok"), ("insert", {"rows": [{"name": "Bob", "status": "done"}]}, "ok")],
     ["Migrate ledger"]),
]  # fmt: skip
"""Calls, and the texts of their plan."""


@pytest.mark.parametrize(("api", "shape"), combined(3, PATHS, SHAPES))
def test_a_plan_is_known_by_its_shape(api: str, shape: Any, tmp_path: Path) -> None:
    calls, seen = shape
    plans = [
        message
        for number, (tool, arguments, answer) in enumerate(calls)
        for message in (assistant(None, call(f"p{number}", tool, **arguments)), result(f"p{number}", answer))
    ]
    upstream = Upstream()
    with sdk(api, tmp_path, upstream, {"prepare": None}) as send:
        send([user("Migrate all tables."), *plans, *work(0, 40)])
    (first, *_) = (text for text in strings(upstream.bodies[-1]) if "conversation_summary" in text)
    plan = first[first.index("newest plan") :]
    assert [text for text in seen if text not in plan] == []


@pytest.mark.parametrize("api", list(PATHS))
def test_stages_shorten_a_plan_only_once_there_is_a_newer_one(api: str, tmp_path: Path) -> None:
    anytime = {"trigger": {"tokens": 2_000}, "keep": {"messages": 1}}
    policy = {
        "trigger": None,
        "truncate_args": {"tools": ["*"], "max_length": 300, **anytime},
        "evict_results": {"max_tokens": 200, **anytime},
    }
    messages = [user("Do it all."), *planned("TodoWrite", 1, note=900), *work(0, 5)]
    upstream = Upstream()
    with sdk(api, tmp_path, upstream, policy) as send:
        send(messages)
        send([*messages, *planned("TodoWrite", 2, note=900), *work(5, 9)])
    first, second = (list(strings(body)) for body in upstream.bodies)
    assert any("left out" in text for text in first)
    assert any(plan(1, note=900) in text for text in first)
    assert not any(plan(1, note=900) in text for text in second)
    assert any(plan(2, note=900) in text for text in second)
