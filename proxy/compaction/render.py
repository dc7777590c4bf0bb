"""Apply a plan: build the outgoing messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.compaction.format import Format
from proxy.compaction.planning import Frontier, Plan
from proxy.compaction.pressure import COMMA
from proxy.compaction.rules import Rules
from proxy.compaction.stages import NAMES, evict_results, media
from proxy.compaction.stages.stage import Stage, kept_as
from proxy.compaction.state import unloaded
from proxy.compaction.turn import Forms, OutgoingMessage, Turn

SUMMARY = "summary"
STEPS = (*NAMES, SUMMARY)  # the names of all steps, in the order of reports

# Longer forms aren't cached and are rebuilt for each request, so that the cache stays small.
REMEMBERED_BYTES = 65_536

_CLIP_MARKER = (
    "\n[The compaction proxy left out {lines} lines ({characters} characters, {tokens} tokens) of this {what} here, "
    "because it is too long for the model's input. This note is not part of the {what}.{kept}]\n"
)


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """The messages to send, and the names of the steps that changed them, in order."""

    pieces: list[OutgoingMessage]
    steps: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Return the tokens of all messages, including the head but not the tools."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def summary_tokens(self) -> int:
        """Return the tokens of the summary message."""
        return sum(piece.tokens for piece in self.pieces if piece.turn is None and not piece.state)

    @property
    def state_tokens(self) -> int:
        """Return the tokens of what was put into effect before the summary's end."""
        return sum(piece.tokens for piece in self.pieces if piece.state)

    @property
    def bytes(self) -> int:
        """Return the bytes of all messages and their separators, without the rest of the body."""
        return sum(len(piece.raw) + COMMA for piece in self.pieces)


def render(
    turns: Sequence[Turn], head: int, plan: Plan, rules: Rules, summary: OutgoingMessage | None, format: Format
) -> RenderedConversation:
    """Return the messages under a plan. ``summary`` replaces the body up to ``plan.cut``.

    The kept messages from before the cut follow the summary, in order. They are the newest system messages and
    exchanges with a pinned message. The user messages that later messages still work on are kept, too.

    Raise ``ValueError`` if the plan has a cut but ``summary`` is ``None``.
    """
    body = turns[head:]
    pieces = [OutgoingMessage(t.raw, t.facts.tokens, t) for t in turns[:head]]
    applied: set[str] = set()
    live: list[tuple[int, OutgoingMessage]] = []
    if plan.cut:
        if summary is None:
            raise ValueError("a plan with a cut needs a summary")
        pieces.append(summary)
        applied.add(SUMMARY)
        # What was put into effect before the cut, without the messages that are kept as a whole.
        kept = set(before_cut(plan))
        units = [(index, turn) for index, turn in plan.state.units if index not in kept]
        notice = unloaded(plan.state, rules.role, format)
        units += [] if notice is None else [(plan.cut - 1, notice)]
        live = [(index, OutgoingMessage(turn.raw, turn.facts.tokens, None, state=True)) for index, turn in units]
    stages: list[tuple[Stage, Frontier]] = []
    if plan.frontiers:
        stages = [(s, plan.frontiers[s.name]) for s in rules.applied_to(body, format) if s.name in plan.frontiers]

    for index in (*before_cut(plan), *range(plan.cut, len(body))):
        # In order, because a later reminder may end one that a kept message has.
        while live and live[0][0] < index:
            pieces.append(live.pop(0)[1])
        original = body[index]
        if (turn := _current(original, index, plan, format)) is None:
            continue
        if index in plan.pinned:
            pieces.append(OutgoingMessage(turn.raw, turn.facts.tokens, original, pinned=True))
            continue
        clip = plan.clips.get(index)
        for stage, frontier in stages if index >= plan.cut else ():
            if index >= frontier.position or stage.later().get(index, index) >= frontier.seen:
                continue
            if stage.name == media.NAME and (form := _clipped(turn, clip, rules, format)) is not None:
                # Cut the text before labels replace media, so that they don't displace the ends of the text.
                turn, clip = form, None
                applied.add(evict_results.NAME)
            if (form := stage.reduce(index, turn)) is not None:
                turn = form
                applied.add(stage.name)
        if (form := _clipped(turn, clip, rules, format)) is not None:
            turn = form
            applied.add(evict_results.NAME)
        pieces.append(OutgoingMessage(turn.raw, turn.facts.tokens, original))
    pieces += [piece for _, piece in live]
    return RenderedConversation(pieces, tuple(name for name in STEPS if name in applied))


def _current(turn: Turn, index: int, plan: Plan, format: Format) -> Turn | None:
    """Return a unit without reasoning that has become invalid; ``None`` if nothing is left of it."""
    if index >= plan.stale_reasoning or turn.facts.kind != "assistant":
        return turn
    forms, key = turn.facts.forms, ("reasoning", None)
    if key not in forms:
        raw = format.without_reasoning(turn.raw)
        facts = replace(format.read(raw) if raw else turn.facts, digest=turn.facts.digest, made=Forms(forms.account))
        forms[key] = None if raw is turn.raw else Turn(raw, facts)
    form = forms[key] or turn
    return form if form.raw else None


def before_cut(plan: Plan) -> list[int]:
    """Return the indexes of the kept messages from before the cut, in order."""
    return sorted({*plan.retained, *plan.current_user_message.get(plan.cut, ())})


def clip_marker(turn: Turn, rules: Rules) -> str:
    """Return the marker for the omitted middle of a message that is too long for any prompt."""
    what = "tool result" if turn.facts.kind == "result" else "message"
    return _CLIP_MARKER.replace("{what}", what).replace("{kept}", kept_as(turn, archive=rules.archive))


def _clipped(turn: Turn, clip: int | None, rules: Rules, format: Format) -> Turn | None:
    """Shorten a message to a size in tokens, including media. Cache the result in its facts.

    Return ``None`` if there is no size, if the message isn't larger, or if shortening saves nothing.
    """
    if clip is None or clip >= turn.facts.tokens:
        return None
    forms = turn.facts.forms
    key = ("clip", (clip, rules.archive))
    if key in forms:
        return forms[key]
    form = evict_results.shortened(turn, clip - turn.facts.apart, format, clip_marker(turn, rules))
    if form is None or len(form.raw) <= REMEMBERED_BYTES:
        forms[key] = form
    return form
