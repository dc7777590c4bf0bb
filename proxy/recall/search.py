"""Rank passages by BM25, with SQLite's FTS5 in memory.

See https://www.sqlite.org/fts5.html.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

from proxy.recall.passages import Passage

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
