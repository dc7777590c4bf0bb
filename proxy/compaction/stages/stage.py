"""What a cheap stage is: a rewrite of single messages that needs no model."""

from __future__ import annotations

from typing import Protocol

from proxy.compaction.conditions import Clause, Trigger
from proxy.compaction.message import Turn


class Stage(Protocol):
    """A stage under the rules of a policy, for one conversation."""

    @property
    def name(self) -> str:
        """As reports have it."""
        ...

    @property
    def trigger(self) -> Trigger:
        """When it is applied."""
        ...

    @property
    def keep(self) -> Clause:
        """How much recent conversation it spares."""
        ...

    @property
    def spares_newest_user(self) -> bool:
        """Whether it spares the user's newest message and all that follows it, too."""
        ...

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        """What becomes of the message at ``index``, which an earlier stage may have reduced already; ``None`` where
        it is left alone. The same input gives the same outcome: what is made is remembered with the message."""
        ...

    def later(self) -> dict[int, int]:
        """Messages that may be reduced only once a later one has been seen: which one, by index."""
        ...


def kept_as(turn: Turn, *, archive: bool) -> str:
    """Where the whole of a message can be had, as a sentence that ends a note; nothing without an archive."""
    return f" The whole is kept in the archive as {turn.facts.id}." if archive else ""


NO_LATER: dict[int, int] = {}
"""For stages that look at one message alone."""
