"""The lines of the catalogue: responses of upstreams, with their labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import DATA

CATALOGUE = DATA / "overflow-errors.jsonl"
REMEDIES = {"lower_max_tokens": "lower_output"}
FINISHED = frozenset({"silent", "truncated", "normal", "output_exhausted"})
"""Kinds of lines with status 200 and without an error."""


@dataclass(frozen=True, slots=True)
class Line:
    """A response. ``limit``, ``counted`` and ``output`` are tokens, or ``None`` if it doesn't state them.

    ``estimate`` and ``window`` are the tokens that the proxy knows for the request. ``traps`` are numbers that
    only look like limits. ``endpoint`` is ``chat``, ``messages``, ``responses``, or another name.
    """

    id: str
    provider: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    overflow: bool
    endpoint: str
    kind: str
    limit: int | None
    scope: str | None
    counted: int | None
    output: int | None
    remedy: str | None
    traps: frozenset[int]
    estimate: int | None
    window: int | None
    litellm: str

    @property
    def silent(self) -> bool:
        """Return whether the response is complete and has no error."""
        return self.status == 200 and self.kind in FINISHED


def lines(path: Path) -> list[Line]:
    """Return all lines that aren't ambiguous. Raises ``OSError``, ``ValueError``, and ``KeyError``."""
    with path.open(encoding="utf-8") as file:
        return [_line(row) for row in map(json.loads, file) if not row["ambiguous"]]


def _line(row: Mapping[str, Any]) -> Line:
    limit = row.get("limit_tokens")
    headers = {str(name).lower(): str(value) for name, value in (row.get("headers") or {}).items()}
    return Line(
        id=row["id"],
        provider=row["provider"],
        status=row["http_status"],
        headers=tuple(headers.items()),
        body=row["body"].encode(),
        overflow=row["is_overflow"],
        endpoint=row.get("endpoint", "chat"),
        kind=row["kind"],
        limit=limit,
        scope=row.get("limit_scope") if limit else None,
        counted=None if row.get("prompt_is_lower_bound") else row.get("prompt_tokens"),
        output=row.get("output_tokens_requested"),
        remedy=REMEDIES.get(row["remedy"], row["remedy"]),
        traps=frozenset(row.get("trap_numbers") or ()),
        estimate=row.get("proxy_estimate_tokens"),
        window=row.get("window_known"),
        litellm=row.get("litellm_provider") or "openai",
    )
