"""Several workers: no connection is lost with a worker that fails."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

from tests.kit.program import Program, program, write_config
from tests.kit.waiting import until


@contextlib.contextmanager
def two_workers(folder: Path) -> Iterator[Program]:
    """Run the server with two workers that get connections."""
    settings = {"server": {"host": "localhost"}, "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1"}}}
    with program(write_config(settings, folder), "--workers", "2") as running:
        assert until(lambda: "Dashboard: " in running.log.read_text(), 120)
        pair = workers(running)
        try:
            yield running
        finally:
            ended = running.process.poll() is not None
            for worker in pair:
                with contextlib.suppress(psutil.Error):
                    worker.resume()
                    if ended:
                        worker.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with two_workers(tmp_path_factory.mktemp("workers")) as started:
        yield started


@pytest.fixture
def closing(running: Program) -> Iterator[contextlib.ExitStack]:
    """Close connections, and wait until the server has noticed."""
    with contextlib.ExitStack() as stack:
        yield stack
    kept = 1  # by the client that waited for the server
    assert until(lambda: sum(len(ports(running, worker)) for worker in workers(running)) <= kept)


def workers(running: Program) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(running.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def of(running: Program, worker: psutil.Process, lines: list[Line]) -> list[Line]:
    """Return the connections that a worker has."""
    local_ports = ports(running, worker)
    return [line for line in lines if line.local_port in local_ports]


def ports(running: Program, worker: psutil.Process) -> set[int]:
    """Return the ports of a worker's clients."""
    open_ones = [one for one in worker.net_connections("tcp") if one.laddr.port == running.port and one.raddr]
    return {one.raddr.port for one in open_ones}


def connect(running: Program, count: int, closing: contextlib.ExitStack, host: str = "127.0.0.1") -> list[Line]:
    """Open connections at once."""
    lines = [Line(host, running.port) for _ in range(count)]
    for line in lines:
        closing.callback(line.close)
    return lines


class Line(HTTPConnection):
    """A connection that is open, or about to be."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, timeout=60)
        self.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.sock.connect((host, port))
        self.sock.settimeout(60)
        self.local_port = self.sock.getsockname()[1]

    def alive(self) -> bool:
        self.request("GET", "/livez")
        answer = self.getresponse()
        return (answer.status, answer.read()) == (200, b"alive\n")


def test_a_killed_worker_takes_only_its_own_connections(running: Program, closing: contextlib.ExitStack) -> None:
    victim, survivor = workers(running)
    lines: list[Line] = []

    def shared() -> bool:
        lines.extend(connect(running, 8, closing))
        return all(line.alive() for line in lines) and 0 < len(of(running, survivor, lines)) < len(lines)

    assert until(shared)
    kept = of(running, survivor, lines)
    victim.kill()
    # There may be no replacement yet.
    assert all(line.alive() for line in [*kept, *connect(running, 8, closing)])

    def gets_connections() -> bool:
        (line,) = connect(running, 1, closing)
        assert line.alive()
        return any(
            of(running, worker, [line]) for worker in workers(running) if worker.pid not in (victim.pid, survivor.pid)
        )

    assert until(gets_connections, 120)


def test_a_hung_worker_gets_no_connections_until_it_continues(running: Program, closing: contextlib.ExitStack) -> None:
    hung, other = workers(running)
    hung.suspend()
    lines = connect(running, 20, closing)
    assert all(line.alive() for line in lines)
    assert of(running, other, lines) == lines
    hung.resume()

    def gets_connections() -> bool:
        (line,) = connect(running, 1, closing)
        assert line.alive()
        return bool(of(running, hung, [line]))

    assert until(gets_connections)


def test_connections_wait_while_all_workers_hang(running: Program, closing: contextlib.ExitStack) -> None:
    """There are more than the buffers between the processes can take."""
    both = workers(running)
    for worker in both:
        worker.suspend()
    lines = connect(running, 600, closing)
    for worker in both:
        worker.resume()
    assert all(line.alive() for line in lines)


@pytest.mark.full
def test_workers_accept_on_their_own_when_their_parent_was_killed(tmp_path: Path) -> None:
    with two_workers(tmp_path) as running, contextlib.ExitStack() as closing:
        pair = workers(running)
        old: list[Line] = []

        def shared() -> bool:
            old.extend(connect(running, 8, closing))
            return all(line.alive() for line in old) and all(of(running, worker, old) for worker in pair)

        assert until(shared)
        # Both workers report a connection that has ended, and the parent can't read it.
        psutil.Process(running.process.pid).suspend()
        leaving = [of(running, worker, old)[0] for worker in pair]
        for line in leaving:
            old.remove(line)
            line.close()
        assert until(lambda: not any(of(running, worker, leaving) for worker in pair))
        running.process.kill()
        running.process.wait(30)
        assert all(line.alive() for line in [*old, *connect(running, 16, closing)])
        for worker in pair:
            worker.terminate()
        psutil.wait_procs(pair, 30)
        assert running.refuses()
