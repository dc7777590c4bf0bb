"""The parts of a message's content: text and media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from proxy.dialects.unit_json import Message
from proxy.tokens.media import MEDIA_LABELS


def text_of(message: Message) -> str:
    """Return the visible text: the content or its text parts. Other parts become a label, for example ``[image]``."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(filter(None, (part_text(part) for part in parts_of(message))))


def part_text(part: object) -> str:
    """Return the text of one content part, or a label if it isn't text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    text = _text_in(part)
    if text is not None:
        return text
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else "part"
    return f"[{MEDIA_LABELS.get(kind, kind)}]"


def text_without_media(message: Message) -> str:
    """Return the text of a message without its media: the content, or the text parts of it, one per line."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(filter(None, (part_text(part) for part in parts_of(message) if _label(part) is None)))


def labels_of(message: Message) -> str:
    """Return a label for the parts that aren't text, such as ``[3 × image, file]``; empty if there are none.

    The label names at most four kinds of parts, so its length is bounded.
    """
    counts = Counter(filter(None, map(_label, parts_of(message))))
    kinds = [f"{number} × {kind[:20]}" if number > 1 else kind[:20] for kind, number in counts.most_common(4)]
    if len(counts) > len(kinds):
        kinds.append("other parts")
    return f"[{', '.join(kinds)}]" if kinds else ""


def without_media(message: Message) -> Message:
    """Return the message without its media parts."""
    parts = parts_of(message)
    return {**message, "content": [part for part in parts if not is_media_part(part)]} if parts else message


def _label(part: object) -> str | None:
    """Return the name of a part that isn't text; ``None`` for text."""
    if not isinstance(part, dict) or (not is_media_part(part) and _text_in(part) is not None):
        return None
    kind = part.get("type")
    return MEDIA_LABELS.get(kind, kind) if isinstance(kind, str) and kind else "part"


def _text_in(part: Mapping[str, Any]) -> str | None:
    return next((part[key] for key in ("text", "refusal") if isinstance(part.get(key), str)), None)


def parts_of(message: Message) -> list[Any]:
    """Return the parts of the content; empty if the content isn't a list."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_text_part(part: object) -> bool:
    """Return whether a content part is text. A media part with a ``text`` field doesn't count."""
    return isinstance(part, dict) and isinstance(part.get("text"), str) and not is_media_part(part)


def is_media_part(part: object) -> bool:
    """Return whether a content part is an image, audio, video, or file."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in MEDIA_LABELS
