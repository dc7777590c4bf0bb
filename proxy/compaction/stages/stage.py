"""The interface of a cheap stage: it rewrites single messages and needs no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from proxy.compaction.effects import NOTE
from proxy.compaction.format import Format
from proxy.compaction.settings import KEEP, TRIGGER, Clause, Trigger
from proxy.compaction.turn import Facts, Turn


@dataclass(frozen=True, slots=True)
class StageRules(ABC):
    """The settings of a cheap stage.

    ``SECTION`` is its section of a policy, and its name in reports, headers, and records.
    """

    SECTION: ClassVar[str]

    trigger: Trigger = TRIGGER
    keep: Clause = KEEP

    @abstractmethod
    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        """Return the stage for one conversation. ``archive``: its notes name the archive id of the original."""

    def is_costly(self, facts: Facts) -> bool:
        """Return whether the stage may rewrite a message. That's slow the first time and cached afterwards."""
        return False


class Stage(ABC):
    """A stage with the rules of a policy, for one conversation."""

    name: ClassVar[str]
    """The name for reports."""
    spares_newest_user: ClassVar[bool] = False
    """True if the stage also leaves the newest user message and all later messages unchanged."""

    def __init__(self, rules: StageRules) -> None:
        self.trigger: Trigger = rules.trigger
        self.keep: Clause = rules.keep

    @abstractmethod
    def reduce(self, index: int, turn: Turn) -> Turn | None:
        """Return the message at ``index`` in a shorter form; ``None`` to keep it unchanged.

        An earlier stage may have shortened ``turn`` already. The result depends only on the input and is cached in the
        facts of the message.
        """

    def later(self) -> dict[int, int]:
        """Return the messages that depend on a later message: the later index, by index."""
        return NO_LATER


def kept_as(turn: Turn, *, archive: bool) -> str:
    """Return a sentence for notes that names the message's archive id; empty without an archive."""
    return f" The complete message is in the archive as {turn.facts.id}." if archive else ""


def repeated_reminders(body: Sequence[Turn]) -> set[int]:
    """Return the messages that only repeat the reminders of the message with reminders before them."""
    found: set[int] = set()
    before: set[str] = set()
    for index, turn in enumerate(body):
        if notes := {key for keys in turn.facts.rare.effects for key in keys if key.startswith(NOTE)}:
            if notes <= before:
                found.add(index)
            before = notes
    return found


NO_LATER: dict[int, int] = {}  # returned by stages that look at one message only
