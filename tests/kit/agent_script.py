"""The script of a long agent's session, shared by the strict stand-ins and the tests that drive them.

A user asks for numbered parts. The model answers each with one to three rounds of tool calls, and then with text. The
next step follows from the newest message alone, so it doesn't depend on the messages that a proxy removed.
"""

import base64
import functools
import json
import os
import random
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.kit.upstream import ToolCall, text_tokens

TURNS = int(os.environ.get("AGENT_TURNS", "40"))
"""Requests of a session. Set ``AGENT_TURNS`` for a longer one."""

HUGE_EVERY = 10
HUGE_BYTES = 200_000
PICTURE_EVERY = 7
PICTURE_SIDE = 512

SYSTEM = "You are a careful engineer. Use the tools."
TOOLS = ("read", "search", "run")
SCHEMA = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}

_PART = re.compile(r"Part (\d+) please")
_EXPLAIN = re.compile(r"Explain part (\d+)")
_CALL = re.compile(r"_(\d+)_(\d+)_\d+$")


@dataclass(frozen=True, slots=True)
class Step:
    """An answer of the scripted model."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""

    @property
    def tokens(self) -> int:
        """Return the size of the answer."""
        return sum(map(text_tokens, [self.thinking, self.text, *(c.name + c.arguments for c in self.calls)]))


Script = Callable[[str | None, str | None], Step]
"""Return the answer to the newest user text, or to the result of a call with this id."""


@dataclass(slots=True)
class Received:
    """A request, and the stand-in's decision about it.

    ``fault`` is the error for a malformed request, ``overflow`` whether it exceeded the window. ``reasoning`` lists the
    reasoning that it contained, ``dropped`` the reasoning that was bound to another prompt.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    tokens: int = 0
    status: int = 0
    fault: str | None = None
    overflow: bool = False
    summary: bool = False
    reasoning: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class Record:
    """The requests that a stand-in received, in order."""

    requests: list[Received] = field(default_factory=list)

    @property
    def conversations(self) -> list[Received]:
        """Return the requests except those for summaries."""
        return [received for received in self.requests if not received.summary]

    @property
    def faults(self) -> list[str]:
        """Return the errors of malformed requests."""
        return [received.fault for received in self.requests if received.fault]

    @property
    def refused(self) -> list[Received]:
        """Return the requests that exceeded the window."""
        return [received for received in self.requests if received.overflow]


def step(text: str | None, call_id: str | None) -> Step:
    """Return the answer to the newest user text, or to the result of a call."""
    if call_id is not None and (found := _CALL.search(call_id)):
        part, number = int(found[1]), int(found[2]) + 1
    elif text is not None and (asked := _EXPLAIN.findall(text)):
        return Step(text=explanation(int(asked[-1])), thinking=f"Recalling part {asked[-1]}.")
    elif text is not None and (asked := _PART.findall(text)):
        part, number = int(asked[-1]), 0
    else:
        return Step(text="I can't find a question.")
    thinking = f"Considering step {number} of part {part}: " + " ".join(f"idea{n * part % 97}" for n in range(20))
    if number > part % 3:
        return Step(text=f"Done with part {part}: " + " ".join(f"step{n}" for n in range(30)), thinking=thinking)
    names = TOOLS if part % 4 == 0 else TOOLS[:1]
    arguments = json.dumps({"target": f"src/part_{part}_{number}.py"})
    calls = tuple(ToolCall(f"call_{part}_{number}_{n}", name, arguments) for n, name in enumerate(names))
    return Step(text=f"I look at part {part}." if number == 0 else "", calls=calls, thinking=thinking)


def explanation(part: int) -> str:
    """Return a long answer, without tools."""
    return f"Part {part} is explained here: " + " ".join(f"fact{n * part % 9973}" for n in range(300))


def question(part: int) -> str:
    """Return the user's message for a part."""
    return f"Part {part} please; the ticket is PART-{1000 + part}."


def result(call_id: str, name: str) -> str:
    """Return a tool's result: usually 0.5 to 4 KB, and 200 KB in the first round of every tenth part."""
    found = _CALL.search(call_id)
    huge = found is not None and int(found[1]) % HUGE_EVERY == 5 and found[2] == "0" and name == TOOLS[0]
    size = HUGE_BYTES if huge else random.Random(call_id).randint(500, 4000)
    lines = (f"{call_id}:{line} value of {name} = {line * 7919 % 10007}" for line in range(size // 30))
    return "\n".join(lines)[:size].ljust(size, ".")


@functools.cache
def picture(part: int) -> str:
    """Return a picture as PNG in base64, of another color for each part."""
    side = PICTURE_SIDE
    row = b"\0" + bytes((part * 37 % 256, part * 59 % 256, 90)) * side

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * side)) + chunk(b"IEND", b"")
    )
    return base64.b64encode(png).decode()


def has_picture(part: int) -> bool:
    """Return whether the user's message for a part has a picture."""
    return part % PICTURE_EVERY == 3
