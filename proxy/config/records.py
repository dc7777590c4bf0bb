"""The section `records`: how long the proxy keeps the records of requests."""

from __future__ import annotations

from proxy.config.fields import Count, Days, Section


class RecordSettings(Section):
    """Records of requests: names and figures, no content."""

    days: Days = 7
    """Days to keep records, at most 36,500."""
    max: Count = 100_000
    """Maximum number of records. The proxy removes the oldest ones over that."""
