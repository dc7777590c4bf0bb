"""An agent's client for any API, which adds reminders and other texts to its messages and results."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.kit.messages import words

RESULT = 330
"""Words of a result: about 30 results reach the trigger."""

TASK = "Build this:\n" + "\n".join(f"Requirement {n}: case K{n * 37} gives code {n * 911}." for n in range(80))
REQUIREMENTS = [f"case K{n * 37} gives" for n in range(80)]


def reminder(text: str, tag: str = "system-reminder") -> str:
    return f"<{tag}>\n{text}\n</{tag}>"


@dataclass
class Client:
    """A client of one API, which sends its conversation after each step."""

    api: str
    units: list[Any] = field(default_factory=list)
    steps: int = 0

    def user(self, *parts: str, joined: bool = False) -> None:
        kind = "input_text" if self.api == "responses" else "text"
        content: Any = "\n\n".join(parts) if joined else [{"type": kind, "text": part} for part in parts]
        self.units.append({"role": "user", "content": content})

    def say(self) -> None:
        self.units.append({"role": "assistant", "content": f"Done with part {self.steps}."})

    def step(
        self, *, end: str = "", beside: tuple[str, ...] = (), listed: bool = False, path: str = "", out: str = ""
    ) -> None:
        """Call a tool. ``end`` is at the end of the result's text, and ``beside`` are texts after the result.

        ``path`` and ``out`` are the file and the text of the result.
        """
        self.steps += 1
        text = (out or f"out {self.steps}: {words(RESULT, f'{self.steps}')}") + (f"\n\n{end}" if end else "")
        id_, path = f"call_{self.steps}", json.dumps({"path": path or f"src/{self.steps}.py"})
        if self.api == "messages":
            said: Any = [{"type": "text", "text": text}] if listed else text
            result = {"type": "tool_result", "tool_use_id": id_, "content": said}
            use = {"type": "tool_use", "id": id_, "name": "Read", "input": json.loads(path)}
            self.units.append({"role": "assistant", "content": [{"type": "text", "text": "Next."}, use]})
            self.units.append({"role": "user", "content": [result, *({"type": "text", "text": one} for one in beside)]})
            return
        if self.api == "chat":
            call = {"id": id_, "type": "function", "function": {"name": "Read", "arguments": path}}
            self.units.append({"role": "assistant", "content": "Next.", "tool_calls": [call]})
            content: Any = [{"type": "text", "text": text}] if listed else text
            self.units.append({"role": "tool", "tool_call_id": id_, "content": content})
        else:
            self.units.append({"type": "function_call", "call_id": id_, "name": "Read", "arguments": path})
            output: Any = [{"type": "input_text", "text": text}] if listed else text
            self.units.append({"type": "function_call_output", "call_id": id_, "output": output})
        if beside:
            self.user(*beside)

    def body(self) -> bytes:
        return json.dumps({"model": "m", "input" if self.api == "responses" else "messages": self.units}).encode()
