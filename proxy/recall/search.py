"""Search archived messages of any API: turn them into one text and its passages, and rank exchanges by these.

SQLite's FTS5 computes BM25 in memory, see https://www.sqlite.org/fts5.html.
"""

from __future__ import annotations

import math
import re
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.dialects.apis import archived_text

PASSAGE = 1_000  # Characters of a passage, about. A passage ends between words if possible.


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


@dataclass(frozen=True, slots=True)
class Match:
    """An exchange that a search found: its best passages, the best first.

    ``rank`` is its place by score, from 0. ``entry`` is the index of its archive entry. ``question`` is the beginning
    of the user's message if none of its passages matches.
    """

    rank: int
    entry: int
    passages: tuple[Passage, ...]
    question: Passage | None


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


def original(messages: Sequence[bytes]) -> str:
    """Return the text of one message, or of several with their roles."""
    return archived_text(messages[0])[1] if len(messages) == 1 else read(messages).text


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


LONGEST_QUERY = 1_000  # characters of a query that count
MOST_TERMS = 32  # words of a query that count

_TERM = re.compile(r"\S+")
_PUNCTUATION = ".,;:!?"
# A genitive or a short form, as in "company's" and "I've".
_SHORT_FORM = re.compile(r"['’](?:s|m|d|t|ve|re|ll)$")
# FTS5 separates words at spaces, which these scripts don't have.
_WITHOUT_SPACES = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f])")

# English function words: pronouns, articles, prepositions, conjunctions, auxiliary verbs, and words of quantity.
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a about above after again against all also am among an and any anybody anyone anything are as at be because
        been before being below between both but by can cannot could did do does doing done down during each either
        enough every few for from had has have having he her here hers herself him himself his how i if in into is it
        its itself just less many may me might mine more most much must my myself neither no nobody none nor not
        nothing now of off on once one only or other our ours ourselves out over own please quite rather same shall she
        should since so some somebody someone something such than that the their theirs them themselves then there
        these they this those though through to too under until up upon us very was we were what whatever when where
        whether which while who whoever whom whose why will with within without would yes yet you your yours yourself
        yourselves""",
    )
)

USER_WEIGHT = 1.5  # The weight of the user's words. They state facts, where answers repeat the subject at length.
NEIGHBOR_WEIGHT = 0.2  # the share of its neighbors' scores that an exchange gets
NEWER = 0.5  # a newer exchange may have a newer value if it has at least this share of an older one's score,
SAME = 0.6  # ... and has its score from the same words, by this cosine. Then it comes first.
ENOUGH = 20  # messages of the user that show which words the user often uses


class Index:
    """An index of the passages of archive entries. It takes a thread's time. Use one thread at a time, and close it."""

    def __init__(self, entries: Sequence[Sequence[Passage]]) -> None:
        self._passages = [passage for passages in entries for passage in passages]
        self._entries = [number for number, passages in enumerate(entries) for _ in passages]
        self._exchanges = _exchanges(entries)
        self._by_role = [USER_WEIGHT if passage.role == "user" else 1.0 for passage in self._passages]
        self._asked = len(self._of_user(range(len(self._passages))))
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute("CREATE VIRTUAL TABLE passages USING fts5(body, tokenize = 'porter unicode61')")
        self._connection.executemany(
            "INSERT INTO passages (rowid, body) VALUES (?, ?)",
            ((index, _spaced(passage.text)) for index, passage in enumerate(self._passages)),
        )

    def search(self, query: str, limit: int) -> list[Match]:
        """Return at most ``limit`` exchanges that contain a word of the query, the best first.

        A newer exchange comes before an older one that scores higher if it may have a newer value.
        """
        terms = _terms(query)
        if not terms:
            return []
        words = self._words(terms)
        best: dict[int, dict[bool, int]] = {}
        totals = {index: sum(scores.values()) for index, scores in words.items()}
        for index in sorted(words, key=lambda index: (-totals[index], -index)):
            best.setdefault(self._exchanges[index], {}).setdefault(self._passages[index].role == "user", index)
        alone = {exchange: sum(totals[index] for index in found.values()) for exchange, found in best.items()}
        scores = {
            exchange: score + NEIGHBOR_WEIGHT * (alone.get(exchange - 1, 0.0) + alone.get(exchange + 1, 0.0))
            for exchange, score in alone.items()
        }
        ranked = sorted(scores, key=lambda exchange: (-scores[exchange], -exchange))[:limit]
        shares = {one: _added(words[index] for index in best[one].values()) for one in ranked}
        order = _newer_first(ranked, scores, shares)
        return [self._match(ranked.index(exchange), exchange, best[exchange].values()) for exchange in order]

    def _words(self, terms: Sequence[str]) -> dict[int, dict[str, float]]:
        """Return the passages that match by index, with the score of each word: its BM25, weighted."""
        words: dict[int, dict[str, float]] = {}
        for term in terms:
            rows = self._connection.execute(
                "SELECT rowid, -bm25(passages) FROM passages WHERE passages MATCH ?", (term,)
            ).fetchall()
            weight = self._weight([index for index, _ in rows])
            for index, score in rows:
                words.setdefault(index, {})[term] = score * weight * self._by_role[index]
        return words

    def _weight(self, indexes: Sequence[int]) -> float:
        """Return the weight of a word in these passages: less than 1 if it's less rare in the user's messages.

        Users often write words such as "recommend", and answers seldom. They say little about a subject.
        """
        if self._asked < ENOUGH:
            return 1.0
        by_user = _rarity(len(self._of_user(indexes)), self._asked)
        return min(1.0, by_user / _rarity(len(indexes), len(self._passages)))

    def _of_user(self, indexes: Iterable[int]) -> set[int]:
        """Return the exchanges whose message of the user is among these passages."""
        return {self._exchanges[index] for index in indexes if self._passages[index].role == "user"}

    def _match(self, rank: int, exchange: int, best: Iterable[int]) -> Match:
        first = bisect_left(self._exchanges, exchange)
        passages = tuple(self._passages[index] for index in best)
        asked = self._passages[first].role == "user" and all(passage.role != "user" for passage in passages)
        return Match(rank, self._entries[first], passages, self._passages[first] if asked else None)

    def close(self) -> None:
        self._connection.close()


def _exchanges(entries: Sequence[Sequence[Passage]]) -> list[int]:
    """Return the number of each passage's exchange: a question and its answer, or a call and its results."""
    numbers: list[int] = []
    number = 0
    for passages in entries:
        last, before = 0, ""
        for passage in passages:
            if passage.message != last:
                follows = passage.role not in ("user", "assistant") or (passage.role, before) == ("assistant", "user")
                # An entry may begin with a result, and doesn't continue the one before.
                number += not (follows and last)
                last, before = passage.message, passage.role
            numbers.append(number)
    return numbers


def _rarity(count: int, total: int) -> float:
    """Return the part of BM25 that's the same for all passages with a word. It's positive, as in FTS5."""
    return max(1e-6, math.log((total - count + 0.5) / (count + 0.5)))


def _newer_first(ranked: Sequence[int], scores: Mapping[int, float], shares: Mapping[int, Counter[str]]) -> list[int]:
    """Move each exchange before all older ones of which it may have a newer value."""

    def may_replace(exchange: int, older: int) -> bool:
        if exchange < older or scores[exchange] < NEWER * scores[older]:
            return False
        lacking = max((score for word, score in shares[older].items() if word not in shares[exchange]), default=0.0)
        # A word that says more than all others, such as an identifier, is the subject.
        return lacking < shares[older].total() / 2 and _cosine(shares[exchange], shares[older]) >= SAME

    order: list[int] = []
    for exchange in ranked:
        places = (place for place, older in enumerate(order) if may_replace(exchange, older))
        order.insert(next(places, len(order)), exchange)
    return order


def _added(scores: Iterable[Mapping[str, float]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for one in scores:
        sums.update(one)
    return sums


def _cosine(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    product = sum(score * other[word] for word, score in one.items() if word in other)
    return product / math.hypot(*one.values()) / math.hypot(*other.values())


def _terms(query: str) -> list[str]:
    """Return the words of a query as quoted phrases, so that none of them is an operator of FTS5."""
    words = [
        _SHORT_FORM.sub("", word.rstrip(_PUNCTUATION))
        for word in _TERM.findall(_clean(query[:LONGEST_QUERY]))
        if any(map(str.isalnum, word))
    ]
    specific = [word for word in words if word.lower() not in _FUNCTION_WORDS] or words
    return ['"{}"'.format(_spaced(word).replace('"', '""')) for word in dict.fromkeys(specific[:MOST_TERMS])]


def _spaced(text: str) -> str:
    return _WITHOUT_SPACES.sub(r" \1 ", _clean(text))


def _clean(text: str) -> str:
    """Replace what SQLite can't store: null characters, which end a text, and lone surrogates."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()
