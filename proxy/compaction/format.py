"""How the engine reads, counts, and rewrites the units of a conversation. Each dialect implements it once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.compaction.turn import Facts, OutgoingMessage, Turn

TextCounter = Callable[[str], int]  # count the tokens of a text with the tokenizer of the requested model

Rewrite = Callable[[str, str], str | None]
"""Take a tool's name and the text of a call's arguments. Return shorter arguments; ``None`` to keep them."""


@dataclass(frozen=True, slots=True)
class ForeignSummary:
    """A summary in a unit: the tool that wrote it, its text, and the user's own texts around it, in order."""

    tool: str
    summary: str
    user_text: tuple[str, ...]


Binding = Literal["never", "until_open_round", "always"]
"""Which reasoning becomes invalid if an earlier part of the prompt changes: none, all but that of the newest exchange,
or all of it."""


class Format(ABC):
    """Access to the JSON of units. Every method takes any bytes, and treats unknown shapes as empty."""

    text_tokens: TextCounter
    """Count the tokens of a text without a frame."""

    def counted(self, turn: Turn, text: str, count: TextCounter) -> int:
        """Return ``count(text)``. If the text ends with that of a unit, its facts may have most of it."""
        return count(text)

    @property
    @abstractmethod
    def binds_reasoning(self) -> Binding:
        """Return which reasoning is bound to the prompt before it."""

    @abstractmethod
    def without_reasoning(self, raw: bytes) -> bytes:
        """Return a unit without reasoning that is bound to the prompt before it.

        Return ``raw`` itself if there is none, and no bytes if nothing else is in the unit.
        """

    @abstractmethod
    def read(self, raw: bytes) -> Facts:
        """Return the facts of a unit."""

    @abstractmethod
    def tokens(self, raw: bytes, facts: Facts | None = None) -> int:
        """Return the tokens of a unit with its frame. ``facts`` are those of the unit that ``raw`` was made from."""

    @abstractmethod
    def frame_tokens(self, raw: bytes, facts: Facts) -> int:
        """Return the tokens that a unit would have without its text and its media."""

    @abstractmethod
    def inner_tokens(self, facts: Facts) -> TextCounter:
        """Return a counter for text inside such a unit. Some providers escape the texts of results."""

    @abstractmethod
    def text(self, raw: bytes) -> str:
        """Return the visible text. Parts that aren't text become a label, for example ``[image]``."""

    @abstractmethod
    def clients_text(self, raw: bytes) -> str | None:
        """Return the visible text of a unit, or ``None`` if the model wrote the unit."""

    @abstractmethod
    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        """Return the name and the arguments of each tool call, as text."""

    @abstractmethod
    def texts(self, raw: bytes) -> list[str]:
        """Return the texts of a unit that may be shortened. None of them is empty."""

    @abstractmethod
    def with_texts(self, raw: bytes, texts: Sequence[str]) -> bytes:
        """Replace those texts, in order. Missing ones become empty. Other parts and fields keep their bytes."""

    def replaceable_text(self, raw: bytes) -> str | None:
        """Return the texts that may be shortened as one; ``None`` if there is none."""
        return "\n".join(self.texts(raw)) or None

    def with_text(self, raw: bytes, text: str) -> bytes:
        """Replace all those texts with one."""
        return self.with_texts(raw, [text])

    @abstractmethod
    def in_effect(self, raw: bytes) -> Sequence[bytes]:
        """Return, for each of the ``effects`` of a unit, a unit with only what it needs, without reasoning."""

    @abstractmethod
    def single_calls(self, raw: bytes) -> Mapping[str, bytes]:
        """Return, by the ids of a unit's calls, a unit with only the calls that have this id, and unbound reasoning."""

    @abstractmethod
    def with_result(self, raw: bytes, text: str) -> bytes:
        """Replace everything that a result contains with a text."""

    @abstractmethod
    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        """Replace the arguments of calls. Return ``raw`` itself if ``rewrite`` keeps them all."""

    @abstractmethod
    def media_kinds(self, raw: bytes) -> tuple[str, ...]:
        """Return the kind of each image, audio, video, and file in a unit, in order."""

    @abstractmethod
    def without_media(self, raw: bytes) -> bytes:
        """Return a unit without its media parts."""

    @abstractmethod
    def with_labels(self, raw: bytes, label: Callable[[str], str | None]) -> bytes:
        """Replace media parts with texts. ``label`` takes the kind of a part, such as ``image``; ``None`` keeps it."""

    @abstractmethod
    def user_text(self, raw: bytes) -> list[tuple[str, str]]:
        """Return the user's own texts in a unit, each with a label for its media.

        A unit with another tool's summary has no labels, and its summary isn't one of the texts.
        """

    def speaker(self, raw: bytes) -> str:
        """Return the name of the participant who wrote a message; empty if it has none."""
        return ""

    @abstractmethod
    def foreign_summary(self, raw: bytes) -> ForeignSummary | None:
        """Return the summary that another tool wrote into a unit; ``None`` if there is none."""

    @abstractmethod
    def summary(self, role: str, text: str) -> bytes:
        """Return the unit that replaces a part of a conversation. ``role`` is the policy's ``summary.role``."""

    @abstractmethod
    def needs_repair(self, messages: Sequence[Facts]) -> bool:
        """Return whether a strict server may reject these units. The check is fast and may be wrong in one way only:
        it can return true for a valid conversation.
        """

    @abstractmethod
    def repaired(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the units of a whole request in a form that a strict server accepts."""

    @abstractmethod
    def alternating(self, pieces: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        """Return the units in a form in which user and assistant alternate, starting with the user."""
