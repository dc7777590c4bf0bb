"""The tree of a file's values, with their lines and original text."""

from __future__ import annotations

from dataclasses import dataclass

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
class Node:
    """A scalar, list, or mapping.

    ``line`` is the line of its key; without a key, its own line, which is always ``start``. ``text`` is a scalar's text
    in the file. ``substituted`` marks text from the environment, which no message may show.
    """

    line: int
    start: int
    value: str | int | float | bool | Ambiguous | list[Node] | dict[str, Node] | None
    text: str = ""
    substituted: bool = False

    @property
    def items(self) -> list[Node]:
        """Return the items of a list; for other values, an empty list."""
        return self.value if isinstance(self.value, list) else []

    @property
    def settings(self) -> dict[str, Node]:
        """Return the entries of a mapping; for other values, an empty mapping."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def is_scalar(self) -> bool:
        """Return whether the value is neither a list nor a mapping."""
        return not isinstance(self.value, list | dict)


def empty(line: int) -> Node:
    """Return a mapping without entries."""
    return Node(line, line, {})


def plain(node: Node) -> object:
    """Return the tree as plain Python values."""
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def find(node: Node, path: Path) -> tuple[Node, Path]:
    """Return the deepest existing node on the path below a node, and the path to it."""
    for depth, part in enumerate(path):
        if isinstance(part, str) and part in node.settings:
            node = node.settings[part]
        elif isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return node, path[:depth]
    return node, path


def line_of(root: Node, path: Path) -> int:
    """Return the line of the deepest existing node on the path."""
    return find(root, path)[0].line


def dotted(path: Path) -> str:
    """Return a path as people write it: ``models[0].match``."""
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{shown(part)}" for part in path)
    return words.removeprefix(".")


def got(node: Node, *, read: bool = True) -> str:
    """Describe a value for a message. ``read``: also say how YAML reads a plain value that isn't text."""
    if not node.is_scalar:
        return "a list" if isinstance(node.value, list) else "a mapping"
    if node.value is None:
        return shown(node.text) or "nothing"
    if isinstance(node.value, str) or not (read or isinstance(node.value, Ambiguous)):
        return shown(node.text)
    return f"'{shown(node.text)}', which YAML reads as {reading(node)}"


def reading(node: Node) -> str:
    """Name the type that YAML gives to a scalar that isn't text."""
    if isinstance(node.value, Ambiguous):
        return node.value.meaning
    return f"the truth value {str(node.value).lower()}" if isinstance(node.value, bool) else "a number"


def shown(text: str, limit: int = 60) -> str:
    """Return text of the file for a message: on one line, printable, and short."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"
