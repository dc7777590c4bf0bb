"""The fit ladder: shorten a single request that is still too large after its plan, in tokens or in bytes.

Each rung shortens only as much as needed, largest messages first. The ladder never changes the head and never
separates a call from its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.pressure import COMMA
from proxy.compaction.render import REMEMBERED_BYTES, STEPS, RenderedConversation, clip_marker
from proxy.compaction.rules import Rules
from proxy.compaction.settings import Clause
from proxy.compaction.stages import evict_results, media, truncate_args
from proxy.compaction.stages.stage import Stage
from proxy.compaction.turn import PROGRAM, Facts, OutgoingMessage, Turn

NAME = "fit"

_NO_KEEP = Clause(messages=1)
_TIGHT_ARGUMENTS = truncate_args.ArgumentRules((), _NO_KEEP, max_length=keeps.FIT_ARGUMENT, tools=("*",))
_ANY_MEDIA = media.MediaRules((), _NO_KEEP)


@dataclass(frozen=True, slots=True)
class _Limit:
    """The limit for all messages together, in tokens or in bytes.

    ``size`` returns the size of one message. ``tokens`` converts a size of a message's text into tokens. Messages
    aren't shortened below ``smallest``.
    """

    room: int
    size: Callable[[OutgoingMessage], int]
    tokens: Callable[[OutgoingMessage, int], int]
    smallest: int

    def excess(self, pieces: Sequence[OutgoingMessage]) -> int:
        return sum(map(self.size, pieces)) - self.room


Rung = Callable[[list[OutgoingMessage], _Limit, Rules, Format], list[OutgoingMessage]]


def fit(
    rendered: RenderedConversation, room: int | None, rules: Rules, format: Format, byte_room: int | None = None
) -> RenderedConversation:
    """Shorten messages until they fit in ``room`` tokens and ``byte_room`` bytes. ``None`` means no limit.

    If the rungs can't save enough, the result is still too large.
    """
    pieces = list(rendered.pieces)
    if room is not None:
        limit = _Limit(room, attrgetter("tokens"), _same, keeps.FIT_TOKENS)
        for rung in (_results, _arguments, _media, _texts, *_LAST):
            if limit.excess(pieces) <= 0:
                break
            pieces = rung(pieces, limit, rules, format)
    if byte_room is not None and sum(map(_bytes, pieces)) > byte_room:
        limit = _Limit(byte_room - byte_room // keeps.BYTE_MARGIN_DIVISOR, _bytes, _as_tokens, keeps.FIT_BYTES)
        # Media come first: they have the most bytes, so that often no text has to be cut.
        for rung in (_media, _results, _arguments, _texts, *_LAST):
            if limit.excess(pieces) <= 0:
                break
            pieces = rung(pieces, limit, rules, format)
    if all(made is piece for made, piece in zip(pieces, rendered.pieces, strict=True)):
        return rendered
    return RenderedConversation(pieces, (*rendered.steps, NAME))


def label_oldest(
    rendered: RenderedConversation, kinds: frozenset[str], most: int, rules: Rules, format: Format
) -> RenderedConversation:
    """Replace the oldest media of these kinds with labels if there are more than ``most``.

    They go in steps of a quarter of ``most``, so that most requests begin like the one before. Pinned messages keep
    theirs, and all do if the policy keeps media.
    """
    pieces, step = list(rendered.pieces), max(1, most // 4)
    counts = [sum(kind in kinds for kind in _kinds(piece, format)) for piece in pieces]
    left = math.ceil((sum(counts) - most) / step) * step
    if left <= 0 or rules.stage(media.MediaRules) is None:
        return rendered
    for index, piece in enumerate(pieces):
        if piece.turn and not piece.pinned and (taken := min(left, counts[index])):
            pieces[index] = _with_labels(piece, piece.turn, kinds, taken, rules, format)
            left -= taken
    steps = {*rendered.steps, media.NAME}
    return RenderedConversation(pieces, tuple(name for name in (*STEPS, NAME) if name in steps))


def _kinds(piece: OutgoingMessage, format: Format) -> Sequence[str]:
    """Return the kinds of the media that a message still has."""
    kinds = () if piece.turn is None else piece.turn.facts.media
    return format.media_kinds(piece.raw) if kinds and piece.changed else kinds


def _with_labels(
    piece: OutgoingMessage, turn: Turn, kinds: frozenset[str], most: int, rules: Rules, format: Format
) -> OutgoingMessage:
    forms, key = turn.facts.forms, (media.NAME, (rules.archive, kinds, most))
    form = None if piece.changed else forms.get(key)
    if form is None:
        raw = media.labeled(piece.raw, turn, format, archive=rules.archive, kinds=kinds, most=most)
        form = Turn(raw, Facts("", "", format.tokens(raw, turn.facts), b""))
        if not piece.changed and len(raw) <= REMEMBERED_BYTES:
            forms[key] = form
    return OutgoingMessage(form.raw, form.facts.tokens, turn)


def _same(piece: OutgoingMessage, size: int) -> int:
    return size


def _bytes(piece: OutgoingMessage) -> int:
    return len(piece.raw) + COMMA


def _as_tokens(piece: OutgoingMessage, size: int) -> int:
    return piece.tokens * size // max(1, _bytes(piece))


def _results(pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format) -> list[OutgoingMessage]:
    chosen = [i for i, p in enumerate(pieces) if p.turn and p.turn.facts.kind == "result"]
    return _level(pieces, chosen, limit, rules, format)


def _arguments(pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format) -> list[OutgoingMessage]:
    return _cut_arguments(
        pieces, limit, truncate_args.Arguments(_TIGHT_ARGUMENTS, format, archive=rules.archive), format
    )


def _all_arguments(pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format) -> list[OutgoingMessage]:
    """Cut all arguments, including those that identify a call: a command can contain a whole file."""
    stage = truncate_args.Arguments(_TIGHT_ARGUMENTS, format, archive=rules.archive, every_key=True)
    return _cut_arguments(pieces, limit, stage, format)


def _cut_arguments(
    pieces: list[OutgoingMessage], limit: _Limit, stage: truncate_args.Arguments, format: Format
) -> list[OutgoingMessage]:
    turns = [(i, p.turn.facts) for i, p in enumerate(pieces) if p.turn and not p.pinned]
    calls = [i for i, facts in turns if facts.calls or (stage.every_key and facts.kind == "assistant")]
    return _reduced(pieces, calls, limit, stage, format)


def _media(pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format) -> list[OutgoingMessage]:
    """Replace images, audio, and files with labels, unless the policy keeps them. No other rung can shorten them.

    The media of the user's last message are kept.
    """
    if rules.stage(media.MediaRules) is None:
        return pieces
    stage = media.MediaStage(_ANY_MEDIA, format, archive=rules.archive)
    last_user = last_user_message(pieces)
    chosen = [
        i
        for i, p in enumerate(pieces)
        if i != last_user and p.turn and p.turn.facts.media and p.turn.facts.kind != "system" and not p.pinned
    ]
    return _reduced(pieces, chosen, limit, stage, format)


def _reduced(
    pieces: list[OutgoingMessage],
    chosen: list[int],
    limit: _Limit,
    stage: Stage,
    format: Format,
) -> list[OutgoingMessage]:
    """Apply a stage to the chosen messages, largest first, until they fit."""
    excess = limit.excess(pieces)
    for index in sorted(chosen, key=lambda i: -limit.size(pieces[i])):
        # Start from the current form: the original would undo the rungs before.
        form = stage.reduce(0, _as_it_is(pieces[index], format))
        if form is not None:
            excess -= _put(pieces, index, form, limit)
        if excess <= 0:
            break
    return pieces


def _texts(pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format) -> list[OutgoingMessage]:
    last_user = last_user_message(pieces)
    chosen = [i for i in _said(pieces) if i != last_user and not _calls(pieces[i])]
    return _level(pieces, chosen, limit, rules, format)


def _words_of_calls(
    pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format
) -> list[OutgoingMessage]:
    """Shorten the text of assistant messages with calls.

    This comes late: the limit covers the whole message, so the text is lost before the arguments shrink.
    """
    return _level(pieces, [i for i in _said(pieces) if _calls(pieces[i])], limit, rules, format)


def _directives(pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format) -> list[OutgoingMessage]:
    """Shorten system messages inside the conversation, but never those at its start."""
    system = [i for i, p in enumerate(pieces) if p.turn and p.turn.facts.kind == "system"]
    inside = [index for place, index in enumerate(system) if index != place]
    return _level(pieces, inside, limit, rules, format)


def _said(pieces: Sequence[OutgoingMessage]) -> list[int]:
    """Return what the user, the assistant, and programs said."""
    turns = [(i, p.turn.facts) for i, p in enumerate(pieces) if p.turn]
    return [i for i, f in turns if f.kind in ("user", "assistant") or (f.kind == "" and f.role in ("user", PROGRAM))]


def _calls(piece: OutgoingMessage) -> bool:
    return piece.turn is not None and bool(piece.turn.facts.calls)


def _last_user_message(
    pieces: list[OutgoingMessage], limit: _Limit, rules: Rules, format: Format
) -> list[OutgoingMessage]:
    last = last_user_message(pieces)
    if not rules.shorten_last_user_message or last is None:
        return pieces
    return _level(pieces, [last], limit, rules, format)


def last_user_message(pieces: Sequence[OutgoingMessage]) -> int | None:
    """Return the index of the newest user message that the client sent; ``None`` if there is none."""
    users = (i for i in range(len(pieces) - 1, -1, -1) if (t := pieces[i].turn) and t.facts.kind == "user")
    return next(users, None)


def _level(
    pieces: list[OutgoingMessage], chosen: list[int], limit: _Limit, rules: Rules, format: Format
) -> list[OutgoingMessage]:
    """Shorten the largest of the chosen messages to one common size that removes the excess.

    The size is never below ``limit.smallest``.
    """
    excess = limit.excess(pieces)
    texts = {i: _text_of(pieces[i], format) for i in chosen if not pieces[i].pinned}
    sizes = {i: limit.size(text) for i, text in texts.items()}
    ordered = sorted(sizes, key=lambda i: -sizes[i])
    taken = level = 0
    for number, index in enumerate(ordered, start=1):
        taken += sizes[index]
        level = max((taken - excess) // number, limit.smallest)
        if number < len(ordered) and level >= sizes[ordered[number]]:
            break
    for index in ordered:
        turn: Turn | None = pieces[index].turn
        if turn is None or sizes[index] <= level:
            continue
        # Start from the current form: the original would restore the arguments.
        source = _as_it_is(pieces[index], format) if turn.facts.calls else turn
        form = evict_results.shortened(source, limit.tokens(texts[index], level), format, clip_marker(turn, rules))
        if form is not None and _labeled(pieces[index], format):
            # Insert labels after the cut, so that they don't displace the ends of the text.
            form = media.MediaStage(_ANY_MEDIA, format, archive=rules.archive).reduce(0, form)
        if form is not None:
            _put(pieces, index, form, limit)
    return pieces


def _labeled(piece: OutgoingMessage, format: Format) -> bool:
    """Return whether labels have replaced the media of a message."""
    return piece.turn is not None and bool(piece.turn.facts.media) and not _kinds(piece, format)


def _text_of(piece: OutgoingMessage, format: Format) -> OutgoingMessage:
    """Return a message without its media or their labels. Only the text can be shortened."""
    if piece.turn is None or not piece.turn.facts.media:
        return piece
    facts = piece.turn.facts
    raw, tokens = (piece.turn.raw, facts.tokens) if _labeled(piece, format) else (piece.raw, piece.tokens)
    return OutgoingMessage(format.without_media(raw), tokens - facts.apart, piece.turn)


def _put(pieces: list[OutgoingMessage], index: int, form: Turn, limit: _Limit) -> int:
    """Replace a message if the new form has fewer tokens. Return the size that this saves."""
    before = pieces[index]
    made = OutgoingMessage(form.raw, form.facts.tokens, before.turn)
    if made.tokens >= before.tokens:
        return 0
    pieces[index] = made
    return limit.size(before) - limit.size(made)


def _as_it_is(piece: OutgoingMessage, format: Format) -> Turn:
    """Return a client's message in its current form."""
    if piece.turn is None:
        raise ValueError("a summary isn't a message from the client")
    if not piece.changed:
        return piece.turn
    apart = 0 if _labeled(piece, format) else piece.turn.facts.apart
    return Turn(piece.raw, piece.turn.facts.changed(tokens=piece.tokens, apart=apart))


_LAST: tuple[Rung, ...] = (_all_arguments, _words_of_calls, _directives, _last_user_message)
"""The last rungs, for both tokens and bytes."""
