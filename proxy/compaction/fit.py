"""The fit ladder: what is done to one request alone when the plan still leaves it too large.

Each rung takes off no more than is needed, the largest messages first. Nothing here touches the head, nor parts a
call from its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.compaction.message import RESULT_ROLES, MessageCounter, Turn
from proxy.compaction.render import CLIP_MARKER, Piece, Rendered
from proxy.compaction.rules import ArgumentRules, Rules
from proxy.compaction.stages import arguments, results

NAME = "fit"

SMALLEST = 120
"""Below this many tokens a message is not shortened."""

_TEXT_MARKER = (
    "\n[The compaction proxy left out {lines} lines here ({tokens} tokens): the message is too long for the "
    "model's input. This line is not part of the message.]\n"
)
_TIGHT_ARGUMENTS = ArgumentRules((), arguments.NO_KEEP, 400, "...(argument truncated)", frozenset({"*"}))

Choose = Callable[[Sequence[Piece]], list[int]]


def fit(rendered: Rendered, room: int, rules: Rules, count: MessageCounter) -> Rendered:
    """The messages shortened until they take ``room`` tokens at most, or as near to that as the rungs reach."""
    pieces = list(rendered.pieces)
    before = rendered.tokens
    for rung in (_results, _arguments, _texts, _last_user_message):
        excess = sum(p.tokens for p in pieces) - room
        if excess <= 0:
            break
        pieces = rung(pieces, excess, rules, count)
    if sum(p.tokens for p in pieces) >= before:
        return rendered
    return Rendered(pieces, (*rendered.steps, NAME))


def _results(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    chosen = [i for i, p in enumerate(pieces) if p.turn and p.turn.facts.role in RESULT_ROLES]
    return _level(pieces, chosen, excess, CLIP_MARKER, count)


def _arguments(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    reduce = arguments.stage(_TIGHT_ARGUMENTS)
    calls = [i for i, p in enumerate(pieces) if p.turn and p.turn.facts.calls]
    for index in sorted(calls, key=lambda i: -pieces[i].tokens):
        turn = pieces[index].turn
        form = reduce([turn], 0, count) if turn else None
        if form is not None and form.tokens < pieces[index].tokens:
            excess -= pieces[index].tokens - form.tokens
            pieces[index] = Piece(form.raw, form.tokens, turn)
        if excess <= 0:
            break
    return pieces


def _texts(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    last_user = last_user_message(pieces)
    chosen = [
        i
        for i, p in enumerate(pieces)
        if i != last_user and p.turn and p.turn.facts.role in ("user", "assistant") and not p.turn.facts.calls
    ]
    return _level(pieces, chosen, excess, _TEXT_MARKER, count)


def _last_user_message(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    last = last_user_message(pieces)
    if not rules.shorten_last_user_message or last is None:
        return pieces
    return _level(pieces, [last], excess, _TEXT_MARKER, count)


def last_user_message(pieces: Sequence[Piece]) -> int | None:
    """The index of the newest message of the user's own, if it is among the pieces."""
    users = (i for i in range(len(pieces) - 1, -1, -1) if (t := pieces[i].turn) and t.facts.role == "user")
    return next(users, None)


def _level(pieces: list[Piece], chosen: list[int], excess: int, marker: str, count: MessageCounter) -> list[Piece]:
    """Hold the largest of the chosen pieces to one size, so low that the excess goes; not below ``SMALLEST``."""
    ordered = sorted(chosen, key=lambda i: -pieces[i].tokens)
    taken = level = 0
    for number, index in enumerate(ordered, start=1):
        taken += pieces[index].tokens
        level = max((taken - excess) // number, SMALLEST)
        if number < len(ordered) and level >= pieces[ordered[number]].tokens:
            break
    for index in ordered:
        turn: Turn | None = pieces[index].turn
        if turn is None or pieces[index].tokens <= level:
            continue
        form = results.shortened(turn, level, count, marker)
        if form is not None and form.tokens < pieces[index].tokens:
            pieces[index] = Piece(form.raw, form.tokens, turn)
    return pieces
