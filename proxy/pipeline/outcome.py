"""The results of compaction: the messages to send, and figures to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.compaction.planning import Plan
from proxy.summary.store import Origin

Verdict = Literal["none", "compacted", "shadow", "off", "failed"]


class Outcome(msgspec.Struct, eq=False):
    """What became of a request: the messages to send (``None``: as they came), and what to report.

    ``before`` and ``after`` are tokens; ``None`` where the bytes alone decided. ``resting`` says that no model was
    asked for the summary because too many attempts failed. ``output`` is what is asked for, in tokens, where the
    request asks for more than fits beside it. ``estimated`` says whether the request, as it came, has images or sound,
    of which ``before`` holds an estimate; ``None`` where nobody looked. ``sizes`` are the tokens of tools and framing,
    and those of each message of the request as it came; ``None`` if nobody counted them.
    """

    verdict: Verdict
    messages: list[bytes] | None = None
    before: int | None = None
    after: int | None = None
    steps: tuple[str, ...] = ()
    summary: Origin | None = None
    resting: bool = False
    output: int | None = None
    estimated: bool | None = None
    parts: Mapping[str, int] = msgspec.field(default_factory=dict)
    sizes: tuple[int, list[int]] | None = None

    @property
    def sent(self) -> int | None:
        """Tokens of the request as it is sent; ``None`` where they were not counted."""
        return self.before if self.messages is None else self.after


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be done to a request, in tokens and messages; ``head`` messages at its start are never touched."""

    before: int
    after: int
    messages: int
    head: int
    budget: int | None
    steps: tuple[str, ...]
    plan: Plan
    parts: Mapping[str, int]
