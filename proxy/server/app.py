"""Routes and lifespan, and changes of the configuration files while the proxy runs.

The proxy checks the files once a second, and immediately after SIGHUP. It applies a valid configuration. It reports
errors in an invalid one and keeps the current one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from proxy.access.quotas import ConcurrencyLimit
from proxy.config import Loaded, Settings
from proxy.config.loading import attempt
from proxy.config.sources import Sources
from proxy.dialects.apis import DIALECTS
from proxy.endpoints.compress import COMPRESS, RETRIEVE, Compress, Retrieve
from proxy.endpoints.conversations import Conversations
from proxy.endpoints.dashboard import HOME, Dashboard
from proxy.endpoints.models import ModelList
from proxy.endpoints.passthrough import PassThrough
from proxy.endpoints.paths import MODELS, PREFIX, below, canonical, error_shape
from proxy.endpoints.records import ARCHIVE_PATH, ArchiveEndpoint, RecordEndpoints
from proxy.errors import MethodNotAllowed, NotFound, Overloaded, ProxyError, UpgradeRequired
from proxy.http.request_body import Sent, answer_error, is_handshake
from proxy.limits.profiles import Profiles
from proxy.litellm_package import TESTED, untested_version
from proxy.pipeline.runtime import Runtime
from proxy.server.maintenance import Maintenance
from proxy.telemetry.logs import unhandled
from proxy.telemetry.metrics import RELOADS, REQUESTS_IN_FLIGHT, exposition

log = structlog.get_logger(__name__)

EVERY = 1.0  # seconds between two checks of the files

SETTLED = 0.1
"""Seconds that files must stay unchanged before the proxy reads them, because an editor may still be writing."""

SETTLES_WITHIN = 50  # checks after which the proxy reads files that keep changing


class Reload:
    """Watch the files of one configuration."""

    def __init__(self, service: Runtime, loaded: Loaded, environ: Mapping[str, str], every: float = EVERY) -> None:
        """``loaded`` is the configuration that the service uses. ``every`` is in seconds."""
        self._service = service
        self._environ = environ
        self._every = every
        self._settings = loaded.settings
        running = service.settings.server.host
        # If the command line sets an address, the file's address doesn't count as a change.
        self._host = None if running == loaded.settings.server.host else running
        self._good = loaded.sources
        self._sources = loaded.sources
        self._seen = loaded.sources.stamp_as_read
        self._asked = asyncio.Event()
        self.wrong: str | None = None
        """The errors in the configuration on disk, one per line, without secrets."""

    def ask(self) -> None:
        self._asked.set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                await self._look(asked=asked)
            except Exception as error:  # the proxy continues to serve, and checks again
                log.exception("configuration.reload_crashed", error=type(error).__name__)

    async def _look(self, *, asked: bool) -> None:
        stamp = await asyncio.to_thread(self._sources.stamp)
        if stamp == self._seen and not asked:
            return
        for _ in range(SETTLES_WITHIN):
            await asyncio.sleep(SETTLED)
            before, stamp = stamp, await asyncio.to_thread(self._sources.stamp)
            if stamp == before:
                break
        found = await asyncio.to_thread(attempt, self._sources.entry, self._environ)
        if found.sources is None:
            self._seen = stamp
        else:
            self._sources, self._seen = found.sources, found.sources.stamp_as_read
        emptied = None if found.sources is None else _emptied(self._good, found.sources)
        if found.loaded is None or emptied is not None:
            self._refuse(emptied or found.wrong)
        else:
            await self._apply(found.loaded, asked=asked)

    def _refuse(self, wrong: str) -> None:
        if wrong != self.wrong:
            RELOADS.labels(outcome="refused").inc()
            log.error("configuration.wrong", faults=wrong.splitlines(), in_force="the one before")
        self.wrong = wrong

    async def _apply(self, loaded: Loaded, *, asked: bool) -> None:
        was_wrong, self.wrong = self.wrong is not None, None
        self._good = loaded.sources
        if loaded.settings == self._settings and not asked and not was_wrong:
            return
        waiting = await self._service.reconfigure(loaded.settings.listening(self._host))
        self._settings = loaded.settings
        RELOADS.labels(outcome="applied").inc()
        log.info("configuration.reloaded", files=len(loaded.sources.files), warnings=list(loaded.warnings))
        if waiting:
            log.warning("configuration.needs_restart", settings=waiting)


def _emptied(good: Sources, found: Sources) -> str | None:
    """Return the error for a file that had settings and is now empty. Some editors truncate a file before they write.

    An empty file is valid, but applying it would drop its settings, such as the keys of teams.
    """
    filled = {source.path for source in good.files if source.content.strip()}
    for source in found.files:
        if source.path in filled and not source.content.strip() and source.unreadable is None:
            return f"{source.path}:1: the file has become empty. Fix: write its settings, or restart without them"
    return None


def on_signal(reload: Reload | None) -> None:
    """Make SIGHUP reload the configuration. Only a process's main thread receives signals."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        return
    act = (lambda: log.warning("configuration.none")) if reload is None else reload.ask
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, act)


WRONG = (
    "The configuration on disk is invalid. The previous one stays in force. "
    "The log (configuration.wrong) and compaction-proxy check list the errors."
)
"""Everybody may read this response, so it doesn't quote the configuration."""

HEALTH = frozenset({"/livez", "/readyz", "/metrics"})  # paths that are served even if the proxy is overloaded


CRASHED = "The proxy failed to process this request. Try again, or ask its operator to check the log."

API = "/v1/"  # requests below this path are recorded

Endpoint = Callable[[Scope, Receive, Sent], Awaitable[None]]


class Proxy:
    """The application. It routes requests under ``/v1``, and Starlette routes the rest."""

    def __init__(self, settings: Settings, loaded: Loaded | None = None, profiles: Profiles | None = None) -> None:
        """With ``loaded``, the source of the settings, it follows changes of the files.

        ``profiles`` may have its table loaded already.
        """
        self.service = Runtime(settings, profiles)
        self.reload = None if loaded is None else Reload(self.service, loaded, os.environ)
        self._conversations = {
            PREFIX + dialect.path: Conversations(self.service, dialect) for dialect in DIALECTS.values()
        }
        self._compress = Compress(self.service, self._conversations)
        self._retrieve = Retrieve(self.service)
        stores = self.service.stores
        self._maintenance = Maintenance(
            stores.store.unguarded,
            [*self.service.holders, *(one for each in self._conversations.values() for one in each.holders)],
            self.service.records.store,
            lambda: self.service.settings.record_count,
            self.service.settled,
        )
        self._passthrough = PassThrough(self.service)
        self._models = ModelList(self.service)
        own = settings.metrics.listen is None
        self._rest = Starlette(
            routes=[
                Route("/", _home, methods=["GET"]),
                Route(HOME.rstrip("/"), _home, methods=["GET"]),
                Route("/livez", _alive, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                *([Route("/metrics", self._metrics, methods=["GET"])] if own else []),
                Route(ARCHIVE_PATH, ArchiveEndpoint(self.service)),
                *RecordEndpoints(self.service).routes,
                *Dashboard(self.service).routes,
            ],
            lifespan=self._lifespan,
            exception_handlers={404: _not_found, 405: _not_allowed},
        )
        # A redirect for a trailing slash would lead to the host that the request names, so there is none.
        self._rest.router.redirect_slashes = False

    @property
    def routes(self) -> list[BaseRoute]:
        return self._rest.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        if prefixes := self.service.settings.server.prefixes:
            scope = below(prefixes, scope)
        web = self.service.configuration.web
        origin, wrong = web.judge(scope)
        if origin is None:
            await self._served(wrong, scope, receive, send)
        else:
            await web.cors(partial(self._served, wrong), origin)(scope, receive, send)

    async def _served(self, wrong: ProxyError | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request once the concurrency limit admits it, and record it if it is for an API.

        ``wrong`` is the reason to refuse it. An unexpected error is logged in full. The client doesn't get its cause.
        """
        sent, record, started, admitted = Sent(send), None, 0.0, False
        limit = self.service.access.concurrency
        try:
            if scope["path"] not in HEALTH:
                scope = canonical(scope)
                if scope["path"].startswith(API):
                    started = perf_counter()
                    record = self.service.records.recorder.begin(scope)
                if wrong is None:
                    wrong = None if limit.take(1) else await _overload(limit)
                if admitted := wrong is None:
                    REQUESTS_IN_FLIGHT.inc()
            if wrong is None:
                await self._endpoint_for(scope)(scope, receive, sent)
            else:
                await answer_error(sent, wrong, shape=error_shape(scope))
        except Exception as error:
            log.exception("request.crashed", error=type(error).__name__)
            if sent.begun:
                raise
            await answer_error(sent, ProxyError(CRASHED), shape=error_shape(scope))
        finally:
            if admitted:
                REQUESTS_IN_FLIGHT.dec()
                limit.give(1)
            if record is not None:
                self.service.records.recorder.end(record, sent, started)

    def _endpoint_for(self, scope: Scope) -> Endpoint:
        path, method = scope["path"], scope["method"]
        if method == "GET" and path.startswith("/v1/") and is_handshake(scope):
            return _no_websocket
        if method == "POST" and (conversations := self._conversations.get(path)) is not None:
            return conversations
        if path == COMPRESS:
            return self._compress
        if path == RETRIEVE or path.startswith(f"{RETRIEVE}/"):
            return self._retrieve
        if path == MODELS and method == "GET":
            return self._models
        return self._passthrough if path.startswith("/v1/") else self._rest

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(unhandled)
        on_signal(self.reload)
        if (installed := untested_version()) is not None:
            log.warning("litellm.untested", installed=installed, tested=TESTED)
        following = None if self.reload is None else asyncio.create_task(self.reload.run())
        await self.service.configuration.upstreams.prepare()
        self._maintenance.start()
        await self.service.records.tags.prepare()
        yield
        self.service.draining = True
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        await self._maintenance.aclose()
        await self.service.aclose()

    async def _metrics(self, request: Request) -> Response:
        return Response(exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _ready(self, request: Request) -> Response:
        if self.service.draining:
            return PlainTextResponse("draining\n", status_code=503)
        status = "ready"
        if failing := self.service.failing_stores:
            # The proxy still serves requests, so it stays ready.
            status += f"; the store fails ({', '.join(failing)})"
        for problem in self.service.limits.measures.unavailable.values():
            status += f"\nRequests pass through uncompacted: {problem}"
        if self.reload is not None and self.reload.wrong is not None:
            status += f"\n{WRONG}"
        return PlainTextResponse(f"{status}\n")


async def _overload(limit: ConcurrencyLimit) -> Overloaded | None:
    try:
        await limit.wait_for_slot()
    except Overloaded as error:
        return error
    return None


async def _no_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a WebSocket handshake. Clients that try WebSocket first, such as codex, then fall back to HTTP."""
    error = UpgradeRequired("This proxy doesn't support WebSocket. Send the request as an HTTP POST instead.")
    await answer_error(send, error, [("connection", "upgrade"), ("upgrade", "HTTP/1.1")])


async def _home(request: Request) -> Response:
    return RedirectResponse(HOME, 303)


async def _alive(request: Request) -> Response:
    return PlainTextResponse("alive\n")


async def _not_found(request: Request, error: Exception) -> Response:
    return _response(NotFound("This path doesn't exist. The API is under /v1, so end the client's base URL with /v1."))


async def _not_allowed(request: Request, error: Exception) -> Response:
    return _response(MethodNotAllowed(f"This path doesn't support {request.method}. Use GET."), {"allow": "GET"})


def _response(error: ProxyError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, headers, media_type="application/json")
