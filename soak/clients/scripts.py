"""The scripts of the stand-in's models: an agent's loop, and a model that reads archived messages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace

from proxy.recall.tool import NAME
from soak.clients.programs import TASK, Tool
from tests.kit.agent_script import Script, Step
from tests.kit.upstream import ToolCall

DONE = "The whole task is done."
WAYS = ("alone", "first", "no read", "twice", "last", "again")
"""How answers read, in turn: alone, before or after the client's calls, twice at once, and in two rounds."""

Asked = tuple[str | None, str | None]
"""The newest user text, and the id of the newest result."""


class Loop:
    """The script of an agent's model: each time it's asked, ``calls`` calls of the agent's tool, and then a text."""

    def __init__(self, tool: Tool, calls: int) -> None:
        self._tool = tool
        self._calls = calls
        self._asked = 0

    def step(self, text: str | None, call_id: str | None) -> Step:
        """Return the answer to the newest user text, or to the result of a call."""
        number = int(call_id.rpartition("_")[2]) + 1 if call_id and call_id.rpartition("_")[2].isdigit() else 0
        if call_id is None and not (text or "").strip(' "\n').endswith(TASK):
            return Step(text="Fine.")
        if call_id is None:
            number = self._asked * self._calls
            self._asked += 1
            if number == 0 and self._tool.loads is not None:
                return Step(calls=(_call("call_load", self._tool.loads),), thinking="The tool isn't loaded.")
        if number >= self._asked * self._calls:
            return Step(text=DONE, thinking="Nothing is left to do.")
        tools = [self._tool, *self._tool.others]
        call = _call(f"call_loop_{number}", tools[number % len(tools)], number + 1)
        return Step(calls=(call,), thinking=f"Call number {number} comes next.")


def _call(id_: str, tool: Tool, number: int = 0) -> ToolCall:
    arguments = tool.arguments if isinstance(tool.arguments, str) else json.dumps(tool.arguments)
    return ToolCall(id_, tool.name, arguments.replace("START", f"{number}000").replace("END", f"{number}600"))


class Reading:
    """The script of a model that also calls the proxy's tool, if the request has it. ``reads`` counts the calls."""

    def __init__(self, script: Script, has_tool: Callable[[], bool]) -> None:
        self._script = script
        self._has_tool = has_tool
        self._ways = itertools.cycle(WAYS)
        self._asked: dict[str, tuple[Asked, bool]] = {}
        """The newest text and result before each own call, and whether one more read follows."""
        self.reads = 0

    def step(self, text: str | None, call_id: str | None) -> Step:
        """Return the answer to the newest user text, or to the result of a call."""
        asked, again = self._asked.get(call_id or "", ((text, call_id), False))
        if again:
            return Step(calls=(self._read(asked),), thinking="One read isn't enough.")
        made = self._script(*asked)
        if call_id in self._asked or not self._has_tool():
            return made
        way = next(self._ways)
        if way == "no read":
            return made
        if way in ("first", "last") and made.calls:
            own = self._read((None, made.calls[-1].id))
            return replace(made, calls=(own, *made.calls) if way == "first" else (*made.calls, own))
        calls = [self._read(asked, again=way == "again") for _ in range(2 if way == "twice" else 1)]
        return Step(text="Let me look that up. ", calls=tuple(calls), thinking="An earlier message has it.")

    def _read(self, asked: Asked, *, again: bool = False) -> ToolCall:
        self.reads += 1
        call = ToolCall(f"read_{self.reads}", NAME, json.dumps({"query": "the numbers", "id": None, "offset": None}))
        self._asked[call.id] = asked, again
        return call
