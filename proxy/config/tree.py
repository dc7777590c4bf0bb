"""The tree of a file's values, with their lines and original text."""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[str | int, ...]
"""The keys and indices from the root to a value."""


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A plain scalar that versions of YAML read differently: ``12:30:45``, ``010``, ``2024-10-21``.

    Valid only for a date. ``text`` is the date's text in the file.
    """

    meaning: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf. ``text`` is its text in the file. ``plain`` means that it has no quotes.

    ``substituted`` marks text from the environment, which no message may show.
    """

    line: int
    value: str | int | float | bool | Ambiguous | None
    text: str
    plain: bool
    substituted: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping. ``lines`` holds the line of each key."""

    line: int
    items: dict[str, Node] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


Node = Scalar | Sequence | Mapping


def plain(node: Node) -> object:
    """Return the tree as plain Python values."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.items.items()}


def find(root: Node, path: Path) -> tuple[Node, int, Path]:
    """Return the deepest existing node on the path, its line (in a mapping, its key's line), and the path to it."""
    node, line = root, root.line
    for depth, part in enumerate(path):
        if isinstance(node, Mapping) and isinstance(part, str) and part in node.items:
            line, node = node.lines[part], node.items[part]
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            line = node.line
        else:
            return node, line, path[:depth]
    return node, line, path


def got(node: Node, *, read: bool = True) -> str:
    """Describe a value for a message. ``read``: also say how YAML reads a plain value that isn't text."""
    if isinstance(node, Sequence):
        return "a list"
    if isinstance(node, Mapping):
        return "a mapping"
    if node.value is None:
        return shown(node.text) or "nothing"
    if isinstance(node.value, str) or not (read or isinstance(node.value, Ambiguous)):
        return shown(node.text)
    return f"'{shown(node.text)}', which YAML reads as {reading(node)}"


def reading(node: Scalar) -> str:
    """Name the type that YAML gives to a scalar that isn't text."""
    if isinstance(node.value, Ambiguous):
        return node.value.meaning
    if isinstance(node.value, bool):
        return f"the truth value {str(node.value).lower()}"
    return "a number"


def shown(text: str, limit: int = 60) -> str:
    """Return text of the file for a message: on one line, printable, and short."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"
