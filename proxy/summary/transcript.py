"""A conversation as text for a model to read: roles labelled, calls with their arguments, long results clipped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from proxy.compaction.foreign import recognised
from proxy.compaction.message import HEAD_ROLES, RESULT_ROLES, Turn, arguments_of, decode, replaceable_text, text_of
from proxy.compaction.shorten import keep_ends

RESULT_CHARACTERS = 6_000
ARGUMENT_CHARACTERS = 2_000
TEXT_CHARACTERS = 40_000
"""Longer pieces keep their beginning and end. Texts of people and models are clipped only beyond reason."""

SAMPLE_CHARACTERS = 200
"""So much of the user's last message shows its language."""

Clean = Callable[[str], str]
"""Takes out of a text what its reader may not see."""

_MARKER = "\n[… {characters} characters left out …]\n"
# Long runs of base64 say nothing to a reader.
_BASE64 = re.compile(
    r"data:[\w/+.;=-]{3,80};base64,[A-Za-z0-9+/_-]{40,}={0,2}|[A-Za-z0-9+/]{400,}={0,2}"
    # The same in lines, as mail and `base64` write it.
    r"|(?<![A-Za-z0-9+/])(?:[A-Za-z0-9+/]{60,76}(?:\r?\n|(?:\\r)?\\n)){4,}[A-Za-z0-9+/]{0,76}={0,2}"
)
# A reader may take a tag with spaces in it for one.
_FENCE = re.compile(r"<(?=\s{0,4}/?\s{0,4}(?:transcript|previous_summary|language_sample)\b)", re.IGNORECASE)


def entries(turns: Sequence[Turn], clean: Clean | None = None) -> list[str]:
    """Return one text per message, in order, without empty ones. Of identical system messages only the last stays."""
    last = {turn.facts.digest: index for index, turn in enumerate(turns) if turn.facts.role in HEAD_ROLES}
    once = (turn for index, turn in enumerate(turns) if last.get(turn.facts.digest, index) == index)
    texts = (_entry(turn, clean or str) for turn in once)
    return [fenced(text) for text in texts if text]


def language_sample(turns: Sequence[Turn], clean: Clean | None = None) -> str | None:
    """The beginning of the last message that a user wrote in words; ``None`` if there is none."""
    for turn in reversed(turns):
        if turn.facts.role != "user":
            continue
        message = decode(turn.raw)
        foreign = recognised(message)
        text = (replaceable_text(message) or "") if foreign is None else "\n".join(foreign.words)
        # Cut generously first: a secret must be seen whole to be known as one.
        sample = (clean or str)(_BASE64.sub("", text[: SAMPLE_CHARACTERS * 20])).strip()[:SAMPLE_CHARACTERS]
        if any(character.isalpha() for character in sample):
            return fenced(sample)
    return None


def fenced(text: str) -> str:
    """The text with everything made harmless that could open or close one of the prompt's own tags."""
    return _FENCE.sub("&lt;", text)


def _entry(turn: Turn, clean: Clean) -> str:
    message = decode(turn.raw)
    role = turn.facts.role or "unknown"
    if role in RESULT_ROLES:
        return f"[tool result] {_clip(clean(text_of(message)), RESULT_CHARACTERS)}"
    lines = []
    foreign = recognised(message)
    if foreign is not None:
        lines.append(
            f"[summary of earlier messages, by {foreign.tool}] {_clip(clean(foreign.summary), TEXT_CHARACTERS)}"
        )
    text = _clip(clean(text_of(message) if foreign is None else "\n".join(foreign.words)), TEXT_CHARACTERS)
    if text.strip():
        lines.append(f"[{role}] {text}")
    for name, arguments in arguments_of(message):
        lines.append(f"[{role} calls {clean(name) or 'a tool'}] {_clip(clean(arguments), ARGUMENT_CHARACTERS)}")
    return "\n".join(lines)


def _clip(text: str, characters: int) -> str:
    text = _BASE64.sub("[base64 data]", text)
    return text if len(text) <= characters else keep_ends(text, characters, len(text) // 4, _MARKER)
