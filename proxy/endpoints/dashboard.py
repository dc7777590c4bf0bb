"""The dashboard: pages for people, with the same figures as the JSON endpoints.

Pages are rendered here and need no other host. One small script updates the list of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import parse_qsl, urlencode

import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from proxy.access.admin import SESSION_COOKIE, end_session
from proxy.config import Settings
from proxy.endpoints import presentation
from proxy.endpoints.queries import (
    APIS,
    FILTERS,
    REQUEST_ID,
    Viewer,
    parameters,
    selected,
    summary_calls,
    time_in,
    viewing,
)
from proxy.endpoints.records import request_json
from proxy.errors import ContentNotAllowed, NotAuthenticated, NotFound, ProxyError, RequestError
from proxy.http.headers import cookies, credential, key_digest
from proxy.http.request_body import read_body
from proxy.pipeline.changes import read_prompt
from proxy.pipeline.runtime import Runtime
from proxy.records.report import day_of, money
from proxy.store import StoreFailed
from proxy.telemetry.record import ID_LENGTH, Verdict
from proxy.telemetry.record_json import NAME_KINDS, record_json

if TYPE_CHECKING:
    import jinja2

log = structlog.get_logger(__name__)

HOME = "/compaction/"
SCREENS = (
    (HOME, "Requests"),
    ("/compaction/savings", "Savings"),
)

LISTING = (HOME, SCREENS[1][0])  # screens about requests, whose sender may have had a key that the visitor hasn't

ROWS = 50

FIELDS = (
    ("model", 12, ""),
    ("status", 4, "4xx"),
    ("since", 8, "24h"),
    ("until", 8, "1h"),
    ("key", 10, ""),
    ("client", 12, ""),
    ("error", 12, ""),
    ("slow", 7, "5000"),
    ("conversation", 16, ""),
    ("user", 10, ""),
)
"""The text fields of the filter: name, width in characters, and an example. The first three are always visible."""

LONGEST = 4_000  # Characters of a message on a page. The JSON endpoint has all.
FORM_BYTES = 10_000  # bytes of the form to sign in

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "private, no-store",
}

ASSETS = {"style.css": "text/css; charset=utf-8", "app.js": "text/javascript; charset=utf-8"}

NOTE = (
    "Savings compare the price with an estimate of the price without the proxy. It takes prompt caching into account. "
    "Summaries are subtracted. Negative savings are shown as negative. Requests that would have been too large without "
    "the proxy don't count as savings."
)

Page = Callable[[Request, Viewer], Awaitable[Response]]


class Dashboard:
    """The pages."""

    def __init__(self, service: Runtime) -> None:
        self._service = service

    @cached_property
    def _pages(self) -> jinja2.Environment:
        import jinja2  # 15 ms that a start needn't take

        pages = jinja2.Environment(
            loader=jinja2.PackageLoader("proxy.endpoints", "pages"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        pages.filters.update(
            figure=presentation.figure,
            ms=presentation.milliseconds,
            money=money,
            error=presentation.error_text,
        )
        pages.globals.update(text=presentation)
        return pages

    @property
    def routes(self) -> list[Route]:
        return [
            Route(HOME, self._page(self._requests), methods=["GET"]),
            Route("/compaction/view/{id}", self._page(self._request), methods=["GET"]),
            Route("/compaction/conversation/{id}", self._page(self._conversation), methods=["GET"]),
            Route("/compaction/savings", self._page(self._savings), methods=["GET"]),
            Route("/compaction/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/compaction/sign-out", _sign_out, methods=["POST"]),
            Route("/compaction/assets/{name}", self._asset, methods=["GET"]),
        ]

    def _page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                if request.url.path == HOME and (token := request.query_params.get("token")) is not None:
                    return self._redeemed(request, token)
                async with viewing(self._service, request.scope) as viewer:
                    return await self._shown(page, request, viewer)
            except NotAuthenticated as error:
                return self._sign_in_page(self._refusal(request, error), 401)
            except ProxyError as error:
                return self._sign_in_page(error.message, error.status)

        return serve

    async def _shown(self, page: Page, request: Request, viewer: Viewer) -> Response:
        """Return a page, or one about the problem to a sender who is signed in."""
        try:
            return await page(request, viewer)
        except ProxyError as error:
            title = "Not found" if isinstance(error, NotFound) else "The proxy can't show this page"
            return self._render("problem.html", viewer, error.status, title=title, problem=error.message)
        except StoreFailed as failure:
            log.warning("store.read_failed", reason=str(failure))
            problem = "The proxy can't read its records at the moment. Try again."
            return self._render("problem.html", viewer, 500, title="The proxy can't show this page", problem=problem)

    def _refusal(self, request: Request, error: NotAuthenticated) -> str:
        """Return the reason to show to a person, or nothing if the browser sent nothing that was refused."""
        headers = request.scope["headers"]
        known = credential(headers) != (None, None) or self._service.access.sessions.digest(headers) is not None
        if known or (request.url.path == HOME and "token" in request.query_params):
            return error.message
        had = next(cookies(headers, SESSION_COOKIE), None) is not None
        return "Your session has ended. Sign in again." if had else ""

    def _redeemed(self, request: Request, token: str) -> Response:
        """Start the session of a one-time link. A browser that has the session needs no valid link.

        Raises ``NotAuthenticated``.
        """
        admins, link = self._service.configuration.teams.admins, self._service.access.admin_link
        if admins.sender(request.scope["headers"], link) is not None:
            return RedirectResponse(HOME, 303, HEADERS)
        return RedirectResponse(HOME, 303, {**HEADERS, "set-cookie": admins.redeem(link, token)})

    def _render(self, name: str, viewer: Viewer, status: int = 200, /, **values: Any) -> Response:
        here = values.pop("here", "")
        link = self._service.access.admin_link if self._service.settings.admin is None else None
        hint = presentation.keyless_hint(viewer, link) if here in LISTING else None
        text = self._pages.get_template(name).render(
            screens=SCREENS, here=here, who=viewer.name, signed_in=viewer.signed_in, hint=hint, **values
        )
        return Response(text, status, HEADERS, media_type="text/html")

    def _sign_in_page(self, problem: str, status: int) -> Response:
        text = self._pages.get_template("sign_in.html").render(problem=problem)
        return Response(text, status, HEADERS, media_type="text/html")

    async def _sign_in(self, request: Request) -> Response:
        if request.method != "POST":
            return self._sign_in_page("", 200)
        try:
            with self._service.access.bodies.lease() as held:
                raw = await read_body(request.scope, request.receive, FORM_BYTES, held)
            key = dict(parse_qsl(raw.decode("utf-8", "replace"))).get("key", "").strip()
            cookie = self._service.access.sessions.cookie(key)
            if not key:
                return self._sign_in_page("Enter a key.", 401)
            teams, digest = self._service.configuration.teams, key_digest(key)
            if teams.admins.holder(digest) is None:
                teams.holder(digest)
        except ProxyError as error:
            return self._sign_in_page(error.message, error.status)
        return RedirectResponse(HOME, 303, {**HEADERS, "set-cookie": cookie})

    async def _requests(self, request: Request, viewer: Viewer) -> Response:
        problem, records = "", self._service.records
        given: dict[str, str] = {}
        try:
            given = parameters(request.scope["query_string"], (*FILTERS, "cursor", "id"))
            if (id := given.get("id", "").strip()) and REQUEST_ID.fullmatch(id):
                return RedirectResponse(f"/compaction/view/{id}", 303, HEADERS)
            if id:
                raise RequestError(f"id: must be the {ID_LENGTH} digits of x-compaction-id (got {id[:60]!r}).")
            found = await selected(records.store, records.tags, given, viewer.tenants, ROWS + 1)
        except RequestError as error:
            problem = error.message
            found = await selected(records.store, records.tags, {}, viewer.tenants, ROWS + 1)
        page = found[:ROWS]
        rest = {name: value for name, value in given.items() if name != "cursor"}
        following = f"{HOME}?{urlencode({**rest, 'cursor': page[-1].id})}" if len(found) > ROWS else None
        settings = self._service.settings
        choices = {
            "team": sorted(settings.teams) if viewer.tenants is None else [],
            "policy": _policies_of(settings, viewer),
            "verdict": list(get_args(Verdict)),
            "api": list(APIS),
        }
        shown = {
            "records": [record_json(record) for record in page],
            "given": given,
            "choices": {name: options for name, options in choices.items() if options},
            "fields": FIELDS,
            "next": following,
            "problem": problem,
        }
        return self._render("requests.html", viewer, 400 if problem else 200, here=HOME, **shown)

    async def _request(self, request: Request, viewer: Viewer) -> Response:
        id = request.path_params["id"]
        found = await self._service.records.store.get(id, viewer.tenants) if REQUEST_ID.fullmatch(id) else None
        if found is None:
            raise NotFound("You have no record with this id. It may have expired, or belong to another team.")
        calls = await summary_calls(self._service.records.store, found, viewer.tenants)
        prompt = await read_prompt(self._service.stores.archive, found)
        one, policy = request_json(found, calls), presentation.policy_of(found, self._service.settings)
        left = (
            [presentation.why_unknown(found, policy)]
            if prompt is None
            else list(presentation.left_prompt(prompt, found, policy))
        )
        if prompt is not None:
            try:
                viewer.read_content(found, "page")
            except ContentNotAllowed as error:
                prompt, left = None, [*left, error.message]

        def rendered() -> Response:
            values: dict[str, Any] = {"one": one, "facts": presentation.request_facts(found, one), "left": left}
            if one["window"] is not None:
                values |= {
                    "window": presentation.window_title(one["window"]),
                    "parts": list(presentation.window_parts(one["window"])),
                }
            if prompt is not None:
                values |= {"sections": presentation.summary_sections(prompt), "prompt": prompt, "longest": LONGEST}
            return self._render("request.html", viewer, name_kinds=NAME_KINDS, **values)

        return await asyncio.to_thread(rendered)

    async def _conversation(self, request: Request, viewer: Viewer) -> Response:
        records, id = self._service.records, request.path_params["id"]
        found = await selected(records.store, records.tags, {"conversation": id}, viewer.tenants, kind=None)
        if not found:
            raise NotFound("You have no conversation with this id. Its records may have expired.")
        turns, sums = presentation.conversation(found)
        shown = [
            (one, presentation.compaction_text(one), presentation.error_text(one)) for one in map(record_json, turns)
        ]
        return self._render("conversation.html", viewer, id=id, turns=shown, sums=sums)

    async def _savings(self, request: Request, viewer: Viewer) -> Response:
        problem, now = "", time.time()
        given: dict[str, str] = {}
        since = time_in("since", "7d", now)
        try:
            given = parameters(request.scope["query_string"], ("since",))
            since = time_in("since", given.get("since", "7d"), now)
        except RequestError as error:
            problem = error.message
        first, last = day_of(since), day_of(now)
        rows = await self._service.records.store.ledger(first, last, viewer.tenants)
        budgets = await self._service.money.spending.budgets(viewer.tenants)

        def rendered() -> Response:
            values = presentation.savings(rows, first, last)
            status = 400 if problem else 200
            place = {"here": SCREENS[1][0], "note": NOTE, "given": given, "problem": problem, "budgets": budgets}
            return self._render("savings.html", viewer, status, **place, **values)

        return await asyncio.to_thread(rendered)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return Response("Not found\n", 404, HEADERS, media_type="text/plain")
        text = self._pages.loader.get_source(self._pages, name)[0]  # type: ignore[union-attr]
        headers = {**HEADERS, "cache-control": "public, max-age=300"}
        return Response(text, headers=headers, media_type=ASSETS[name])


async def _sign_out(request: Request) -> Response:
    return RedirectResponse(HOME, 303, {**HEADERS, "set-cookie": end_session()})


def _policies_of(settings: Settings, viewer: Viewer) -> list[str]:
    """Return the policies that the sender may see: those of its teams. Their names may be confidential."""
    own = {tenant.removeprefix("team:") for tenant in viewer.tenants or ()}
    names = {team.policy for name, team in settings.teams.items() if name in own} or {"default"}
    seen = settings.policies if viewer.tenants is None else names & set(settings.policies)
    return sorted(seen, key=lambda name: (name != "default", name))
