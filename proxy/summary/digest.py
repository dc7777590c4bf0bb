"""A summary made without a model: what there is when a model's cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.foreign import recognised
from proxy.compaction.message import RESULT_ROLES, TextCounter, Turn, arguments_of, decode, text_of
from proxy.compaction.shorten import middle_cut

_TEXT_CHARACTERS = 400
_ARGUMENT_CHARACTERS = 160
_RESULT_CHARACTERS = 120

_OPENING = "(These notes were put together without a model: extracts, the newest steps being complete.)"


def digest(turns: Sequence[Turn], previous: str | None, max_tokens: int, count: TextCounter) -> str:
    """Extracts of what the assistant said and did, newest first chosen, in their order, within ``max_tokens``.

    The user's own messages stand beside every summary, so they are not repeated. ``previous`` is the summary of what
    came before; it gets up to half of the tokens.
    """
    previous = _newest_foreign(turns) or previous
    parts = [_OPENING]
    left = max_tokens - count(_OPENING) - 4
    if previous:
        earlier = middle_cut(previous, left // 2, count, "\n[…]\n")
        parts.append(earlier)
        left -= count(earlier) + 2
    kept: list[str] = []
    for turn in reversed(turns):
        line = _line(turn)
        if not line:
            continue
        left -= count(line) + 1
        if left < 0:
            break
        kept.append(line)
    return "\n".join([*parts, *reversed(kept)])


def _newest_foreign(turns: Sequence[Turn]) -> str | None:
    """The newest summary among the turns that another tool made of what came before it."""
    found = (recognised(decode(turn.raw)) for turn in reversed(turns) if turn.facts.role == "user")
    return next((foreign.summary for foreign in found if foreign is not None), None)


def _line(turn: Turn) -> str:
    message = decode(turn.raw)
    if turn.facts.role in RESULT_ROLES:
        return f"  → {_start(text_of(message), _RESULT_CHARACTERS)}"
    if turn.facts.role != "assistant":
        return ""
    lines = []
    text = _start(text_of(message), _TEXT_CHARACTERS)
    if text:
        lines.append(f"- {text}")
    for name, arguments in arguments_of(message):
        lines.append(f"- called {name}({_start(arguments, _ARGUMENT_CHARACTERS)})")
    return "\n".join(lines)


def _start(text: str, characters: int) -> str:
    flat = " ".join(text[: characters * 4].split())
    return flat if len(flat) <= characters else flat[:characters].rsplit(" ", 1)[0] + " …"
