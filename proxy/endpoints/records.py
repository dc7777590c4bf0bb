"""Serve the records of requests, the ledger, the archive, and the proxy's status, as JSON.

A caller sees the records of its own tenant, and an administrator sees all. The tenant comes from the key alone. An id
of another tenant gets the same response as an unknown one. For a request that the proxy changed, there are also the
messages before and after. The archive has the messages that a compaction removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.config import Settings
from proxy.constants import __version__
from proxy.endpoints.queries import (
    FILTERS,
    REQUEST_ID,
    Viewer,
    choice,
    count,
    days_of,
    labels,
    parameters,
    selected,
    summary_calls,
    viewing,
)
from proxy.errors import ArchiveUnavailable, MethodNotAllowed, NotFound, ProxyError
from proxy.http.request_body import answer_error, answer_json
from proxy.limits.learned import LimitRecord
from proxy.limits.stored import stored_limits
from proxy.pipeline.changes import ChangedPrompt, Message, read_prompt
from proxy.pipeline.exchange import begin_request
from proxy.pipeline.runtime import Runtime
from proxy.records.model import RECORD_LIMIT, LedgerLabels, LedgerSums
from proxy.records.report import BY, csv_text, report
from proxy.store import StoreFailed
from proxy.store.archive import Found
from proxy.store.guarded import READ_SECONDS
from proxy.telemetry.record import RequestRecord, shown_model
from proxy.telemetry.record_json import caller_digest, iso_time, record_json, team_of

log = structlog.get_logger(__name__)

REQUESTS = "/compaction/requests"
REQUEST = "/compaction/requests/{id}"
DIFF = "/compaction/requests/{id}/diff"
REPORT = "/compaction/report"
STATUS = "/compaction/status"

PARAMETERS = {
    REQUESTS: (*FILTERS, "limit", "cursor"),
    REQUEST: (),
    DIFF: (),
    REPORT: ("since", "until", "by", "team", "format"),
    STATUS: (),
}
"""The parameters of each path."""

DEFAULT_LIMIT = 50
DEFAULT_SINCE = "7d"
DEFAULT_BY = "team"
FORMATS = ("json", "csv")

HEADERS = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}

Row = tuple[LedgerLabels, LedgerSums]

Answer = Callable[[Request, Viewer, dict[str, str]], Awaitable[Response]]


class RecordEndpoints:
    """The endpoints for records."""

    def __init__(self, service: Runtime) -> None:
        self._service = service

    @property
    def routes(self) -> list[Route]:
        answers = {
            REQUESTS: self._requests,
            REQUEST: self._request,
            DIFF: self._diff,
            REPORT: self._report,
            STATUS: self._status,
        }
        return [Route(path, self._serving(path, answer), methods=["GET"]) for path, answer in answers.items()]

    def _serving(self, path: str, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a path: authenticate, read the parameters, and answer."""

        async def serve(request: Request) -> Response:
            try:
                async with viewing(self._service, request.scope) as viewer:
                    return await answer(request, viewer, parameters(request.scope["query_string"], PARAMETERS[path]))
            except ProxyError as error:
                return _error(error)
            except StoreFailed as failure:
                log.warning("store.read_failed", reason=str(failure))
                return _error(ProxyError("The proxy can't read its records at the moment. Try again."))

        return serve

    async def _requests(self, request: Request, viewer: Viewer, given: dict[str, str]) -> Response:
        limit = count("limit", given["limit"], RECORD_LIMIT) if "limit" in given else DEFAULT_LIMIT
        records = self._service.records
        found = await selected(records.store, records.tags, given, viewer.tenants, limit + 1)
        page = found[:limit]
        more = page[-1].id if len(found) > limit else None
        return await asyncio.to_thread(_page, page, more)

    async def _request(self, request: Request, viewer: Viewer, given: dict[str, str]) -> Response:
        id = request.path_params["id"]
        found = await _record(self._service, viewer, id)
        if found is None:
            kept = "" if self._service.settings.records is not None else "This proxy keeps no records (records: null). "
            raise NotFound(
                f"Your key has no record with this id. {kept}A record appears up to a second after the response and "
                "may have expired. Send the id in the header x-compaction-id, with the key of that request."
            )
        calls = await summary_calls(self._service.records.store, found, viewer.tenants)
        return _json(request_json(found, calls))

    async def _diff(self, request: Request, viewer: Viewer, given: dict[str, str]) -> Response:
        id = request.path_params["id"]
        found = await _record(self._service, viewer, id)
        prompt = None if found is None else await read_prompt(self._service.stores.archive, found)
        if found is None or prompt is None:
            raise NotFound(
                "Your key has no changed request with this id. "
                "Only compacted requests of a policy with an archive have changes."
            )
        viewer.read_content(found, "diff")
        return await asyncio.to_thread(lambda: _json(diff_json(id, prompt)))

    async def _report(self, request: Request, viewer: Viewer, given: dict[str, str]) -> Response:
        now = time.time()
        since, until = days_of(given.get("since", DEFAULT_SINCE), given.get("until"), now, "since", "until")
        by = labels("by", given.get("by", DEFAULT_BY), BY)
        as_csv = choice("format", given.get("format", "json"), FORMATS) == "csv"
        records, team = self._service.records.store, given.get("team")
        rows = await records.ledger(since, until, viewer.tenants)
        budgets = await self._service.money.spending.budgets(viewer.tenants)

        def answer() -> Response:
            found = report(of_team(rows, team), by, since, until)
            if as_csv:
                return Response(csv_text(found), headers=HEADERS, media_type="text/csv; charset=utf-8")
            return _json({**found, "budgets": [one for one in budgets if team in (None, one.team)]})

        return await asyncio.to_thread(answer)

    async def _status(self, request: Request, viewer: Viewer, given: dict[str, str]) -> Response:
        return _json(await status(self._service, viewer))


def request_json(record: RequestRecord, calls: list[RequestRecord]) -> dict[str, Any]:
    """Return a record with the calls to summary models that it began or waited for."""
    made = [record_json(call) for call in reversed(calls)]
    return {"object": "compaction.request", **record_json(record), "summary_calls": made}


async def _record(service: Runtime, viewer: Viewer, id: str) -> RequestRecord | None:
    return await service.records.store.get(id, viewer.tenants) if REQUEST_ID.fullmatch(id) else None


def of_team(rows: list[Row], team: str | None) -> list[Row]:
    return rows if team is None else [row for row in rows if row[0].team == team]


def _page(records: list[RequestRecord], cursor: str | None) -> Response:
    data = [record_json(record) for record in records]
    return _json({"object": "list", "data": data, "has_more": cursor is not None, "next_cursor": cursor})


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), headers=HEADERS, media_type="application/json")


def _error(error: ProxyError) -> Response:
    return Response(error.body(), error.status, HEADERS | dict(error.retry_headers), media_type="application/json")


def diff_json(id: str, prompt: ChangedPrompt) -> dict[str, Any]:
    """Return a request's changes. Messages keep their original bytes; unchanged ones are only counted."""
    changes: list[dict[str, Any]] = []
    after = [] if prompt.summary is None else [prompt.summary]
    complete = all(one.sent is not None for one in after)
    for fate, group in groupby(prompt.messages, key=lambda one: one.fate):
        run = list(group)
        if fate == "kept":
            changes.append({"position": run[0].position, "unchanged": len(run)})
        elif fate == "summarized":
            changes.append({"position": run[0].position, "summary": True, **_sides(run, after)})
            after = []
        elif fate != "left out":
            changes += [{"position": one.position, "summary": False, **_sides([one], [one])} for one in run]
        complete &= fate in ("kept", "left out", "added") or all(one.received is not None for one in run)
    return {"object": "compaction.diff", "id": id, "complete": complete, "changes": changes}


def _sides(before: Sequence[Message], after: Sequence[Message]) -> dict[str, list[msgspec.Raw]]:
    received, sent = [one.received for one in before], [one.sent for one in after]
    return {"before": [msgspec.Raw(raw) for raw in received if raw], "after": [msgspec.Raw(raw) for raw in sent if raw]}


ARCHIVE_PATH = "/compaction/archive/{id:path}"

ARCHIVE_ID = re.compile(r"[0-9a-f]{20}")
_FIX = "Copy the archive id from the note in the conversation that replaces the removed text. No header contains it."

PRIVATE = ("cache-control", "private, no-store")


class ArchiveEndpoint:
    """The archive of the caller's own tenant."""

    METHODS: tuple[str, ...] = ("GET",)

    def __init__(self, service: Runtime) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(scope, receive)
        except MethodNotAllowed as error:
            await answer_error(send, error, [("allow", ", ".join(self.METHODS))])
        except ProxyError as error:
            await answer_error(send, error, [PRIVATE])
        else:
            await answer_json(send, body, [PRIVATE])

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        if scope["method"] not in self.METHODS:
            raise MethodNotAllowed(f"This path doesn't support {scope['method']}. Use {self.METHODS[0]}.")
        context = begin_request(self._service, scope, forwarded=False)
        async with self._service.access.quotas.admit(context.caller):
            return await self._answer(scope, receive, context.caller.tenant)

    async def _answer(self, scope: Scope, receive: Receive, tenant: str) -> bytes:
        id = scope["path_params"]["id"]
        found = await self.entry(tenant, id)
        # Encoding megabytes takes too long for the event loop.
        return await asyncio.to_thread(_answer, id, found)

    async def entry(self, tenant: str, id: str) -> Found:
        """Return an entry of a tenant's archive. Raises ``NotFound`` or ``ArchiveUnavailable``."""
        if not ARCHIVE_ID.fullmatch(id):
            if REQUEST_ID.fullmatch(id):
                raise NotFound(f"This is the id of a request, from the header x-compaction-id. {_FIX}")
            raise NotFound(f"This isn't an archive id. An archive id has 20 lowercase hexadecimal digits. {_FIX}")
        try:
            found = await self._service.stores.archive.fetch(tenant, id)
        except StoreFailed as failure:
            log.warning("store.read_failed", reason=str(failure))
            raise ArchiveUnavailable("The proxy can't read its archive at the moment. Try again.") from failure
        if found is None:
            raise NotFound(
                "Your key has no archive entry with this id. It may have expired, or belong to another key or team. "
                "Use the key that sent the conversation, or read the messages from the application's own history."
            )
        return found


def _answer(id: str, found: Found) -> bytes:
    """Return the body of the response. The messages keep their original bytes."""
    return msgspec.json.encode(
        {
            "object": "compaction.archive",
            "id": id,
            "complete": found.complete,
            "messages": [msgspec.Raw(message) for message in found.messages],
        }
    )


MOST_LIMITS = 200  # Learned limits to return, those that hold longest. Clients choose the names of models.

_STARTED = time.time()


async def status(service: Runtime, viewer: Viewer) -> dict[str, Any]:
    """Return the state of this worker and of the store. A part that the store can't provide is ``None``."""
    settings = service.settings
    return {
        "object": "compaction.status",
        "version": __version__,
        "configuration": await asyncio.to_thread(configuration_hash, settings),
        "started": iso_time(_STARTED),
        "uptime_seconds": int(time.time() - _STARTED),
        "pid": os.getpid(),
        "store": {
            "kind": settings.store.kind,
            "archive": settings.store.kind,
            "failing": service.failing_stores,
        },
        "learned_limits": await _learned(service, viewer),
        "budgets": await service.money.spending.budgets(viewer.tenants),
    }


def configuration_hash(settings: Settings) -> str:
    """Return a short digest of the settings in force. Workers with the same settings have the same digest."""
    plain = msgspec.json.encode(settings.model_dump(warnings=False), enc_hook=str, order="deterministic")
    return hashlib.sha256(plain).hexdigest()[:12]


async def _learned(service: Runtime, viewer: Viewer) -> list[dict[str, Any]] | None:
    try:
        async with asyncio.timeout(READ_SECONDS):
            known = await stored_limits(service.stores.store.unguarded)
    except (StoreFailed, TimeoutError) as failure:
        log.warning("store.read_failed", reason=str(failure) or "timeout")
        return None
    now = time.time()
    seen = [
        (tenant, found)
        for tenant, found in known
        if viewer.sees(tenant) and any(one is not None and one.holds(now) for one in (found.input, found.total))
    ]
    if len(seen) > MOST_LIMITS:
        seen = sorted(seen, key=lambda one: -one[1].until)[:MOST_LIMITS]
    return [
        {
            "caller": caller_digest(tenant),
            "team": team_of(tenant),
            "upstream": found.upstream,
            "model": shown_model(found.model),
            "input": _limit(found.input, now),
            "total": _limit(found.total, now),
        }
        for tenant, found in seen
    ]


def _limit(record: LimitRecord | None, now: float) -> dict[str, Any] | None:
    if record is None or not record.holds(now):
        return None
    since, until = iso_time(record.since), iso_time(record.until)
    return {"tokens": record.tokens, "named": record.named, "source": record.source, "since": since, "until": until}
