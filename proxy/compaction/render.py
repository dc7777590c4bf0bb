"""From a plan to the messages that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction.message import HEAD_ROLES, MessageCounter, Turn
from proxy.compaction.rules import Rules
from proxy.compaction.scan import Plan
from proxy.compaction.stages import arguments, cheap_stages, results

SUMMARY = "summary"
STEPS = (arguments.NAME, results.NAME, SUMMARY)
"""The names of the steps in the order in which they are reported."""

# Longer forms are made anew each time: what is remembered must stay small.
REMEMBERED_BYTES = 65_536

CLIP_MARKER = (
    "\n[The compaction proxy left out {lines} lines here ({tokens} tokens): the tool result is too long for the "
    "model's input. This line is not part of the result.]\n"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A message as it will be sent. ``turn`` is the client's message it comes from; ``None`` for the summary."""

    raw: bytes
    tokens: int
    turn: Turn | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """The messages to be sent, and the names of the steps that changed something, in their order."""

    pieces: list[Piece]
    steps: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all messages, head included, tools not."""
        return sum(piece.tokens for piece in self.pieces)


def render(
    turns: Sequence[Turn], head: int, plan: Plan, rules: Rules, summary: Piece | None, count: MessageCounter
) -> Rendered:
    """The messages under a plan. ``summary`` stands for the body up to ``plan.cut`` and must be there if that is not 0.

    System messages from inside the summarised part stay, in their order, after the summary.
    """
    body = turns[head:]
    pieces = [Piece(t.raw, t.facts.tokens, t) for t in turns[:head]]
    applied: set[str] = set()
    if plan.cut:
        if summary is None:
            raise ValueError("a plan with a cut needs a summary")
        pieces.append(summary)
        pieces += [Piece(t.raw, t.facts.tokens, t) for t in body[: plan.cut] if t.facts.role in HEAD_ROLES]
    reducers = [
        (s.name, plan.frontiers[s.name], s.reduce) for s in cheap_stages(rules, body) if s.name in plan.frontiers
    ]

    for index in range(plan.cut, len(body)):
        piece = Piece(body[index].raw, body[index].facts.tokens, body[index])
        for name, frontier, reduce in reducers:
            form = reduce(body, index, count) if index < frontier else None
            if form is not None and form.tokens < piece.tokens:
                piece = Piece(form.raw, form.tokens, body[index])
                applied.add(name)
        clip = plan.clips.get(index)
        if clip is not None and clip < piece.tokens:
            piece = clipped(piece, clip, count)
            applied.add(results.NAME)
        pieces.append(piece)
    if plan.cut:
        applied.add(SUMMARY)
    return Rendered(pieces, tuple(name for name in STEPS if name in applied))


def clipped(piece: Piece, max_tokens: int, count: MessageCounter) -> Piece:
    """A tool result held to a size. What comes out is remembered with the message."""
    if piece.turn is None:
        raise ValueError("only a client's message can be held to a size")
    forms = piece.turn.facts.forms
    key = ("clip", max_tokens)
    form = forms[key] if key in forms else results.shortened(piece.turn, max_tokens, count, CLIP_MARKER)
    if form is None or len(form.raw) <= REMEMBERED_BYTES:
        forms[key] = form
    return piece if form is None else Piece(form.raw, form.tokens, piece.turn)
