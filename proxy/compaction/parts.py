"""The parts of a message's content: text and media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]

MEDIA_LABELS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_file": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
}
"""The ``type`` of every content part that counts as media, with the name that labels use for it.

This is the only list of media types: the stages remove these parts and ``tokens.media`` counts them."""


def text_of(message: Message) -> str:
    """The visible text: the content, or the text parts of it; other parts become a label such as ``[image]``."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(filter(None, (part_text(part) for part in parts_of(message))))


def part_text(part: object) -> str:
    """The text of one content part, or a label for what is not text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else "part"
    return f"[{MEDIA_LABELS.get(kind, kind)}]"


def parts_of(message: Message) -> list[Any]:
    """The parts of the content; none where it is a string or something else."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_text_part(part: object) -> bool:
    """Return whether a content part is text. A media part that also has a ``text`` field is not."""
    return isinstance(part, dict) and isinstance(part.get("text"), str) and not is_media_part(part)


def is_media_part(part: object) -> bool:
    """Whether a content part is an image, audio, video or a file."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in MEDIA_LABELS
