"""The interface of a cheap stage: it rewrites single messages and needs no model."""

from __future__ import annotations

from typing import Protocol

from proxy.compaction.triggers import Clause, Trigger
from proxy.compaction.turn import Turn


class Stage(Protocol):
    """A stage with the rules of a policy, for one conversation."""

    @property
    def name(self) -> str:
        """Return the name for reports."""
        ...

    @property
    def trigger(self) -> Trigger:
        """Return the trigger that applies the stage."""
        ...

    @property
    def keep(self) -> Clause:
        """Return how much recent conversation the stage leaves unchanged."""
        ...

    @property
    def spares_newest_user(self) -> bool:
        """Return whether the stage also leaves the newest user message and all later messages unchanged."""
        ...

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        """Return the message at ``index`` in a shorter form; ``None`` to keep it unchanged.

        An earlier stage may have shortened ``turn`` already. The result depends only on the input and is cached in the
        facts of the message.
        """
        ...

    def later(self) -> dict[int, int]:
        """Return the messages that depend on a later message: the later index, by index."""
        ...


def kept_as(turn: Turn, *, archive: bool) -> str:
    """Return a sentence for notes that names the message's archive id; empty without an archive."""
    return f" The complete message is in the archive as {turn.facts.id}." if archive else ""


NO_LATER: dict[int, int] = {}
"""Returned by stages that look at one message only."""
