"""Counts of identical and different cases, and the first differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from bench.compare.side import Seen
from bench.compare.traffic import Case

SHOWN = 5
AROUND = 60
"""Bytes to show before and after the first byte that differs."""


@dataclass(slots=True)
class Group:
    """The cases of a kind. ``compacted`` and ``summaries`` show that the traffic exercises the proxy."""

    identical: int = 0
    different: int = 0
    compacted: int = 0
    summaries: int = 0


@dataclass(slots=True)
class Result:
    """The results of a comparison."""

    groups: dict[str, Group] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether every case is identical."""
        return not any(group.different for group in self.groups.values())

    def include(self, other: Result) -> None:
        """Add the groups and the differences of another result."""
        self.groups |= other.groups
        self.differences = [*self.differences, *other.differences][:SHOWN]

    def add(self, case: Case, before: Seen, after: Seen) -> None:
        """Compare a case."""
        group = self.groups.setdefault(case.group, Group())
        parts = dict(after)
        group.compacted += b"\nx-compaction: compacted" in b"\n" + parts["response headers"]
        group.summaries += sum(name.startswith("summary") and name.endswith("body") for name in parts)
        if before == after:
            group.identical += 1
            return
        group.different += 1
        if len(self.differences) < SHOWN:
            self.differences.append(f"{case.group}, {case.name}: {first_difference(before, after)}")


def first_difference(before: Seen, after: Seen) -> str:
    """Describe the first part that differs, with the bytes around the first one that does."""
    for old, new in zip_longest(before, after):
        if old == new:
            continue
        if old is None or new is None or old[0] != new[0]:
            return f"before has {old[0] if old else 'nothing'}, after has {new[0] if new else 'nothing'}"
        at = next((i for i, (a, b) in enumerate(zip(old[1], new[1], strict=False)) if a != b), None)
        at = min(len(old[1]), len(new[1])) if at is None else at
        start, end = max(0, at - AROUND), at + AROUND
        return f"{old[0]}, byte {at}\n  before: {old[1][start:end]!r}\n  after:  {new[1][start:end]!r}"
    return "none"


def show(result: Result, console: Console) -> None:
    """Print the table and the first differences."""
    table = Table("", *("cases", "identical", "different", "compacted", "summary requests"))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, group in result.groups.items():
        cases = group.identical + group.different
        table.add_row(name, *map(str, (cases, group.identical, group.different, group.compacted, group.summaries)))
    console.print(table)
    for difference in result.differences:
        console.print(difference, markup=False, highlight=False, soft_wrap=True)
