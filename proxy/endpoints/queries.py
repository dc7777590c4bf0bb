"""Read a request for records: whose records its sender may see, its parameters, and its times."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import get_args
from urllib.parse import parse_qsl

import msgspec
import structlog
from starlette.types import Scope

from proxy.access.admin import Admin
from proxy.dialects.apis import DIALECTS
from proxy.errors import ContentNotAllowed, RequestError
from proxy.http.headers import credential
from proxy.pipeline.exchange import begin_request
from proxy.pipeline.recorder import Tags
from proxy.pipeline.runtime import Runtime
from proxy.records.model import RECORD_LIMIT, RecordQuery, RecordStore
from proxy.records.report import day_of
from proxy.telemetry.record import ID_LENGTH, RequestRecord, Verdict

log = structlog.get_logger(__name__)

KEYLESS = "callers without a key"  # the name of senders without a key or a session


class Viewer(msgspec.Struct, frozen=True):
    """The sender of a request for records.

    ``tenants``: whose records it may see, ``None`` for all. ``name`` describes the sender. ``signed_in`` is true if the
    sender has a session. ``admin`` is ``None`` unless the sender is an administrator.
    """

    tenants: tuple[str, ...] | None
    name: str = "administrator"
    signed_in: bool = False
    admin: Admin | None = None

    def sees(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants

    def read_content(self, record: RequestRecord, view: str) -> None:
        """Log that the sender reads messages of a request. Raises ``ContentNotAllowed`` if its key may not."""
        reader = self.name
        if self.admin is not None:
            reader = f"administrator {self.admin.name}"
            if not self.admin.content:
                raise ContentNotAllowed(
                    "This admin key may not read messages (admin.keys: content: false). Use a key of the team."
                )
        log.info("content.read", reader=reader, record=record.id, team=record.team, view=view)


@asynccontextmanager
async def viewing(service: Runtime, scope: Scope) -> AsyncIterator[Viewer]:
    """Count a request, and yield its sender. Administrators have no rate limit.

    Raises ``NotAuthenticated`` and ``TooManyRequests``.
    """
    teams, headers = service.configuration.teams, scope["headers"]
    if (admin := teams.admins.sender(headers, service.access.admin_link)) is not None:
        yield Viewer(None, admin=admin)
        return
    session = service.access.sessions.digest(headers) if credential(headers) == (None, None) else None
    if session is not None and (admin := teams.admins.holder(session)) is not None:
        yield Viewer(None, signed_in=True, admin=admin)
        return
    caller = begin_request(service, scope, forwarded=False).caller if session is None else teams.holder(session)
    async with service.access.quotas.admit(caller):
        name = f"team {caller.team}" if caller.team is not None else "one key" if session else KEYLESS
        yield Viewer((caller.tenant,) if caller.has_storage else (), name, session is not None)


_AGO = re.compile(r"([0-9]{1,5})([mhdw])")
UNITS = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

_LATEST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()

APIS = (*DIALECTS, "other")

MOST_MILLISECONDS = 100_000_000

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


def days_of(since: str, until: str | None, now: float, *names: str) -> tuple[int, int]:
    """Return the first and the last day of a report, which counts whole days. Raises ``RequestError``.

    ``names`` are those of the two parameters.
    """
    last = now if until is None else min(now, time_in(names[1], until, now))
    return day_of(time_in(names[0], since, now)), day_of(last)


def choice(name: str, text: str, choices: Collection[str]) -> str:
    """Return a value that is one of the choices. Raises ``RequestError``."""
    if text not in choices:
        raise wrong(name, f"must be one of {', '.join(choices)}", text)
    return text


FILTERS = (
    *("team", "policy", "key", "model", "api", "verdict", "status", "error", "since", "until", "slow"),
    *("conversation", "user", "client"),
)
"""The parameters that select records, the same for the path, the page, and the command."""

REQUEST_ID = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}")

_STATUS = re.compile(r"([1-5])(xx|[0-9]{2})")


async def selected(
    records: RecordStore,
    tags: Tags,
    given: Mapping[str, str],
    tenants: tuple[str, ...] | None = None,
    limit: int = RECORD_LIMIT,
    *,
    kind: str | None = "request",
) -> list[RequestRecord]:
    """Return the records that the parameters select, newest first. Raises ``RequestError``, ``StoreFailed``."""
    query = dataclasses.replace(_query(given), tenants=tenants, kind=kind, limit=limit)
    if query.user is not None:
        query = dataclasses.replace(query, user=await tags.of_user(query.user) or NO_TAG)
    return await records.select(query)


AHEAD_SECONDS = 3_600  # age of a call at which a request no longer waits for it


async def summary_calls(
    records: RecordStore, record: RequestRecord, tenants: tuple[str, ...] | None = None
) -> list[RequestRecord]:
    """Return the calls to summary models that a request began, and those begun before that it waited for."""
    began = await records.select(RecordQuery(tenants, parent=record.id, limit=RECORD_LIMIT))
    if record.conversation is None or record.phases.get("summary", 0.0) < 1:
        return began
    since, until = record.time - AHEAD_SECONDS, record.time
    own = RecordQuery((record.tenant,), kind="summary", conversation=record.conversation, since=since, until=until)
    earlier = await records.select(dataclasses.replace(own, limit=RECORD_LIMIT))
    return [*began, *(one for one in earlier if one.time + one.phases.get("total", 0.0) / 1_000 > record.time)]


NO_TAG = "-"  # replaces the tag of a user if no record has a tag


def _query(given: Mapping[str, str]) -> RecordQuery:
    now, cursor, status = time.time(), given.get("cursor"), given.get("status")
    if cursor is not None and not REQUEST_ID.fullmatch(cursor):
        raise wrong("cursor", "must be next_cursor from the page before", cursor)
    since, until = (time_in(name, given[name], now) if name in given else None for name in ("since", "until"))
    return RecordQuery(
        team=given.get("team"),
        policy=given.get("policy"),
        key=given.get("key"),
        model=given.get("model"),
        error=given.get("error"),
        conversation=given.get("conversation"),
        user=given.get("user"),
        client=given.get("client"),
        api=choice("api", given["api"], APIS) if "api" in given else None,
        verdict=choice("verdict", given["verdict"], get_args(Verdict)) if "verdict" in given else None,
        status=None if status is None else _statuses(status),
        slow=count("slow", given["slow"], MOST_MILLISECONDS) if "slow" in given else None,
        since=since,
        until=until,
        before=cursor,
    )


def _statuses(text: str) -> tuple[int, int]:
    found = _STATUS.fullmatch(text)
    if found is None:
        raise wrong("status", "must be a status such as 429, or a class such as 4xx", text)
    first = int(found[1]) * 100
    return (first, first + 99) if found[2] == "xx" else (int(text), int(text))


def labels(name: str, text: str, choices: Collection[str]) -> tuple[str, ...]:
    """Return the values of a comma-separated list without duplicates. Raises ``RequestError``."""
    return tuple(dict.fromkeys(choice(name, part.strip(), choices) for part in text.split(",")))


def count(name: str, text: str, most: int) -> int:
    """Return a whole number from 1 to ``most``. Raises ``RequestError``."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise wrong(name, f"must be a whole number from 1 to {most:,}", text)
    return int(text)
