"""Find the files to which names belong, and the names that a prompt has together with such a file.

The rules don't depend on the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from bench.quality.conversations import Message
from bench.quality.text import text, values
from proxy.compaction.named_files import named_files, parsed
from proxy.compaction.summary_message import INDEX_TITLE
from proxy.dialects.chat.units import arguments_of, text_of

_FILE = re.compile(r"(?:[\w@.+~-]*[/\\])*([\w@+.-]+\.[A-Za-z]\w{0,7})\b")
_DIFF = ("+++ ", "--- ", "diff --git ")
_LABEL = re.compile(r"\((?:written|read)\)|^ *- (?:in (?=\S+:$)|(?:URLs|flags|ids and figures|names):)", re.MULTILINE)
_PROSE = re.compile(r"(?<![\w.-])[a-z]{3,}(?![\w-])")


def owners(history: Sequence[Message], names: Iterable[str]) -> dict[str, set[str]]:
    """Return the last parts of the paths of files in whose reads, edits, or search results each name occurs."""
    owned: dict[str, set[str]] = {name: set() for name in names}
    for file, said in _located(history):
        for name in owned:
            if name in said:
                owned[name].add(file)
    return owned


def _located(history: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield files, each with a text that is about it."""
    for tool, arguments, result in _calls(history):
        said = "\n".join(value for _, value in values(arguments))
        named = {path for _, path in named_files(tool, parsed(arguments))} or set(said.split())
        files = {found[1] for path in named for found in _FILE.finditer(path)}
        yield from ((file, said) for file in files)
        if len(files) == 1:
            yield files.pop(), result
        current = None
        for line in result.split("\n"):
            inside = _FILE.findall(line)
            if line.startswith(_DIFF):
                current = inside[-1] if inside else None
            elif current and line[:1] in ("+", "-", "@"):
                yield current, line
            yield from ((file, line) for file in inside)


def _calls(messages: Iterable[Message]) -> list[tuple[str, str, str]]:
    """Return the tool, the arguments, and the result of each call."""
    results = {message.get("tool_call_id"): text_of(message) for message in messages if message["role"] == "tool"}
    called = [
        pair for message in messages for pair in zip(message.get("tool_calls", ()), arguments_of(message), strict=False)
    ]
    return [(tool, arguments, results.get(call["id"], "")) for call, (tool, arguments) in called]


def with_files(owned: dict[str, set[str]], prompt: Sequence[Message]) -> set[str]:
    """Return the names that a prompt has with a file of theirs: in one line, or in one call with its result."""
    places = [line for message in prompt for line in text_of(message).split("\n")]
    places += ["\n".join(call) for call in _calls(prompt)]
    return {
        name for name, files in owned.items()
        if any(name in place and any(file in place for file in files) for place in places)
    }  # fmt: skip


def ordinary(history: Sequence[Message], prompt: str) -> tuple[int, int]:
    """Return the numbers of ordinary words and of all words in a prompt's index; 0 if it has none.

    An ordinary word is one that the user or the assistant also writes in lower case.
    """
    index = prompt.partition(f"## {INDEX_TITLE}\n")[2].partition("\n\n")[0]
    listed = [word for word in _LABEL.sub("", index).replace(";", "").split() if word not in ("-", ":")]
    said = text({"role": "user", "content": text_of(one)} for one in history if one["role"] in ("user", "assistant"))
    prose = set(_PROSE.findall(said))
    return sum(word.lower() in prose for word in listed if word.isalpha()), len(listed)
