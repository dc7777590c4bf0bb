"""The results of compaction: the messages to send, and figures to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.compaction.planning import Plan
from proxy.summary.store import Origin
from proxy.telemetry.record import Reason

Verdict = Literal["none", "compacted", "shadow", "off", "failed"]


class Forecast(msgspec.Struct, frozen=True):
    """The result that ``enforce`` would have: the tokens of the request, and the steps.

    ``summarized`` is the tokens that the newest checkpoint's summary replaces, and ``written`` those of the summary.
    """

    after: int
    steps: tuple[str, ...]
    summarized: int = 0
    written: int = 0


class Prompt(msgspec.Struct, eq=False, frozen=True):
    """The digests of the messages to send, without reasoning, and the places of answers in the client's request.

    ``covers`` are the digests of the messages that the first one replaces, if the provider compacted them.
    """

    digests: tuple[bytes, ...]
    answers: tuple[int, ...]
    covers: tuple[bytes, ...] = ()

    @property
    def forms(self) -> tuple[tuple[bytes, ...], ...]:
        """Return the digests of the prompt, and those of the prompt that the provider takes for the same."""
        return (self.digests, self.covers + self.digests[1:]) if self.covers else (self.digests,)


class Outcome(msgspec.Struct, eq=False, frozen=True):
    """The result of a request's compaction: the messages to send (``None``: unchanged), and figures to report.

    ``before`` and ``after`` are in tokens, or ``None`` if only bytes decided. ``breaker_open`` is true if the circuit
    breaker kept the proxy from calling a summary model. ``output`` is the lower output limit to send, in tokens, if the
    requested one doesn't fit. ``estimated`` is true if the original request has images or audio, so that ``before``
    contains an estimate, and ``None`` if unknown. ``sizes`` is the tokens of tools and framing, and those of each
    message of the original request, or ``None`` if the proxy didn't count them. ``forecast`` is set in shadow mode.
    ``checkpoints`` is the number of checkpoints that the conversation has passed. ``shared`` is the tokens of the
    request as received that the conversation's last request already had, ``None`` if unknown.
    ``reason`` is the condition that made the proxy compact the request, ``summary_cause`` the reason for a digest, and
    ``archive`` the ids under which the archive keeps the removed messages.
    ``tool`` is true if the request gets the tool to read archived messages.
    ``native`` is true if the provider wrote the summary, ``beta`` the value of ``anthropic-beta`` that it needs.
    ``prompt`` is set if it matters for reasoning that is bound to the messages to send.
    """

    verdict: Verdict
    messages: list[bytes] | None = None
    before: int | None = None
    after: int | None = None
    steps: tuple[str, ...] = ()
    summary: Origin | None = None
    breaker_open: bool = False
    output: int | None = None
    estimated: bool | None = None
    parts: Mapping[str, int] = msgspec.field(default_factory=dict)
    sizes: tuple[int, list[int]] | None = None
    forecast: Forecast | None = None
    prompt: Prompt | None = None
    checkpoints: int = 0
    shared: int | None = None
    reason: Reason | None = None
    summary_cause: str | None = None
    archive: tuple[str, ...] = ()
    tool: bool = False
    native: bool = False
    beta: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The effect of compaction on a request, in tokens and messages. The first ``head`` messages never change."""

    before: int
    after: int
    messages: int
    head: int
    budget: int | None
    steps: tuple[str, ...]
    plan: Plan
    parts: Mapping[str, int]
