"""Find in messages what is in effect: the newest plan of an agent, and the reminders that agents add.

A plan is a list of tasks with their states. It's known by its shape: a list of items with a text and a state, or lines
with check boxes. Some tools change one task at a time. Their calls are known by name, and later ones add to what
earlier ones said about the same task.

Reminders are texts in elements. Agents add them to messages and to results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

from proxy.compaction import keeps
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

NOTE = "note "  # the start of the keys of reminders

COUNTER = NOTE + "counter "
"""The start of the keys of reminders that only count something or repeat a call. They stay in the first message."""

_NAME = (
    r"system[-_]reminder|INSTRUCTIONS"
    r"|[\w-]{1,40}[-_](?i:context|details|info(?:rmation)?|instructions|mode|rules|skills)"
)
_OPENED = re.compile(rf"(?:# [^\n<]{{1,200}}\n\s{{0,9}})?<({_NAME})(?:\s[^<>]{{0,200}})?>")
_CLOSED = re.compile(rf"</({_NAME})>\s*\Z")
_REMINDER = re.compile(r"\s{0,9}+<system[-_]reminder>")
_FIGURE = re.compile(r"(?<![\w/.-])\d[\d.,:/%-]*(?![\w/])")
_CALLED = re.compile(r"(?:Called|Result of calling) the .{1,80} tool\b")
_DATE = re.compile(r"\d{4}([-/])\d\d\1\d\d")
_ELEMENT = re.compile(r"<([\w-]{1,40})>[^<>]*</\1>")
_MOST_IN_TEXT = 100
_COUNTER_CHARACTERS = 200


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


def split_notes(text: object, *, elements: bool = False) -> tuple[list[str], str]:
    """Return the reminders at both ends of a text, in order, and the rest. Agents add them to messages and to results.

    With ``elements``, other elements in which agents say what is in effect count, too.
    """
    first: list[str] = []
    rest = text.strip() if isinstance(text, str) else ""
    # Most texts have none, and each message is read.
    if not rest.startswith(("<", "# ")) and not rest.endswith(">"):
        return [], rest
    while len(first) < _MOST_IN_TEXT and (opened := _OPENED.match(rest)) and (elements or _REMINDER.match(rest)):
        closing, begin = f"</{opened[1]}>", opened.end()
        following = rest.find(f"<{opened[1]}", begin)
        end = max(rest.rfind(closing, begin, None if following < 0 else following), rest.find(closing, begin))
        if end < 0:
            break
        end += len(closing)
        first.append(rest[:end])
        rest = rest[end:].lstrip()
    starts = _last_notes(rest, elements=elements)
    last = [rest[start:end].rstrip() for start, end in pairwise([*starts, len(rest)])]
    return [*first, *last], rest[: starts[0]].rstrip() if starts else rest


def _last_notes(text: str, *, elements: bool = False) -> list[int]:
    """Return where the reminders at the end of a text begin, in order."""
    starts: list[int] = []
    end = len(text)
    while len(starts) < _MOST_IN_TEXT and (closed := _CLOSED.search(text, max(0, end - 80), end)):
        start = text.rfind(f"\n<{closed[1]}", 0, end) + 1
        if not text.startswith(f"<{closed[1]}", start) or not (elements or _REMINDER.match(text, start)):
            break
        starts.append(start)
        end = start
    return starts[::-1]


def sparing(change: Callable[[str], str]) -> Callable[[str], str]:
    """Return a change of a result's text that leaves the reminders at its end, unless they are long."""

    def changed(text: str) -> str:
        start = next(iter(_last_notes(text)), 0)
        spares = start and len(text) - start <= keeps.SPARED_CHARACTERS
        return change(text[:start]) + text[start:] if spares else change(text)

    return changed


def counter(text: str) -> str:
    """Return a short text that is one element without its numbers; empty for other texts."""
    return _FIGURE.sub("0", text) if len(text) <= _COUNTER_CHARACTERS and _ELEMENT.fullmatch(text.strip()) else ""


def may_ask(note: str) -> bool:
    """Return whether a reminder may be a user's request in an element, such as ``<task_instructions>``."""
    opened = _OPENED.match(note)
    return opened is not None and opened[1].endswith("instructions")


def note_key(note: str) -> str:
    """Return the key of a reminder. One line that is an element or mostly numbers counts something."""
    opened = _OPENED.match(note)
    if opened is not None and not _REMINDER.match(note):
        return NOTE + opened[0]
    inside = note[opened.end() if opened else 0 : note.rfind("</")].strip()
    lines = "\n" in inside
    digits = sum(map(str.isdigit, _DATE.sub("", inside)))
    counts = _CALLED.match(inside) or (not lines and (_ELEMENT.fullmatch(inside) or 10 * digits > len(inside)))
    said = " ".join((inside if lines else _FIGURE.sub("0", inside)).split())
    return (COUNTER if counts else NOTE) + hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]
