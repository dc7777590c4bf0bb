"""Find the newest plan of an agent: a list of tasks with their states.

A plan is known by its shape: a list of items with a text and a state, or lines with check boxes. Some tools change one
task at a time. Their calls are known by name, and later ones add to what earlier ones said about the same task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from proxy.compaction.format import Format
from proxy.compaction.named_files import parsed, plain_name
from proxy.compaction.turn import Facts, Turn

PLAN_TOOLS = frozenset({"todowrite", "todo_write", "write_todos", "update_plan"})
"""Tools of well-known agents that replace the whole plan, whatever its shape, as ``plain_name`` returns them."""

GOAL_TOOLS = frozenset({"create_goal", "update_goal"})  # tools that set or change the goal that a plan serves

_STEP = re.compile(r"(?:task|todo)s?_?(?:create|add|update)|(?:create|add|update)_(?:task|todo)(?:_item)?s?")
_STATE_KEYS = ("status", "state", "done", "completed", "checked")
_STATES = re.compile(
    r"pending|todo|open|not.?started|in.?progress|doing|blocked|completed?|done|finished|cancell?ed|skipped|true|false",
    re.IGNORECASE,
)
_MARKS = (b"status", b"state", b"done", b"completed", b"checked", b"[ ]", b"[x]", b"[X]")
_BOXES = re.compile(
    r"(?:^[ \t>]{0,20}(?:[-*+•]|\d{1,3}[.)])?[ \t]{0,4}\[[ xX~/>-]\][ \t]{1,4}\S.{0,500}(?:\n{1,3}|\Z)){2,500}",
    re.MULTILINE,
)
_NUMBER = re.compile(r"\d{1,9}")


def states_plan(raw: bytes, facts: Facts, format: Format) -> bool:
    """Return whether the calls of a unit state or change a plan."""
    if any(_is_tool(call.name) for call in facts.calls):
        return True
    plain = bytes(raw) if facts.calls else b""
    return any(mark in plain for mark in _MARKS) and any(_plan_in(text) for _, text in format.arguments(raw))


def is_plan(facts: Facts, more: Collection[str]) -> bool:
    """Return whether a unit states or changes a plan. ``more`` has the names of further tools."""
    return facts.rare.plan or (bool(more) and any(call.name in more for call in facts.calls))


def newest_plan(turns: Sequence[Turn], more: Collection[str], format: Format) -> str:
    """Return the newest plan with the later changes of its tasks; empty if there is none.

    A plan of a tool that is known by name comes first, because data can have the shape of a plan.
    """
    plan = shaped = ""
    tasks: dict[str, dict[str, Any]] = {}
    created: dict[str | None, str] = {}
    goal: dict[str, Any] = {}
    for turn in turns:
        key = created.pop(turn.facts.answers, None)
        if key and (number := _NUMBER.search(format.text(turn.raw)[:200])):
            tasks[number[0]] = tasks.pop(key)
        calls, arguments = turn.facts.calls, format.arguments(turn.raw) if is_plan(turn.facts, more) else []
        for place, (tool, text) in enumerate(arguments):
            if plain_name(tool) in GOAL_TOOLS and isinstance(fields := parsed(text), dict):
                goal = {**(goal if plain_name(tool) == "update_goal" else {}), **fields}
            elif tool not in more and _STEP.fullmatch(plain_name(tool)) and isinstance(fields := parsed(text), dict):
                key = next((str(value) for name, value in fields.items() if name.lower().endswith("id")), "")
                if not key and len(calls) == len(arguments):
                    key = created[calls[place].id] = f"{len(tasks) + 1} (new)"
                tasks[key] = {**tasks.get(key, {}), **fields}
            elif (_is_tool(tool) and plain_name(tool) not in GOAL_TOOLS) or tool in more:
                plan, tasks = f"{tool}: {text}", {}
            elif stated := _plan_in(text):
                shaped = f"{tool}: {stated}"
    stated = f"Goal: {json.dumps(goal, ensure_ascii=False)}" if goal else ""
    changed = [f"Task {key}: {json.dumps(task, ensure_ascii=False)}" for key, task in tasks.items()]
    return "\n".join(filter(None, (stated, plan, *changed))) or shaped


def _is_tool(name: str) -> bool:
    name = plain_name(name)
    return name in PLAN_TOOLS or name in GOAL_TOOLS or _STEP.fullmatch(name) is not None


def _plan_in(arguments: str) -> str:
    """Return the plan in a call's arguments: all of them, or lines with check boxes; empty if there is none."""
    fields = parsed(arguments)
    for value in fields.values() if isinstance(fields, dict) else (fields,):
        if isinstance(value, list) and value and all(map(_is_task, value)):
            return arguments
        if isinstance(value, str) and (boxes := _BOXES.search(value)) and len(boxes[0]) * 2 > len(value):
            return value
    return ""


def _is_task(item: Any) -> bool:
    """Return whether an item has a state and a text."""
    fields = item if isinstance(item, dict) else {}
    state = next((key for key in _STATE_KEYS if key in fields), None)
    if state is None or _STATES.fullmatch(str(fields[state])) is None:
        return False
    return any(
        isinstance(value, str) and key != state and not key.lower().endswith("id") for key, value in fields.items()
    )
