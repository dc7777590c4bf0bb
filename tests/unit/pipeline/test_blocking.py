"""Test that counting and compacting search no long text in one call, because no other thread runs during a call.

Regular expressions are the slowest calls. They take up to 70 ms per megabyte. No model writes a summary here. The
redaction of a transcript still searches each message in one call.
"""

import base64
import json
import random
import re
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from bench.bodies import prose
from proxy.pipeline.facts_cache import FactsCache
from tests.kit.conversations import Message
from tests.kit.engine import Engine, request, run
from tests.kit.generator import SETTINGS

LENGTH = 200_000
LONGEST = 66_000
"""Characters or bytes of a call. Regular expressions of this length take up to 1 ms."""

_RANDOM = random.Random(1)
_PROSE = prose(_RANDOM, LENGTH)
_WORDS = _PROSE.split()
TEXTS = {
    "lines": _PROSE,
    "one line": _PROSE.replace("\n", " "),
    "one word": "abc_Def9" * (LENGTH // 8),
    "base64": base64.b64encode(_RANDOM.randbytes(LENGTH * 3 // 4)).decode(),
    "numbered": "\n".join(f"{number:6}\t{word}" for number, word in enumerate(_WORDS, 1)),
    "found": "\n".join(f"src/file_{number // 20}.py:{number % 20}:{word}" for number, word in enumerate(_WORDS)),
    "colors": "\n".join(f"\x1b[32m{word}\x1b[0m" for word in _WORDS),
    "JSON": json.dumps([{"id": number, "name": word} for number, word in enumerate(_WORDS)], indent=2),
    "Cyrillic": "Ошибка номер пять. " * (LENGTH // 19),
    "tags": '<div class="a">text <user_message> x</div>\n' * (LENGTH // 43),
    "failures": "".join(f"ERROR: failed to open file_{number}.txt\n" for number in range(LENGTH // 40)),
    "rules": "".join(f"Always use tabs in module {number}. Please don't forget.\n" for number in range(LENGTH // 55)),
}


class Watched:
    """A pattern that notes the longest text that it searched in one call."""

    longest = ("", 0)

    def __init__(self, pattern: re.Pattern[Any]) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def search(self, text: Any, pos: int = 0, endpos: int = sys.maxsize) -> re.Match[Any] | None:
        self._note(text, pos, endpos)
        return self._pattern.search(text, pos, endpos)

    def findall(self, text: Any, pos: int = 0, endpos: int = sys.maxsize) -> list[Any]:
        self._note(text, pos, endpos)
        return self._pattern.findall(text, pos, endpos)

    def sub(self, new: Any, text: Any, count: int = 0) -> Any:
        self._note(text, 0, sys.maxsize)
        return self._pattern.sub(new, text, count)

    def split(self, text: Any) -> list[Any]:
        self._note(text, 0, sys.maxsize)
        return self._pattern.split(text)

    def _note(self, text: Any, pos: int, endpos: int) -> None:
        length = min(endpos, len(text)) - pos
        if length > Watched.longest[1]:
            Watched.longest = (self._pattern.pattern, length)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch every expression of the proxy."""
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if name.startswith("proxy.") else ():
            if isinstance(value, re.Pattern):
                monkeypatch.setattr(module, key, Watched(value))
    monkeypatch.setattr(Watched, "longest", ("", 0))


def conversation(kind: str, text: str) -> list[Message]:
    """Return a conversation with one long text, that later messages push out of the window."""

    def call(id: str, name: str, **arguments: str) -> Message:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        }

    def result(id: str, content: str) -> Message:
        return {"role": "tool", "tool_call_id": id, "content": content}

    made: list[Message] = [{"role": "user", "content": "Begin."}]
    if kind == "result":
        made += [call("long", "read_file", path="AGENTS.md"), result("long", text)]
    elif kind == "arguments":
        made += [call("long", "write_file", path="a.py", content=text), result("long", "ok")]
    else:
        made.append({"role": kind, "content": text})
    for number in range(20):
        made += [
            call(f"{number}", "read_file", path=f"{number}.py"),
            result(f"{number}", _PROSE[number * 3000 :][:6000]),
        ]
    return made


CASES = [
    pytest.param(name, kind, marks=[] if (number + place) % 6 == 0 else pytest.mark.full)
    for number, name in enumerate(TEXTS)
    for place, kind in enumerate(["result", "user", "assistant", "arguments"])
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_expression_searches_a_long_text_at_once(watched: None, name: str, kind: str) -> None:
    raws = [json.dumps(message).encode() for message in conversation(kind, TEXTS[name])]
    engine = Engine(FactsCache())
    case = replace(engine.case(request(raws, SETTINGS[0], 30_000)), writers=())
    outcome = run(engine.compactor.compact(case))
    assert outcome.verdict == "compacted"
    pattern, length = Watched.longest
    assert 0 < length <= LONGEST, pattern
