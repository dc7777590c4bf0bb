"""Counts of identical and different cases, and the first differences."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest

from bench.compare.case import Case
from bench.compare.observed import Record, recoveries
from bench.compare.side import Seen
from bench.table import table

SHOWN = 5
AROUND = 60
"""Bytes to show before and after the first byte that differs."""


@dataclass(slots=True)
class Group:
    """The cases of a kind. The other figures show that the traffic exercises the proxy.

    ``recovered`` is the number of requests that met a recovery, ``causes`` how often each cause occurred.
    """

    identical: int = 0
    different: int = 0
    compacted: int = 0
    summaries: int = 0
    generated: int = 0
    recovered: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    recorded_differently: int = 0
    metrics_differ: bool = False


@dataclass(slots=True)
class Result:
    """The results of a comparison."""

    groups: defaultdict[str, Group] = field(default_factory=lambda: defaultdict(Group))
    differences: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether every case is identical."""
        groups = self.groups.values()
        return not any(group.different or group.recorded_differently or group.metrics_differ for group in groups)

    @property
    def recovered(self) -> float:
        """Return the share of the generated requests that met a recovery; 1 if none is generated."""
        groups = [group for group in self.groups.values() if group.generated]
        return sum(group.recovered for group in groups) / (sum(group.generated for group in groups) or 1)

    def include(self, other: Result) -> None:
        """Add the groups and the differences of another result."""
        self.groups |= other.groups
        self.differences += other.differences

    def add(self, case: Case, before: Seen, after: Seen) -> None:
        """Compare a case."""
        group = self.groups[case.group]
        parts = dict(after)
        group.compacted += b"\nx-compaction: compacted" in b"\n" + parts["response headers"]
        group.summaries += sum(name.startswith("summary") and name.endswith("body") for name in parts)
        group.generated += case.generated
        group.identical += before == after
        if before != after:
            group.different += 1
            self.differences.append(f"{case.group}, {case.name}: {first_difference(before, after)}")

    def add_records(
        self, cases: Sequence[Case], before: Sequence[Record | None], after: Sequence[Record | None]
    ) -> None:
        """Compare the records of a group's cases, and count the recoveries in them."""
        for case, old, new in zip(cases, before, after, strict=True):
            group, causes = self.groups[case.group], recoveries(new)
            group.recovered += bool(causes)
            group.causes += causes
            if old != new:
                group.recorded_differently += 1
                shown = [("record", json.dumps(one, sort_keys=True).encode()) for one in (old, new)]
                self.differences.append(f"{case.group}, {case.name}: {first_difference(shown[:1], shown[1:])}")

    def add_metrics(self, group: str, before: str, after: str) -> None:
        """Compare the metrics of a group."""
        if before != after:
            self.groups[group].metrics_differ = True
            old, new = ({*lines.splitlines()} for lines in (before, after))
            shown = f"{group}, metrics\n  before: {sorted(old - new)}\n  after:  {sorted(new - old)}"
            self.differences.append(shown)


def first_difference(before: Seen, after: Seen) -> str:
    """Describe the first part that differs, with the bytes around the first one that does."""
    for old, new in zip_longest(before, after):
        if old == new:
            continue
        if old is None or new is None or old[0] != new[0]:
            return f"before has {old[0] if old else 'nothing'}, after has {new[0] if new else 'nothing'}"
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old[1], new[1], strict=False)))
        start, end = max(0, at - AROUND), at + AROUND
        return f"{old[0]}, byte {at}\n  before: {old[1][start:end]!r}\n  after:  {new[1][start:end]!r}"
    return "none"


def shown(result: Result) -> str:
    """Return the table and the first differences."""
    names = (
        "group",
        "cases",
        "identical",
        "records differ",
        "metrics",
        "compacted",
        "summaries",
        "recovered",
        "causes",
    )
    rows = []
    for name, group in result.groups.items():
        cases = group.identical + group.different
        metrics = "differ" if group.metrics_differ else "same"
        causes = ", ".join(f"{cause} {count}" for cause, count in group.causes.most_common())
        figures = (cases, group.identical, group.recorded_differently, metrics, group.compacted, group.summaries)
        rows.append([name, *figures, group.recovered, causes])
    return "\n".join([table(names, rows, left={"causes"}), *result.differences[:SHOWN]])
