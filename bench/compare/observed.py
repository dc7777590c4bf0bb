"""The records and the metrics in which a version reports its work."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.compare.setup import ADMIN
from tests.kit.client import Got, ask

WAIT_SECONDS = 20.0
"""Longest wait for a record. The proxy writes records in the background."""

_AUTHORIZED = [("authorization", f"Bearer {ADMIN}")]

_PER_RUN = frozenset({"id", "parent", "time", "ms", "trace", "conversation", "user"})
"""Fields of records that differ from run to run."""

_IN_TEXT = re.compile(r" [\d,]+ ms\b|\b[0-9a-f]{24}\b")
"""Times and ids in an explanation."""

_ORDINARY = ("accepted", "error")
"""Results of attempts that the proxy doesn't recover from."""

_METRIC = re.compile(r"(compaction_\w+?)(\{.*\})? (\S+)")
_NO_COUNTS = re.compile(r"_seconds_(?:sum|bucket)$|^compaction_(?:tasks|requests_in_flight|store_waiting)$|_created$")
"""Durations, and figures of one moment."""

_BY_CHANCE = "compaction_overhead_seconds_count"
"""The proxy observes its own time only if the difference of some durations isn't negative."""


Record = dict[str, Any]
"""A record as JSON."""


def records(url: str, ids: Sequence[str | None]) -> list[Record | None]:
    """Return the records with these ids, and those of their summary calls, without what differs from run to run."""
    until = time.monotonic() + WAIT_SECONDS
    return [None if id is None else _record(url, id, until) for id in ids]


def metrics(url: str) -> str:
    """Return the lines of counters, gauges, and histograms, without durations."""
    lines = []
    for line in ask(url, "/metrics", None).body.decode().splitlines():
        found = _METRIC.fullmatch(line)
        if found and not _NO_COUNTS.search(found[1]):
            lines.append(line if found[1] != _BY_CHANCE else line.rpartition(" ")[0])
    return "\n".join(sorted(lines))


def recoveries(record: Record | None) -> Counter[str]:
    """Return how often each cause of a recovery is in a record."""
    causes: Counter[str] = Counter()
    if record is None or record["verdict"] in ("shadow", "off"):
        return causes
    causes.update(one["result"] for one in record["attempts"] if one["result"] not in _ORDINARY)
    if record["recalls"]:
        causes["recall"] += record["recalls"]
    if (record["summary"] or {}).get("cause"):
        causes["digest"] += 1
    if record["error"] == "budget_exceeded":
        causes["spending"] += 1
    return causes


def _record(url: str, id: str, until: float) -> Any:
    while True:
        got = ask(url, f"/compaction/requests/{id}", None, _AUTHORIZED)
        if got.status == 200 or time.monotonic() > until:
            return _plain(_decoded(got))
        time.sleep(0.05)


def _decoded(got: Got) -> Any:
    value = json.loads(got.body)
    # Parts of a long conversation are summarized at the same time, in any order.
    for name, found in value.items():
        if isinstance(found, list) and found and isinstance(found[0], dict) and "kind" in found[0]:
            value[name] = sorted(found, key=lambda one: json.dumps(_plain(one)))
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _IN_TEXT.sub("", value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if name not in _PER_RUN}
    return [_plain(one) for one in value] if isinstance(value, list) else value
