"""Search archived messages of any API: turn them into one text and its passages, and rank the passages by BM25.

SQLite's FTS5 ranks in memory. See https://www.sqlite.org/fts5.html.
"""

from __future__ import annotations

import re
import sqlite3
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


MOST_TERMS = 32
"""Words of a query that count."""

_TERM = re.compile(r"\S+")
# FTS5 separates words at spaces, which these scripts don't have.
_WITHOUT_SPACES = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f])")


class Index:
    """An index of passages. All methods take a thread's time. Use one thread at a time, and close it."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute("CREATE VIRTUAL TABLE passages USING fts5(body, tokenize = 'porter unicode61')")
        self._connection.executemany(
            "INSERT INTO passages (rowid, body) VALUES (?, ?)",
            ((index, _spaced(passage.text)) for index, passage in enumerate(passages)),
        )

    def search(self, query: str, limit: int) -> list[Passage]:
        """Return at most ``limit`` passages that contain a word of the query, the best first."""
        terms = _terms(query)
        if not terms:
            return []
        rows = self._connection.execute(
            "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid DESC LIMIT ?",
            (" OR ".join(terms), limit),
        )
        return [self._passages[index] for (index,) in rows]

    def close(self) -> None:
        """Free its memory."""
        self._connection.close()


def _terms(query: str) -> list[str]:
    """Return the words of a query as quoted phrases, so that none of them is an operator of FTS5."""
    words = [word for word in _TERM.findall(_clean(query)) if any(map(str.isalnum, word))]
    return ['"{}"'.format(_spaced(word).replace('"', '""')) for word in dict.fromkeys(words[:MOST_TERMS])]


def _spaced(text: str) -> str:
    return _WITHOUT_SPACES.sub(r" \1 ", _clean(text))


def _clean(text: str) -> str:
    """Replace what SQLite can't store: null characters, which end a text, and lone surrogates."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()
