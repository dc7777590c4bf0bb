"""Render a conversation as text: labeled roles, calls with arguments, and shortened results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from proxy.compaction.format import Format
from proxy.compaction.shorten import keep_ends
from proxy.compaction.turn import Turn

RESULT_CHARACTERS = 6_000
ARGUMENT_CHARACTERS = 2_000
TEXT_CHARACTERS = 40_000
"""Longer parts keep only their beginning and end. The high limit leaves almost all messages whole."""

SAMPLE_CHARACTERS = 200
"""Length of the language sample from the user's last message, in characters."""

Clean = Callable[[str], str]
"""Removes text that the summary model must not read."""

_MARKER = "\n[… {characters} characters left out …]\n"
# Long runs of base64 carry no readable content.
_BASE64 = re.compile(
    r"data:[\w/+.;=-]{3,80};base64,[A-Za-z0-9+/_-]{40,}={0,2}|[A-Za-z0-9+/]{400,}={0,2}"
    # Base64 in lines, as mail and the `base64` command write it.
    r"|(?<![A-Za-z0-9+/])(?:[A-Za-z0-9+/]{60,76}(?:\r?\n|(?:\\r)?\\n)){4,}[A-Za-z0-9+/]{0,76}={0,2}"
)
# A model may also accept a tag with spaces in it.
_FENCE = re.compile(r"<(?=\s{0,4}/?\s{0,4}(?:transcript|previous_summary|language_sample)\b)", re.IGNORECASE)


def entries(turns: Sequence[Turn], format: Format, clean: Clean | None = None) -> list[str]:
    """Return one non-empty text per message, in order. Only the last of identical system messages stays."""
    last = {turn.facts.digest: index for index, turn in enumerate(turns) if turn.facts.kind == "system"}
    once = (turn for index, turn in enumerate(turns) if last.get(turn.facts.digest, index) == index)
    texts = (_entry(turn, format, clean or str) for turn in once)
    return [fenced(text) for text in texts if text]


def language_sample(turns: Sequence[Turn], format: Format, clean: Clean | None = None) -> str | None:
    """Return the beginning of the last user message that contains words, or ``None``."""
    for turn in reversed(turns):
        if turn.facts.kind != "user":
            continue
        foreign = format.foreign_summary(turn.raw)
        text = (format.replaceable_text(turn.raw) or "") if foreign is None else "\n".join(foreign.user_text)
        # Redact a longer excerpt first, because a truncated secret isn't recognizable.
        sample = (clean or str)(_BASE64.sub("", text[: SAMPLE_CHARACTERS * 20])).strip()[:SAMPLE_CHARACTERS]
        if any(character.isalpha() for character in sample):
            return fenced(sample)
    return None


def fenced(text: str) -> str:
    """Escape everything that could open or close one of the prompt's own tags."""
    return _FENCE.sub("&lt;", text)


def _entry(turn: Turn, format: Format, clean: Clean) -> str:
    raw, role = turn.raw, turn.facts.role or "unknown"
    if turn.facts.kind == "result":
        return f"[tool result] {_clip(clean(format.text(raw)), RESULT_CHARACTERS)}"
    lines = []
    foreign = format.foreign_summary(raw)
    if foreign is not None:
        lines.append(
            f"[summary of earlier messages, by {foreign.tool}] {_clip(clean(foreign.summary), TEXT_CHARACTERS)}"
        )
    text = _clip(clean(format.text(raw) if foreign is None else "\n".join(foreign.user_text)), TEXT_CHARACTERS)
    if text.strip():
        lines.append(f"[{role}] {text}")
    for name, arguments in format.arguments(raw):
        lines.append(f"[{role} calls {clean(name) or 'a tool'}] {_clip(clean(arguments), ARGUMENT_CHARACTERS)}")
    return "\n".join(lines)


def _clip(text: str, characters: int) -> str:
    text = _BASE64.sub("[base64 data]", text)
    return text if len(text) <= characters else keep_ends(text, characters, len(text) // 4, _MARKER)
