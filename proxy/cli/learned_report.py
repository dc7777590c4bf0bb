"""Tables of the limits and ratios in the store, learned from rejected requests and usage."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from proxy.limits.stored import Learned


def render(known: Learned, wanted: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the learned limits and ratios of some models. ``wanted`` lists upstreams and models."""
    now = time.time()
    limits_table = Table(
        "upstream", "model", "tenant", "of the", "tokens", "source", "age", "until", title="learned limits"
    )
    for tenant, found in known.limits:
        if (found.upstream, found.model) not in wanted:
            continue
        for scope, figure in (("input", found.input), ("input and output", found.total)):
            if figure is not None and figure.holds(now):
                size = f"{figure.tokens:,}"
                life = (_age(now - figure.since), _when(figure.until))
                limits_table.add_row(found.upstream, found.model, short(tenant), scope, size, figure.source, *life)
    columns = ("upstream", "model", "tenant", "ratio", "source", "age", "until")
    ratios_table = Table(*columns, title="the upstream's tokens for each token counted here")
    for tenant, ratio in known.ratios:
        if (ratio.upstream, ratio.model) in wanted and ratio.until >= now:
            source = f"usage of {len(ratio.ratios)} answers"
            life = (_age(now - (ratio.since or ratio.noted)), _when(ratio.until))
            ratios_table.add_row(ratio.upstream, ratio.model, short(tenant), f"{ratio.factor:.2f}", source, *life)
    for table in (limits_table, ratios_table):
        table.title_justify = "left"
        if table.row_count:
            console.print(table, markup=False, highlight=False)
    if not limits_table.row_count and not ratios_table.row_count:
        console.print("Nothing has been learned of these models.", highlight=False)


def short(tenant: str) -> str:
    """Return the start of a tenant's digest, which reveals no key."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:12]


def _age(seconds: float) -> str:
    minutes = max(int(seconds // 60), 0)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _when(until: float) -> str:
    return datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%d %H:%M UTC")
