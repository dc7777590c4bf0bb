"""The fit ladder: what is done to one request alone when the plan still leaves it too large.

Each rung takes off no more than is needed, the largest messages first. Nothing here touches the head, nor parts a
call from its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from proxy.compaction.conditions import Clause
from proxy.compaction.message import HEAD_ROLES, RESULT_ROLES, MessageCounter, Turn
from proxy.compaction.render import Piece, Rendered, clip_marker
from proxy.compaction.rules import ArgumentRules, MediaRules, Rules
from proxy.compaction.stages import arguments, media, results

NAME = "fit"

SMALLEST = 120
"""Below this many tokens a message is not shortened."""

_NO_KEEP = Clause(messages=1)
_TIGHT_ARGUMENTS = ArgumentRules((), _NO_KEEP, 400, None, frozenset({"*"}))
_ANY_MEDIA = MediaRules((), _NO_KEEP)

Choose = Callable[[Sequence[Piece]], list[int]]


def fit(rendered: Rendered, room: int, rules: Rules, count: MessageCounter) -> Rendered:
    """The messages shortened until they take ``room`` tokens at most, or as near to that as the rungs reach."""
    pieces = list(rendered.pieces)
    before = rendered.tokens
    for rung in (_results, _arguments, _media, _texts, _last_user_message):
        excess = sum(p.tokens for p in pieces) - room
        if excess <= 0:
            break
        pieces = rung(pieces, excess, rules, count)
    if sum(p.tokens for p in pieces) >= before:
        return rendered
    return Rendered(pieces, (*rendered.steps, NAME))


def _results(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    chosen = [i for i, p in enumerate(pieces) if p.turn and p.turn.facts.role in RESULT_ROLES]
    return _level(pieces, chosen, excess, rules, count)


def _arguments(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    stage = arguments.Arguments(_TIGHT_ARGUMENTS, count, archive=rules.archive)
    calls = [i for i, p in enumerate(pieces) if p.turn and p.turn.facts.calls and not p.pinned]
    for index in sorted(calls, key=lambda i: -pieces[i].tokens):
        turn = pieces[index].turn
        form = stage.reduce(0, turn) if turn else None
        if form is not None and form.facts.tokens < pieces[index].tokens:
            excess -= pieces[index].tokens - form.facts.tokens
            pieces[index] = Piece(form.raw, form.facts.tokens, turn)
        if excess <= 0:
            break
    return pieces


def _media(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    """Labels for images, audio and files, unless the policy leaves those alone: no other rung can make them smaller.

    The user's last message keeps its own."""
    if rules.media is None:
        return pieces
    stage = media.Media(_ANY_MEDIA, count, archive=rules.archive)
    last_user = last_user_message(pieces)
    chosen = [
        i
        for i, p in enumerate(pieces)
        if i != last_user and p.turn and p.turn.facts.media and p.turn.facts.role not in HEAD_ROLES and not p.pinned
    ]
    for index in sorted(chosen, key=lambda i: -pieces[i].tokens):
        form = stage.reduce(0, _as_it_is(pieces[index]))
        if form is not None:
            excess -= pieces[index].tokens - form.facts.tokens
            pieces[index] = Piece(form.raw, form.facts.tokens, pieces[index].turn)
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
    return _level(pieces, chosen, excess, rules, count)


def _last_user_message(pieces: list[Piece], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    last = last_user_message(pieces)
    if not rules.shorten_last_user_message or last is None:
        return pieces
    return _level(pieces, [last], excess, rules, count)


def last_user_message(pieces: Sequence[Piece]) -> int | None:
    """The index of the newest message of the user's own, if it is among the pieces."""
    users = (i for i in range(len(pieces) - 1, -1, -1) if (t := pieces[i].turn) and t.facts.role == "user")
    return next(users, None)


def _level(pieces: list[Piece], chosen: list[int], excess: int, rules: Rules, count: MessageCounter) -> list[Piece]:
    """Hold the largest of the chosen pieces to one size, so low that the excess goes; not below ``SMALLEST``."""
    ordered = sorted((i for i in chosen if not pieces[i].pinned), key=lambda i: -pieces[i].tokens)
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
        # Made of the original, a shortened message would have its pictures back.
        source = _as_it_is(pieces[index]) if turn.facts.media else turn
        form = results.shortened(source, level, count, clip_marker(turn, rules))
        if form is not None and form.facts.tokens < pieces[index].tokens:
            pieces[index] = Piece(form.raw, form.facts.tokens, turn)
    return pieces


def _as_it_is(piece: Piece) -> Turn:
    """A client's message in the form that it has by now."""
    if piece.turn is None:
        raise ValueError("a summary is no message of the client's")
    if not piece.changed:
        return piece.turn
    return Turn(piece.raw, replace(piece.turn.facts, tokens=piece.tokens, forms={}))
