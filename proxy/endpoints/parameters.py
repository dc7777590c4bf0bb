"""Read the parameters of a query, and times as people write them."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime
from urllib.parse import parse_qsl

from proxy.errors import RequestError

_AGO = re.compile(r"([0-9]{1,5})([mhdw])")
UNITS = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

_LATEST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()

_LONGEST = 200
_QUOTED = 60

TIME_FIX = "must be a duration like 30m, 24h, 7d, or 4w, or a date like 2026-11-01 or 2026-11-01T08:00:00Z"


def parameters(query: bytes, known: Collection[str]) -> dict[str, str]:
    """Return the parameters of a query. Empty ones count as omitted. Raises ``RequestError`` for unknown ones."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            takes = f"Use {', '.join(known)}." if known else "This path takes none."
            raise RequestError(f"There is no parameter {name[:_QUOTED]!r}. {takes}", param=name[:_QUOTED])
        if name in found:
            raise RequestError(f"The parameter {name} occurs twice. Send it once.", param=name)
        if len(value) > _LONGEST:
            raise wrong(name, f"must have at most {_LONGEST} characters", value)
        found[name] = value
    return {name: value for name, value in found.items() if value}


def wrong(name: str, problem: str, value: str) -> RequestError:
    """Return the error for a parameter's value."""
    return RequestError(f"{name}: {problem} (got {value[:_QUOTED]!r}).", param=name)


def time_in(name: str, text: str, now: float) -> float:
    """Return a time in seconds since 1970. Durations count back from ``now``. Raises ``RequestError``.

    Dates are in UTC unless they state an offset.
    """
    if ago := _AGO.fullmatch(text):
        return max(0.0, now - int(ago[1]) * UNITS[ago[2]])
    try:
        # In a query, a plus sign that isn't encoded arrives as a space.
        when = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        return min(max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()), _LATEST)
    except (ValueError, OverflowError):
        raise wrong(name, TIME_FIX, text) from None


def choice(name: str, text: str, choices: Collection[str]) -> str:
    """Return a value that is one of the choices. Raises ``RequestError``."""
    if text not in choices:
        raise wrong(name, f"must be one of {', '.join(choices)}", text)
    return text


def labels(name: str, text: str, choices: Collection[str]) -> tuple[str, ...]:
    """Return the values of a comma-separated list without duplicates. Raises ``RequestError``."""
    return tuple(dict.fromkeys(choice(name, part.strip(), choices) for part in text.split(",")))


def count(name: str, text: str, most: int) -> int:
    """Return a whole number from 1 to ``most``. Raises ``RequestError``."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise wrong(name, f"must be a whole number from 1 to {most:,}", text)
    return int(text)
