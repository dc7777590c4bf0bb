"""Write the table of metrics in docs/reference.md from their definitions: python -m tests.docs.metric_table."""

from __future__ import annotations

from pathlib import Path

from proxy.telemetry.metrics import DEFINITIONS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
HEAD = "| metric | labels | meaning |\n|---|---|---|\n"


def updated(reference: str) -> str:
    """Return the text of the reference with the current table of metrics."""
    before, rest = reference.split(HEAD)
    after = rest[rest.index("\n\n") + 1 :]
    return f"{before}{HEAD}{''.join(map(_row, DEFINITIONS))}{after}"


def _row(definition: tuple[str, dict[str, str], str]) -> str:
    name, labels, meaning = definition
    values = "; ".join(f"`{label}`: {value}" for label, value in labels.items())
    return f"| `{name}` | {values + ' ' if values else ''}| {meaning} |\n"


if __name__ == "__main__":
    REFERENCE.write_text(updated(REFERENCE.read_text(encoding="utf-8")), encoding="utf-8")
