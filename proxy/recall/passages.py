"""Turn archived messages of any API into one text, and into passages of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.dialects.apis import archived_text

PASSAGE = 1_000
"""Characters of a passage, about. A passage ends between words if possible."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of one message: the message's number from 1, its role, and where the text starts in the transcript."""

    message: int
    role: str
    start: int
    text: str


@dataclass(frozen=True, slots=True)
class ArchivedText:
    """The text of archived messages. ``passages`` cover it in order."""

    text: str
    passages: tuple[Passage, ...]


def read(messages: Sequence[bytes]) -> ArchivedText:
    """Return the text of messages, oldest first. This takes milliseconds per megabyte."""
    pieces: list[str] = []
    passages: list[Passage] = []
    length = 0
    for number, raw in enumerate(messages, 1):
        role, text = archived_text(raw)
        head = f"[{number}] {role}\n"
        begins = length + len(head)
        passages += [Passage(number, role, begins + start, part) for start, part in _parts(text)]
        piece = f"{head}{text}\n\n"
        pieces.append(piece)
        length += len(piece)
    return ArchivedText("".join(pieces), tuple(passages))


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Split a text between lines or words. Yield each part and its place."""
    start = 0
    while len(text) - start > PASSAGE:
        reach = start + PASSAGE
        end = max(text.rfind("\n", start + PASSAGE // 2, reach), 0) or text.rfind(" ", start + PASSAGE // 2, reach)
        end = end + 1 if end > 0 else reach
        yield start, text[start:end]
        start = end
    if text[start:].strip():
        yield start, text[start:]
