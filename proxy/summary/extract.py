"""Extract a summary from the messages without a model. It takes the place of a summary that no model writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.compaction import keeps
from proxy.compaction.format import Format, TextCounter
from proxy.compaction.shorten import middle_cut
from proxy.compaction.turn import Turn

_OPENING = "(The proxy extracted these notes from the messages without a model. The newest steps are complete.)"


def extract(
    turns: Sequence[Turn], previous: str | None, max_tokens: int, format: Format, directives: Sequence[Turn] = ()
) -> str:
    """Return extracts of the assistant's texts, calls, and results within ``max_tokens``, newest first.

    The user's own messages are part of every summary message, so they aren't repeated. ``previous`` is the summary of
    the conversation before ``turns``; it gets up to half of the tokens. ``directives`` are system messages that the
    proxy no longer sends. Their beginnings get up to half of the rest, newest first.
    """
    count = format.text_tokens
    previous = _newest_foreign(turns, format) or previous
    parts = [_OPENING]
    left = max_tokens - count(_OPENING) - 4
    if previous:
        earlier = middle_cut(previous, left // keeps.EXTRACT_DIVISOR, count, "\n[…]\n")
        parts.append(earlier)
        left -= count(earlier) + 2
    lines = (f"- directive: {_start(format.text(turn.raw), keeps.EXTRACT_TEXT)}" for turn in reversed(directives))
    new = (line for line in lines if not previous or line not in previous)
    orders, taken = first_lines(new, left // keeps.EXTRACT_DIVISOR, count)
    steps, _ = first_lines(filter(None, (_line(turn, format) for turn in reversed(turns))), left - taken, count)
    return "\n".join([*parts, *reversed(orders), *reversed(steps)])


def first_lines(lines: Iterable[str], limit: int, count: TextCounter) -> tuple[list[str], int]:
    """Return the first lines within ``limit`` tokens, and their tokens."""
    fitting: list[str] = []
    taken = 0
    for line in lines:
        size = count(line) + 1
        if taken + size > limit:
            break
        fitting.append(line)
        taken += size
    return fitting, taken


def _newest_foreign(turns: Sequence[Turn], format: Format) -> str | None:
    """Return the newest summary that another tool wrote into the turns, or ``None``."""
    found = (format.foreign_summary(turn.raw) for turn in reversed(turns) if turn.facts.kind == "user")
    return next((foreign.summary for foreign in found if foreign is not None), None)


def _line(turn: Turn, format: Format) -> str:
    if turn.facts.kind == "result":
        return f"  → {_start(format.text(turn.raw), keeps.EXTRACT_RESULT)}"
    if turn.facts.kind != "assistant":
        return ""
    lines = []
    text = _start(format.text(turn.raw), keeps.EXTRACT_TEXT)
    if text:
        lines.append(f"- {text}")
    for name, arguments in format.arguments(turn.raw):
        lines.append(f"- called {name}({_start(arguments, keeps.EXTRACT_ARGUMENT)})")
    return "\n".join(lines)


def _start(text: str, characters: int) -> str:
    flat = " ".join(text[: characters * 4].split())
    return flat if len(flat) <= characters else flat[:characters].rsplit(" ", 1)[0] + " …"
