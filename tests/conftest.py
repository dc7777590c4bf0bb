"""Proxies on loopback for tests: each with a store of its own, and nothing from the machine's environment."""

import contextlib
import functools
import gc
import os
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
import structlog
import yaml
from httpx._transports import default
from httpx2._transports import default as default2
from starlette.types import ASGIApp

from proxy.config import Settings
from proxy.limits import profiles
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from proxy.summary import single_flight
from proxy.upstream import limit_discovery as asking
from tests.kit.client import StartProxy
from tests.kit.configurations import loads
from tests.kit.redis_server import MISSING, PROGRAM, RedisServer, redis_server
from tests.kit.waiting import until


class Output:
    """Prints log lines. Python 3.11's ``print`` crashes when pytest replaces the standard output at the same time."""

    def msg(self, message: str) -> None:
        """Print a line."""
        output = sys.stdout
        output.write(f"{message}\n")

    debug = info = warning = error = critical = msg


structlog.configure(
    # Formatting a traceback with all its variables takes a tenth of a second.
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ],
    logger_factory=lambda *_: Output(),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``, which runs every combination of large tables and more generated examples."""
    parser.addoption("--full", action="store_true", help="run every combination and all generated examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``full`` unless ``--full`` is given. Start long tests first, so none runs last alone."""
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection(session: pytest.Session) -> None:
    """Suspend garbage collection: everything that collecting tests creates stays until the end."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt modules and tests from garbage collection, which would visit all of them again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Return whether ``--full`` was given: long sessions and property tests then run at full length."""
    return bool(pytestconfig.getoption("full"))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One configuration laid over another: mappings are merged, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def settings_for(upstream: str, folder: Path, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a proxy in front of an upstream."""
    base = {
        "store": {"url": f"sqlite:///{folder / 'compaction.db'}"},
        "upstreams": {"main": {"provider": "openai", "base_url": f"{upstream}/v1"}},
    }
    return loads(yaml.safe_dump(merged(base, overrides or {})).encode(), {})


@contextlib.contextmanager
def proxies(folders: Callable[[], Path]) -> Iterator[StartProxy]:
    """Starts proxies, and ends them all with the block."""
    with contextlib.ExitStack() as running:

        def start(
            upstream: str,
            overrides: Mapping[str, Any] | None = None,
            *,
            wrap: Callable[[ASGIApp], ASGIApp] | None = None,
        ) -> str:
            app: ASGIApp = Proxy(settings_for(upstream, folders(), overrides))
            return running.enter_context(serve(wrap(app) if wrap else app))

        yield start


@pytest.fixture(scope="session", autouse=True)
def _plain_environment() -> Iterator[None]:
    """Remove the machine's own proxies, keys, addresses, and certificates from the environment of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().endswith("_PROXY") or name.upper().startswith(("OPENAI_", "ANTHROPIC_", "SSL_CERT_")):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_enquiries() -> Iterator[None]:
    """Upstreams of tests expect the requests of the test alone; ``test_limit_discovery.py`` tests the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "reports_limits", lambda settings: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Building one for each client takes 16 ms, and nearly all clients here use loopback without TLS."""

    def once(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
        kept = functools.cache(create)
        return lambda **wanted: (create if "SSL_CERT_FILE" in os.environ else kept)(**wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", once(httpx.create_ssl_context))
        patch.setattr(default2, "create_ssl_context", once(httpx2.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_table_of_models_is_indexed_once() -> Iterator[None]:
    """Each proxy of a test would do it again, in 3 ms."""
    index, kept = profiles._index, {}

    def once(table: Mapping[str, Any], normalise: Any) -> dict[str, list[str]]:
        key = id(table), normalise
        if key not in kept:
            kept[key] = table, index(table, normalise)  # a table that is kept keeps its id
        return kept[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "_index", once)
        yield


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server for the tests of this process."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(redis_process: RedisServer) -> RedisServer:
    """An empty Redis server."""
    with redis_process.client() as client:
        client.flushall()
    return redis_process


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> list[single_flight.InFlight]:
    """The summaries of this process, from the first one on."""
    flights: list[single_flight.InFlight] = []

    class Seen(single_flight.InFlight):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            flights.append(self)

    monkeypatch.setattr(single_flight, "InFlight", Seen)
    return flights


@pytest.fixture
def waiting(flights: list[single_flight.InFlight]) -> Callable[[int], bool]:
    """Wait until a number of requests wait for a summary in this process. Return whether they do in time."""
    return lambda count: until(lambda: sum(flight.waiting for flight in flights) >= count)


@pytest.fixture
def start_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartProxy]:
    """Starts proxies that end with the test."""
    with proxies(lambda: tmp_path_factory.mktemp("proxy")) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartProxy]:
    """Starts proxies that end with the module, for tables of many small cases."""
    with proxies(lambda: tmp_path_factory.mktemp("proxy")) as start:
        yield start
