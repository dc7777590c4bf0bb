"""Collect paths, URLs, and identifiers from texts.

Summaries tend to lose them, and agents need them to continue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from proxy.compaction.format import TextCounter

# A literal or a class anchors every alternative, and lengths are bounded, so matching takes linear time.
_ARTEFACT = re.compile(
    r"""
    (?P<url>https?://[^\s"'<>()\[\]{}\\`]{4,300})
  | (?P<path>(?<![\w/.~@+-])(?:~|\.{1,2})?/?[\w.@+-]{1,100}(?:/[\w.@+-]{1,100}){1,30})
  | (?P<ticket>(?<![\w-])[A-Z][A-Z0-9]{1,9}-\d{1,10}(?![\w-]))
  | (?P<code>(?<![\w-])(?=[A-Z0-9-]{5})(?=[A-Z0-9-]{0,19}[A-Z])(?=[A-Z0-9-]{0,19}\d)
      [A-Z0-9]{2,12}(?:-[A-Z0-9]{2,12}){0,3}(?![\w-]))
  | (?P<uuid>(?<![\w-])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![\w-]))
  | (?P<hash>(?<!\w)(?=[0-9a-f]{0,11}\d)[0-9a-f]{12,64}(?!\w))
    """,
    re.VERBOSE,
)

_TRAILING = ".,;:!?"

# Kinds receive their share of the tokens in this order: rare ones that a model can't guess come first. Machine-made
# identifiers are so frequent that they come last.
KINDS: tuple[tuple[str, float], ...] = (
    ("ticket", 0.3),
    ("url", 0.3),
    ("file", 1.0),  # named in tool calls: the files that the agent worked on
    ("code", 0.5),  # of bookings, orders, or parts: capitals and digits
    ("path", 1.0),
    ("uuid", 1.0),
    ("hash", 1.0),
)

# A path without a file extension must be absolute or start with a dot. Otherwise "and/or" would match.
_FILE = re.compile(r"\.[A-Za-z]\w{0,9}$")


MOST = 2_000
"""Identifiers kept for each kind, newest first: far more than fit in any prompt."""

PIECE = 16_384
"""Characters per search. A search takes at most about 10 ms, and no other thread runs meanwhile."""

Artefacts = dict[str, list[str]]
"""Identifiers by kind, without repetitions. The most recently mentioned one is last."""


def identifiers(texts: Iterable[str], earlier: Artefacts | None = None, files: Iterable[str] = ()) -> Artefacts:
    """Return the identifiers in texts, after those of ``earlier`` texts. ``files`` are paths from tool calls."""
    seen = {kind: dict.fromkeys((earlier or {}).get(kind, ())) for kind, _ in KINDS}
    for piece in (piece for text in texts for piece in _pieces(text)):
        for match in _ARTEFACT.finditer(piece):
            kind = match.lastgroup or ""
            item = match.group().rstrip(_TRAILING)
            if kind == "path" and not (item.startswith(("/", "~", "./", "../")) or _FILE.search(item)):
                continue
            seen[kind].pop(item, None)
            seen[kind][item] = None
    for file in files:
        seen["file"].pop(file, None)
        seen["file"][file] = None
    return {kind: list(items)[-MOST:] for kind, items in seen.items()}


def _pieces(text: str) -> Iterator[str]:
    """Split a text between words, so that no identifier is cut. Words longer than a piece are cut anyway."""
    start = 0
    while len(text) - start > PIECE:
        reach = start + PIECE
        end = max(text.rfind(" ", start + 1, reach), text.rfind("\n", start + 1, reach))
        if end < 0:
            end = reach
        yield text[start:end]
        start = end
    yield text[start:]


def unseen(found: Artefacts, text: str) -> Artefacts:
    """Return the identifiers that a text doesn't contain."""
    return {kind: [item for item in items if item not in text] for kind, items in found.items()}


def index(found: Artefacts, max_tokens: int, count: TextCounter) -> str:
    """List the newest identifiers that fit in ``max_tokens``, one line per folder or item."""
    lines: list[str] = []
    left = max_tokens
    named = set(found.get("file", ()))
    for kind, part in KINDS:
        items = found.get(kind, [])
        if kind == "path":
            items = [item for item in items if item not in named]
        listing = _LISTINGS.get(kind, _single)
        chosen = listing(items, int(left * part), count)
        lines += chosen
        left -= sum(count(line) + 1 for line in chosen)
    return "\n".join(lines)


def _single(items: Sequence[str], max_tokens: int, count: TextCounter) -> list[str]:
    kept: list[str] = []
    for item in reversed(items):
        line = f"- {item}"
        max_tokens -= count(line) + 1
        if max_tokens < 0:
            break
        kept.append(line)
    return kept[::-1]


def _joined(items: Sequence[str], max_tokens: int, count: TextCounter) -> list[str]:
    """List short items on one line."""
    kept: list[str] = []
    left = max_tokens - 3
    for item in reversed(items):
        left -= count(f", {item}")
        if left < 0:
            break
        kept.append(item)
    return [f"- {', '.join(kept[::-1])}"] if kept else []


def _files(paths: Sequence[str], max_tokens: int, count: TextCounter) -> list[str]:
    """List files by folder, so that each folder is named once."""
    newest_first = paths[::-1]
    folders: dict[str, list[str]] = {}
    lines: list[str] = []
    taken = 0
    while True:
        # A line has fewer tokens than the sum of its parts. The next round uses the difference.
        left = max_tokens - sum(count(line) + 1 for line in lines)
        before = taken
        for path in newest_first[taken:]:
            folder, _, name = path.rpartition("/")
            new = folder not in folders
            left -= count(f", {name}") + (count(f"- {folder}/: ") + 1 if new else 0)
            if left < 0:
                break
            folders.setdefault(folder, []).append(name)
            taken += 1
        if taken == before:
            return lines
        lines = [f"- {folder}/: {', '.join(names[::-1])}" for folder, names in reversed(folders.items())]


_LISTINGS = {"file": _files, "path": _files, "code": _joined}
