"""Serve how a request was changed: its messages before and after, their differences, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.pipeline.changes import Changed, Unchanged

Change = Changed | Unchanged

VIEWS = ("before", "after", "diff", "summary")


def change_json(id: str, view: str, changes: Sequence[Change]) -> dict[str, Any]:
    """Return a view of a request's changes. Messages keep their original bytes; unchanged ones are only counted."""
    complete = all(change.complete for change in changes if isinstance(change, Changed))
    about = {"object": f"compaction.{view}", "id": id, "complete": complete}
    if view == "summary":
        message = next((change.after for change in changes if isinstance(change, Changed) and change.summary), [])
        return {**about, "messages": _raw(message)}
    if view == "diff":
        return {**about, "changes": [_diff(change) for change in changes]}
    return {**about, "parts": [_side(change, view) for change in _ordered(changes, view)]}


def _ordered(changes: Sequence[Change], view: str) -> Sequence[Change]:
    return sorted(changes, key=lambda change: change.position) if view == "before" else changes


def _side(change: Change, view: str) -> dict[str, Any]:
    if isinstance(change, Unchanged):
        return {"position": change.position, "unchanged": change.count}
    messages = change.before if view == "before" else change.after
    return {"position": change.position, "summary": change.summary, "messages": _raw(messages)}


def _diff(change: Change) -> dict[str, Any]:
    if isinstance(change, Unchanged):
        return {"position": change.position, "unchanged": change.count}
    sides = {"before": _raw(change.before), "after": _raw(change.after)}
    return {"position": change.position, "summary": change.summary, **sides}


def _raw(messages: Sequence[bytes]) -> list[msgspec.Raw]:
    return [msgspec.Raw(message) for message in messages]
