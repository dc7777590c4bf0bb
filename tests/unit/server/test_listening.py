"""Test the start of a server: its addresses, its settings, the lines it writes, and freed memory."""

import asyncio
import socket
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from structlog.testing import capture_logs

from proxy.access.admin import admin_link
from proxy.config import Loaded, Settings, read
from proxy.errors import ConfigurationError
from proxy.server import maintenance, run
from proxy.server.app import Proxy
from proxy.server.maintenance import Maintenance, malloc_trim
from proxy.server.run import Single, announce, bind, dashboard_address, log_start, serve_metrics
from proxy.store import open_store
from tests.kit.program import free_port


def settings(host: str = "127.0.0.1", **sections: object) -> Settings:
    return Settings.model_validate({"server": {"host": host}, "store": {"url": "sqlite://"}, **sections})


def test_a_port_in_use_names_the_line_of_the_file(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "config.yaml"
    file.write_text(f"store: {{url: sqlite://}}\nserver:\n  port: {port}\n")
    loaded = read(file, {})
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigurationError) as caught:
        bind(loaded.settings, port, loaded)
    assert caught.value.message == (
        f"{file}:3: server.port: cannot listen on 127.0.0.1:{port} (address already in use). "
        f"Fix: stop the other program, or use another port: --port {port + 1}"
    )


def test_a_server_that_takes_the_port_during_the_start_gives_one_line() -> None:
    own = settings()
    bound = bind(own, 0, None)
    port = bound[0].getsockname()[1]
    ready: list[None] = []
    single = Single(uvicorn.Config(Proxy(own), port=port, log_config=None), lambda: ready.append(None))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))  # possible while nobody listens
        other.listen()
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port} "):
            single.run(bound)
    bound[0].close()
    assert not ready


@pytest.mark.parametrize(
    ("host", "sections", "terminal", "shown"),
    [
        ("127.0.0.1", {}, True, "Dashboard: http://127.0.0.1:{port}/compaction/?token={token}\n"),
        (
            "127.0.0.1",
            {},
            False,
            "Dashboard: http://127.0.0.1:{port}/compaction/ (a link that works once is in {file})\n",
        ),
        ("127.0.0.1", {"admin": {}}, False, "Dashboard: http://127.0.0.1:{port}/compaction/\n"),
        ("0.0.0.0", {}, True, "Dashboard: http://127.0.0.1:{port}/compaction/\n"),  # noqa: S104 - a setting under test
        ("0.0.0.0", {}, False, ""),  # noqa: S104
    ],
)
def test_only_a_terminal_gets_the_token(
    host: str,
    sections: dict[str, object],
    terminal: bool,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = settings(host, **sections)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    bound = bind(own, 0, None)
    port = bound[0].getsockname()[1]
    bound[0].close()
    page = dashboard_address(own, port)
    with admin_link(own, {}, page) as link:
        announce(own, page, link)
        token, file = ("", "") if link is None else (link.address.partition("token=")[2], str(link.file))
    assert capsys.readouterr().out == shown.format(port=port, token=token, file=file)


def test_metrics_are_served_on_their_own_address(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    file = tmp_path / "config.yaml"
    file.write_text(f"metrics:\n  listen: {address}\nstore: {{url: sqlite://}}\n")
    loaded = read(file, {})
    serve_metrics(loaded.settings, loaded)
    assert "compaction_requests_total" in httpx.get(f"http://{address}/metrics", trust_env=False).text
    assert "/metrics" not in [getattr(route, "path", None) for route in Proxy(loaded.settings).routes]
    with pytest.raises(ConfigurationError) as caught:  # the port is in use now
        serve_metrics(loaded.settings, loaded)
    assert caught.value.message.startswith(f"{file}:2: metrics.listen: cannot listen on {address} (address")
    assert "Fix: " in caught.value.message
    serve_metrics(Settings(), None)


@pytest.mark.parametrize("listen", ["9090", '"9090"', "localhost", "127.0.0.1:0", "127.0.0.1:70000", ":9090", "a b:1"])
def test_other_addresses_name_the_line(listen: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"metrics:\n  listen: {listen}\n")
    with pytest.raises(ConfigurationError) as caught:
        read(file, {})
    assert f"{file}:2: metrics.listen: must be an address and a port" in caught.value.message
    assert "Fix: listen: 127.0.0.1:9090" in caught.value.message


def test_threads_get_the_interpreter_lock_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's own interval, a busy event loop keeps the threads of the store waiting for seconds."""
    monkeypatch.setattr(run, "Proxy", lambda *_: None)
    monkeypatch.setattr(run, "exempt_from_collection", lambda: None)
    before = sys.getswitchinterval()
    try:
        run._application(Settings(), None)
        assert sys.getswitchinterval() == pytest.approx(run.SWITCH_SECONDS)
    finally:
        sys.setswitchinterval(before)
    assert before > run.SWITCH_SECONDS


def loaded(folder: Path, key: str, window: int) -> Loaded:
    file = folder / "config.yaml"
    file.write_text(
        f"store: {{url: 'sqlite:///{folder}/store.db'}}\n"
        f"upstreams: {{main: {{base_url: 'https://llm.example:8443/v1', api_key: {key}}}}}\n"
        f"models: [{{match: '*', upstream: main, profile: {{context_window: {window}}}}}]\n"
    )
    return read(file, {})


def test_the_line_has_hosts_and_no_keys(tmp_path: Path) -> None:
    first = loaded(tmp_path, "sk-canary", 9_000)
    with capture_logs() as logs:
        log_start(first.settings, first, "127.0.0.1:1", 2, 3)
    (line,) = logs
    assert line["upstreams"] == {"main": "llm.example:8443"}
    assert line["policies"] == {"enforce": 1}
    assert (line["workers"], line["warnings"], line["teams"]) == (2, 3, 0)
    assert "sk-canary" not in repr(line)


PIECE = 60_000
"""Bytes: below what the C library takes from the system piece by piece."""

PIECES = 1_500


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(maintenance._malloc_trim() is None, reason="this C library gives back what it wants to")
def test_what_was_freed_is_given_back() -> None:
    before = resident()
    pieces = [b"x" * (PIECE + number) for number in range(PIECES)]
    last = pieces.pop()  # The last piece follows all others, so the C library can't simply truncate the heap.
    held = resident()
    assert held - before > 0.8 * PIECE * PIECES
    pieces.clear()
    malloc_trim()
    assert resident() - before < 0.2 * PIECE * PIECES
    assert last


def test_it_is_done_now_and_then_while_the_proxy_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = threading.Event()
    monkeypatch.setattr("proxy.server.maintenance.malloc_trim", given.set)

    async def test() -> None:
        store = open_store(f"sqlite:///{tmp_path}/store.db")
        upkeep = Maintenance(store, [])
        upkeep.start()
        assert await asyncio.to_thread(given.wait, 10)
        await upkeep.aclose()
        await store.aclose()

    asyncio.run(test())
