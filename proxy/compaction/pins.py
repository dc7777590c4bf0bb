"""Pinned messages: a policy's patterns select messages that are never changed or removed.

The search takes linear time, for any expression and any text. pydantic includes Rust's regex engine, which never
backtracks. It doesn't support look-around, backreferences, or possessive quantifiers, because these need backtracking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic_core import SchemaError, SchemaValidator, core_schema

from proxy.compaction.format import Format
from proxy.compaction.turn import Turn

Search = Callable[[str], bool]
"""Return whether a pattern matches anywhere in a text. The text must come from ``whole``."""


class NotSearchable(ValueError):
    """The engine doesn't support an expression. The message is the engine's own."""


def search_for(pattern: str) -> Search:
    """Compile an expression. Raise ``NotSearchable`` if the engine doesn't support it."""
    try:
        checked = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True))
    except SchemaError as error:
        raise NotSearchable(str(error).splitlines()[-1].strip().removeprefix("error: ")) from None
    return checked.isinstance_python


def whole(text: str) -> str:
    """Replace lone surrogates, which the engine can't read, with replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@dataclass(frozen=True)
class Pins:
    """Regular expressions. A message is pinned if its text or call arguments match one of them."""

    patterns: tuple[str, ...] = ()
    _searches: tuple[Search, ...] = field(init=False, compare=False, repr=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_searches", tuple(search_for(pattern) for pattern in self.patterns))

    def holds(self, turn: Turn, format: Format) -> bool:
        """Return whether a message is pinned. The result is cached in its facts."""
        if not self.patterns:
            return False
        known = turn.facts.pinned
        if self.patterns not in known:
            arguments = (text for _, text in format.arguments(turn.raw))
            text = whole("\n".join([format.text(turn.raw), *arguments]))
            known[self.patterns] = any(search(text) for search in self._searches)
        return known[self.patterns]

    def among(self, body: Sequence[Turn], format: Format) -> frozenset[int]:
        """Return the indexes of the pinned messages."""
        if not self.patterns:
            return frozenset()
        return frozenset(index for index, turn in enumerate(body) if self.holds(turn, format))
