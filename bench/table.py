"""Print tables, and write JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

NOTHING = "–"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: Collection[str] = ()) -> str:
    """Return a table in Markdown. The first column and those in ``left`` are aligned to the left."""
    lines = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, cells)) for cells in zip(*lines, strict=True)]
    lefts = [place == 0 or name in left for place, name in enumerate(columns)]
    lines.insert(
        1, ["-" * (width - 1) + ("-" if of_left else ":") for width, of_left in zip(widths, lefts, strict=True)]
    )
    return "\n".join(f"| {' | '.join(map(_aligned, line, widths, lefts))} |" for line in lines)


def _aligned(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent, or a dash if there is none."""
    return NOTHING if share is None else f"{share * 100:.{digits}f} %"


def write_json(file: Path | None, value: object) -> None:
    """Write a value as indented JSON, if there is a file to write to."""
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
