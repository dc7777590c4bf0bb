"""Count the steps that ``re`` takes, with a matcher that goes back as it does.

Steps are the same on every machine and in every run, so a test can tell linear growth from quadratic growth on short
texts. A bounded repetition counts as one of ``MOST`` at most, because a bound is a constant factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST = 3
LONG = 300
"""A repetition with a higher bound than this counts as one without a bound."""

Then = Callable[[int], int]
"""Matches the rest of an expression from a place, and returns its end or -1."""

REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
ONE = (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY)


class TooMany(Exception):
    """More steps than were allowed."""


def tree(expression: re.Pattern[Any]) -> tuple[Any, int]:
    """Return the parts of an expression, and its flags. One of bytes is read as one of ASCII text."""
    source = expression.pattern
    if isinstance(source, str):
        return parser.parse(source, expression.flags & ~re.U), expression.flags
    return parser.parse(source.decode("latin-1"), expression.flags | re.A), expression.flags | re.A


def bounds(least: int, most: int) -> tuple[int, int]:
    """Return the bounds of a repetition as they are counted."""
    return min(least, MOST), codes.MAXREPEAT if most > LONG else min(most, MOST)


class Counted:
    """An expression whose steps are counted. With ``exact``, it keeps all bounds, so it finds the same as ``re``."""

    def __init__(self, expression: re.Pattern[Any], exact: bool = False) -> None:
        self.exact = exact
        self.parts, self.flags = tree(expression)
        self.text = ""
        self.steps, self.allowed = 0, 10**9
        self.groups: dict[int, tuple[int, int]] = {}
        self.search = self._all(self.parts, lambda at: at)
        self.fullmatch = self._all(self.parts, lambda at: at if at == len(self.text) else -1)

    def count(self, method: str, text: str, allowed: int = 10**9) -> int:
        """Return the steps of a method on a text. Raises ``TooMany``."""
        self.allowed = allowed
        self.run(method, text)
        return self.steps

    def run(self, method: str, text: str) -> list[tuple[int, int]]:
        """Return the places that a method finds."""
        self.text, self.steps, self.groups = text, 0, {}
        if method in ("match", "fullmatch"):
            end = (self.search if method == "match" else self.fullmatch)(0)
            return [(0, end)] if end >= 0 else []
        at, found = 0, []
        while at <= len(self.text):
            end = self.search(at)
            if end >= 0:
                found.append((at, end))
            self.groups = {}
            at = max(at + 1, end)
        return found

    def _step(self, number: int = 1) -> None:
        self.steps += number
        if self.steps > self.allowed:
            raise TooMany

    def _all(self, parts: Any, then: Then) -> Then:
        for op, value in reversed(list(parts)):
            then = self._part(op, value, then)
        return then

    def _part(self, op: Any, value: Any, then: Then) -> Then:
        if op in ONE:
            return self._one(self._set(op, value), then)
        if op in REPEATS:
            return self._repeat(op, value, then)
        if op is codes.AT:
            place = self._compiled(op, value)
            return lambda at: then(at) if place.match(self.text, at) else -1
        if op is codes.SUBPATTERN:
            return self._group(value[0], value[3], then)
        if op is codes.BRANCH:
            return self._branch([self._all(one, then) for one in value[1]])
        if op is codes.ATOMIC_GROUP:
            inside = self._all(value, lambda at: at)
            return lambda at: then(end) if (end := inside(at)) >= 0 else -1
        if op in (codes.ASSERT, codes.ASSERT_NOT):
            return self._look(op, value, then)
        if op is codes.GROUPREF_EXISTS:
            ways = [self._all(one or [], then) for one in value[1:]]
            return lambda at: ways[self.groups.get(value[0], (-1, -1))[1] < 0](at)
        if op is codes.FAILURE:  # Python 3.13's form of `(?!)`
            return lambda at: -1
        assert op is codes.GROUPREF, op
        return self._same(value, then)

    def _compiled(self, op: Any, value: Any) -> re.Pattern[str]:
        found: re.Pattern[str] = compiler.compile(parser.SubPattern(self.parts.state, [(op, value)]), self.flags)
        return found

    def _set(self, op: Any, value: Any) -> Callable[[str], bool]:
        """Return a function that tests whether a character matches, and remembers it."""
        compiled, known = self._compiled(op, value), dict[str, bool]()

        def test(character: str) -> bool:
            if character not in known:
                known[character] = compiled.match(character) is not None
            return known[character]

        return test

    def _one(self, test: Callable[[str], bool], then: Then) -> Then:
        def one(at: int) -> int:
            self._step()
            return then(at + 1) if at < len(self.text) and test(self.text[at]) else -1

        return one

    def _group(self, number: int | None, parts: Any, then: Then) -> Then:
        if number is None:
            return self._all(parts, then)
        began: list[int] = []

        def end(at: int) -> int:
            before = self.groups.get(number, (-1, -1))
            self.groups[number] = (began[-1], at)
            found = then(at)
            if found < 0:
                self.groups[number] = before
            return found

        inside = self._all(parts, end)

        def group(at: int) -> int:
            began.append(at)
            found = inside(at)
            began.pop()
            return found

        return group

    def _branch(self, ways: list[Then]) -> Then:
        def branch(at: int) -> int:
            for way in ways:
                self._step()
                if (end := way(at)) >= 0:
                    return end
            return -1

        return branch

    def _look(self, op: Any, value: tuple[int, Any], then: Then) -> Then:
        direction, parts = value
        wanted = op is codes.ASSERT
        width = parts.getwidth()[0] if direction < 0 else 0
        inside = self._all(parts, lambda at: at)
        return lambda at: then(at) if (at >= width and inside(at - width) >= 0) == wanted else -1

    def _same(self, number: int, then: Then) -> Then:
        def same(at: int) -> int:
            began, ended = self.groups.get(number, (0, -1))
            part = self.text[began:ended] if ended >= 0 else None
            self._step(1 + len(part or ""))
            return then(at + len(part)) if part is not None and self.text.startswith(part, at) else -1

        return same

    def _repeat(self, op: Any, value: tuple[int, int, Any], then: Then) -> Then:
        least, most = value[:2] if self.exact else bounds(value[0], value[1])
        inside = list(value[2])
        if len(inside) == 1 and inside[0][0] in ONE:
            return self._run(op, least, most, self._set(*inside[0]), then)
        if op is codes.POSSESSIVE_REPEAT:
            body = self._loop(codes.MAX_REPEAT, least, most, inside, lambda at: at)
            return lambda at: then(end) if (end := body(at)) >= 0 else -1
        return self._loop(op, least, most, inside, then)

    def _run(self, op: Any, least: int, most: int, test: Callable[[str], bool], then: Then) -> Then:
        def run(at: int) -> int:
            text, end = self.text, at
            last = min(len(text), at + int(most))
            if op is codes.MIN_REPEAT:
                while True:
                    self._step()
                    if end - at >= least and (found := then(end)) >= 0:
                        return found
                    if end >= last or not test(text[end]):
                        return -1
                    end += 1
            while end < last and test(text[end]):
                end += 1
            self._step(end - at + 1)
            for place in range(end, at + least - 1, -1):
                self._step()
                if (found := then(place)) >= 0:
                    return found
                if op is codes.POSSESSIVE_REPEAT:
                    break
            return -1

        return run

    def _loop(self, op: Any, least: int, most: int, inside: list[Any], then: Then) -> Then:
        number, began = 0, -1

        def more(at: int) -> int:
            nonlocal number, began
            before = number, began
            if number >= most or (at == began and number >= least):
                return -1
            number, began = number + 1, at
            end = body(at)
            number, began = before
            return end

        def loop(at: int) -> int:
            self._step()
            lazy = op is codes.MIN_REPEAT
            for way in (then, more) if lazy else (more, then):
                if (way is more or number >= least) and (end := way(at)) >= 0:
                    return end
            return -1

        body = self._all(inside, loop)

        def enter(at: int) -> int:
            nonlocal number, began
            before = number, began
            number, began = 0, -1
            end = loop(at)
            number, began = before
            return end

        return enter


def example(parts: Any, pick: int, wide: str = "a") -> str:
    """Return a text that parts of an expression match, more or less.

    ``pick`` selects among alternatives, and ``wide`` is the character for sets that accept nearly all.
    """
    text = ""
    for op, value in parts:
        if op is codes.LITERAL:
            text += chr(value)
        elif op is codes.IN:
            choices = list(_characters(value, wide))
            text += choices[pick % len(choices)]
        elif op in (codes.ANY, codes.NOT_LITERAL):
            text += wide if value != ord(wide) else "a"
        elif op in REPEATS:
            text += example(value[2], pick, wide) * max(bounds(value[0], value[1])[0], 1 - pick % 2)
        elif op is codes.SUBPATTERN:
            text += example(value[3], pick, wide)
        elif op is codes.ATOMIC_GROUP:
            text += example(value, pick, wide)
        elif op is codes.ASSERT and value[0] < 0:
            text += example(value[1], pick, wide)
        elif op is codes.BRANCH:
            text += example(value[1][pick % len(value[1])], pick, wide)
    return text


def _characters(inside: Any, wide: str) -> Iterator[str]:
    """Yield a character for each part of a set."""
    if inside and inside[0][0] is codes.NEGATE:
        yield wide if (codes.LITERAL, ord(wide)) not in inside else "a"
        yield from "1 -"
    for op, value in inside:
        if op is codes.LITERAL:
            yield chr(value)
        elif op is codes.RANGE:
            yield chr(value[0])
        elif op is codes.CATEGORY:
            yield {"DIGIT": "1", "SPACE": " ", "WORD": "a"}.get(str(value).removeprefix("CATEGORY_"), "-")


def _inner(op: Any, value: Any) -> list[Any]:
    """Return the expressions inside a part of an expression."""
    if op in REPEATS:
        return [value[2]]
    if op in (codes.SUBPATTERN, codes.ASSERT, codes.ASSERT_NOT):
        return [value[-1]]
    if op is codes.BRANCH:
        return list(value[1])
    if op is codes.GROUPREF_EXISTS:
        return [one for one in value[1:] if one]
    return [value] if op is codes.ATOMIC_GROUP else []


def _repeated(parts: Any, wide: str, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield texts for each repetition that has no bound, after a text for the parts before it."""
    for op, value in parts:
        if op in REPEATS and bounds(value[0], value[1])[1] is codes.MAXREPEAT:
            yield from ((before, example(value[2], pick, wide)) for pick in range(3))
        for one in _inner(op, value):
            yield from _repeated(one, wide, before)
        before += example([(op, value)], 0)


def texts(expression: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    """Return beginnings, texts to repeat, and ends that nearly match.

    The first character of a match, repeated where any character fits, lets a match begin at each place.
    """
    parts, _ = tree(expression)
    found = {("", example(parts, pick), "") for pick in range(3)}
    for wide in {"a", example(parts, 0)[:1] or "a"}:
        for before, again in _repeated(parts, wide):
            found |= {(before, again, end) for end in ("", "\x00")}
            found |= {("", before + again, ""), ("", before, "\x00")}
    return sorted(text for text in found if text[1])


def sized(text: tuple[str, str, str], size: int) -> str:
    """Return a text of about a size."""
    return text[0] + text[1] * max(1, size // len(text[1])) + text[2]
