"""Test the addresses that a server binds, and the line with the dashboard's address."""

import socket
import sys
from pathlib import Path

import pytest
import uvicorn

from proxy.access.admin import admin_link
from proxy.config import read
from proxy.config.settings import Settings
from proxy.errors import ConfigurationError
from proxy.server.app import Proxy
from proxy.server.run import Single, announce, bind, dashboard_address
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
