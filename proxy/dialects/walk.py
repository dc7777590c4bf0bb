"""Walk through a part by the table: read its texts, shorten them in place, and replace its media."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from proxy.compaction.effects import may_ask, split_notes
from proxy.compaction.turn import NO_LINKS, OPENING, SHORT, Links
from proxy.dialects.parts import OPAQUE, SILENT, Part, Table
from proxy.tokens.media import MEDIA_LABELS

Change = Callable[[str], str]  # take a text that may be shortened, and return what replaces it
Swap = Callable[[Any], Any]  # take a part of a list, and return what replaces it; `None` removes it

_LABELED = ("hosted", "media", "system")

TEXT_FILE = Part(reads=())  # the row of a file in base64 that is a text


def row_of(part: object, table: Table) -> Part:
    """Return the row of a part. One without a type is a text if it has one."""
    if not isinstance(part, dict):
        return OPAQUE
    kind = part.get("type")
    if kind is None:
        return table["text"] if isinstance(part.get("text"), str) else OPAQUE
    row = table.get(kind, OPAQUE) if isinstance(kind, str) else OPAQUE
    if row.by:
        value = value_at(part, row.by)
        row = row.values.get(value, row) if isinstance(value, str) else row
    return TEXT_FILE if row.plays == "media" and _text_file(part) is not None else row


def value_at(value: Any, path: str) -> Any:
    """Return the value at a path through objects; ``None`` if there is none."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def label_of(part: object) -> str:
    """Return a label for a part that isn't text, such as ``image``."""
    kind = part.get("type") if isinstance(part, dict) else None
    return MEDIA_LABELS.get(kind, kind) if isinstance(kind, str) and kind else "part"


def strings(part: Mapping[str, Any], table: Table, row: Part | None = None) -> Iterator[tuple[str, str]]:
    """Yield each text that is read, with the name of its field. Media become labels, without a name."""
    row = row or row_of(part, table)
    if row.plays == "media":
        yield "", f"[{label_of(part)}]"
    elif row is TEXT_FILE:
        yield "text", _decoded(part)
    names = (name for name in part if name not in SILENT) if row.reads is None else row.reads
    for name in names:
        value = value_at(part, name) if "." in name else part.get(name)
        yield from _strings_in(name.rpartition(".")[2], value, table)


def _strings_in(name: str, value: Any, table: Table) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if value and not value.startswith("data:"):
            yield name, value
    elif isinstance(value, dict):
        yield from strings(value, table)
    elif isinstance(value, list):
        for item in value:
            yield from _strings_in(name, item, table)


def rewritten(
    part: Any, table: Table, change: Change | None = None, swap: Swap | None = None, row: Part | None = None
) -> Any:
    """Return a part with other texts and other parts in its lists; the same object if nothing changes.

    ``change`` gets each text that may be shortened, in an order that depends on the part alone. The text parts of a
    list are one text: the first of them gets the new one, and the others are removed.
    """
    row = row or row_of(part, table)
    if row is TEXT_FILE:
        return part if change is None else _encoded(part, change)
    for path in row.cuts:
        part = _at(part, path.split("."), table, change, swap)
    return part


def _at(value: Any, path: Sequence[str], table: Table, change: Change | None, swap: Swap | None) -> Any:
    if isinstance(value, list) and path:
        items = [_at(item, path[path[0] == "*" :], table, change, swap) for item in value]
        return value if all(map(is_, items, value)) else items
    if path:
        if not isinstance(value, dict):
            return value
        if path[0] == "*":
            made = {name: _at(item, path[1:], table, change, swap) for name, item in value.items()}
            return value if all(map(is_, made.values(), value.values())) else made
        if path[0] not in value:
            return value
        new = _at(value[path[0]], path[1:], table, change, swap)
        return value if new is value[path[0]] else {**value, path[0]: new}
    if isinstance(value, str):
        return change(value) if change is not None and value else value
    if isinstance(value, list):
        return _listed(value, table, change, swap)
    return rewritten(value, table, change, swap) if isinstance(value, dict) else value


def _listed(items: list[Any], table: Table, change: Change | None, swap: Swap | None) -> list[Any]:
    texts = [item for item in items if is_text(item, table)] if change is not None else []
    text = "\n".join(item["text"] for item in texts)
    new = text if change is None or not text else change(text)
    made: list[Any] = []
    for item in items:
        if is_text(item, table):
            if new == text:
                made.append(item)
            elif item is texts[0]:
                # Citations refer to places in the text.
                kept = {name: value for name, value in item.items() if name != "citations"}
                made.append({**kept, "text": new, **({"annotations": []} if item.get("annotations") else {})})
            continue
        one = item if swap is None else swap(item)
        one = rewritten(one, table, change, swap) if one is item else one
        if one is not None or item is None:
            made.append(one)
    return items if len(made) == len(items) and all(map(is_, made, items)) else made


def is_text(part: object, table: Table) -> bool:
    """Return whether a part is a text that may be joined with its neighbors."""
    return isinstance(part, dict) and isinstance(part.get("text"), str) and row_of(part, table).plays == "text"


def is_media(part: object, table: Table) -> bool:
    """Return whether a part is an image, audio, video, or a file without readable text."""
    return row_of(part, table).plays == "media"


def notes_of(content: object, table: Table, *, elements: bool = False) -> list[str]:
    """Return the reminders in the texts of a content, in order. See ``split_notes``."""
    return [note for text in _own_texts(content, table) for note in split_notes(text, elements=elements)[0]]


def is_noted(content: Any, table: Table) -> bool:
    """Return whether a content has nothing but reminders, and elements in which agents say what is in effect."""
    if isinstance(content, str):
        notes, rest = split_notes(content, elements=True)
        return bool(notes) and not rest and not any(map(may_ask, notes))
    texts = _own_texts(content, table)
    return bool(texts) and len(texts) == len(content) and all(is_noted(text, table) for text in texts)


def _own_texts(content: Any, table: Table) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if is_text(part, table)] if isinstance(content, list) else []


def without_notes(text: str) -> str:
    """Return a text without the reminders at its ends; the same string if there are none."""
    notes, rest = split_notes(text)
    return rest if notes else text


def opening_of(content: object, table: Table) -> str:
    """Return a digest of how a user's texts begin; empty if there is anything else. Stored facts have no content.

    Reminders don't count.
    """
    texts = [without_notes(text)[:OPENING] for text in _own_texts(content, table)]
    if not any(texts) or (isinstance(content, list) and len(texts) < len(content)):
        return ""
    begins = "\0".join(filter(None, texts))
    digest = hashlib.sha256(begins.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return digest if len(begins) >= OPENING else digest + SHORT


def part_text(part: object, table: Table) -> str:
    """Return the text of one part, or a label if it has none."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    row = row_of(part, table)
    text = "\n".join([text for _, text in strings(part, table, row)])
    return text if text or row.arguments or row.plays not in _LABELED else f"[{label_of(part)}]"


def file_text(part: Any) -> str | None:
    """Return the name and the text of a text file in base64; ``None`` for other parts."""
    if _text_file(part) is None:
        return None
    name = part.get("filename", value_at(part, "file.filename"))
    return f"{name}\n{_decoded(part)}" if isinstance(name, str) else _decoded(part)


def _text_file(part: Any) -> str | None:
    """Return the path of the data of a text file in base64; ``None`` for other parts."""
    for path in ("file_data", "file.file_data"):
        data = value_at(part, path)
        if isinstance(data, str) and data[:10].lower() == "data:text/" and ";base64," in data[:100]:
            return path
    return None


def _decoded(part: Any) -> str:
    data: str = value_at(part, _text_file(part) or "")
    try:
        return base64.b64decode(data[data.find(",") + 1 :] + "==").decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""


def _encoded(part: Any, change: Change) -> Any:
    text = _decoded(part)
    new = change(text) if text else text
    if new == text:
        return part
    data = base64.b64encode(new.encode("utf-8", "replace")).decode()
    path = (_text_file(part) or "").split(".")
    return _at(part, path, {}, lambda old: f"{old[: old.find(',') + 1]}{data}", None)


def identities(part: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the ids by which others may refer to a part, and the ids in it that may be another part's."""
    names = [value for key in _NAMES if isinstance(value := part.get(key), str)]
    caller = part.get("caller")
    fields = [*part.items(), *(caller.items() if isinstance(caller, dict) else ())]
    refers = [value for key, value in fields if key.endswith("_id") and isinstance(value, str)]
    return names, refers


_NAMES = ("id", "call_id")


def linked(parts: Iterable[tuple[list[str], list[str]]], *, unseen: bool = False) -> Links:
    """Return the links of a unit by the ids of its parts. Ids that a part refers to are names only in other units."""
    names: dict[str, None] = {}
    refers: dict[str, None] = {}
    for own, others in parts:
        refers.update((id, None) for id in others if id not in names)
        names.update((id, None) for id in own)
    return Links(tuple(names), tuple(refers), unseen) if names or refers or unseen else NO_LINKS


def links_in(message: Mapping[str, Any], table: Table, *, whole: bool = False) -> list[tuple[list[str], list[str]]]:
    """Return the identities of a message's parts, and of calls and results in the form of another API.

    ``whole``: the message itself is of an unknown type, so it may be one.
    """
    listed = (message.get(name) for name in ("content", "tool_calls"))
    found = [identities(message)] if whole else []
    for part in [one for value in listed if isinstance(value, list) for one in value if isinstance(one, dict)]:
        row = row_of(part, table)
        if row.plays in ("hosted", "call"):
            names, refers = identities(part)
            found.append(([], refers) if row.plays == "call" else (names, refers))
    return found
