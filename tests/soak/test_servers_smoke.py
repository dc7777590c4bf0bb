"""The counts of the check of real servers, with the stand-in instead of a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import openai
import pytest
from rich.console import Console

from proxy.server.loopback import serve
from soak.servers.command import ALONE, check
from soak.servers.conversing import Habit, Tally, converse
from soak.servers.engines import MODEL
from soak.servers.table import raw, show
from soak.servers.tap import Tap
from tests.kit.upstream import Reply, StandIn

WINDOW = 2_048


@dataclass(frozen=True)
class Stand:
    """An engine that needs no environment."""

    upstream: StandIn

    @contextlib.contextmanager
    def serve(self, folder: Path, window: int) -> Iterator[int]:
        with serve(self.upstream.app) as url:
            yield urlsplit(url).port or 0


@contextlib.contextmanager
def raw_server(answer: bytes, *, closes: bool) -> Iterator[int]:
    """Serve one response unchanged. Then close the connection, or wait until the client does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(30)
                connection.recv(65_536)
                connection.sendall(answer)
                if not closes:
                    connection.recv(65_536)

        thread = threading.Thread(target=once)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join(30)


def asked_once(server: int, habit: Habit) -> tuple[Tap, Tally]:
    tap, seen = Tap(server), Tally()
    with tap.serve() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="sk", max_retries=0, timeout=30) as client:
        converse(client, habit, seed=1, words=10, tally=seen)
    return tap, seen


@pytest.mark.full
def test_overflows_are_counted_without_a_proxy_and_gone_behind_it(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, responder=lambda _: Reply(content="A word or two."), model=MODEL)
    rows = check("stand-in", Stand(upstream), WINDOW, 1.2, [Habit("agent", False, 64)], tmp_path)

    alone, *protected = rows
    assert alone.setting == ALONE
    assert alone.upstream.refused == alone.seen.errors > 0
    assert alone.met is None
    assert [row.met for row in protected] == [True] * len(protected)
    assert all(row.seen.compacted and not row.seen.errors for row in protected)
    correct, too_large = protected[0], protected[1]
    assert correct.upstream.refused == 0
    assert too_large.upstream.refused == too_large.seen.retries > 0

    printed = StringIO()
    show(rows, WINDOW, Console(file=printed, width=200))
    assert "context_length_exceeded" in printed.getvalue()
    assert msgspec.json.encode(raw(rows))


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": null}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("answer", "closes", "server", "client"),
    [
        (STREAM + b"0\r\n\r\n", False, "empty", "empty"),
        (STREAM + b"%x\r\n%s\r\n0\r\n\r\n" % (len(ROLE), ROLE), False, "broken", "broken"),
        (STREAM + b"2\r\n: \r\n", True, "torn", "errors"),
        (b"", True, "torn", "errors"),
    ],
    ids=["nothing", "no reason", "torn", "no answer"],
)
def test_failed_responses_are_counted_by_kind(answer: bytes, closes: bool, server: str, client: str) -> None:
    with raw_server(answer, closes=closes) as port:
        tap, seen = asked_once(port, Habit("chat", True, None))

    kinds = ("refused", "empty", "broken", "torn")
    assert {kind: getattr(tap.counts, kind) for kind in kinds} == {kind: int(kind == server) for kind in kinds}
    assert getattr(seen, client) >= 1
    assert not seen.fine
