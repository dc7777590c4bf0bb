"""Hold ten thousand streams open, and measure their memory and the delay of other requests."""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
import psutil
import yaml
from rich.console import Console
from rich.table import Table

from bench.servers import free_port
from soak.processes import running

CHUNK = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "word "}, "finish_reason": None}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

OPENED_AT_ONCE = 200

MOST_GAP = 20.0
"""Milliseconds. The target for the 99th percentile with a thousand streams."""

PROBED_EVERY = 0.05


@click.command()
@click.option("--streams", default=10_000, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Seconds to hold all of them open.")
@click.option("--every", default=30.0, show_default=True, help="Seconds between two events of a stream.")
def main(streams: int, seconds: float, every: float) -> None:
    """Open the streams, hold them, and end them. The exit status is 1 if one was incomplete."""
    needed = 2 * streams + 500
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(most, needed)))
    except (ValueError, PermissionError):
        sys.exit(f"{streams} streams need {needed} open files, but the limit is {most}. Fix: ulimit -Hn {needed}")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(_run(Path(folder), streams, seconds, every)))


async def _run(folder: Path, streams: int, seconds: float, every: float) -> int:
    upstream = _Upstream(every)
    server = await asyncio.start_server(upstream.answer, "127.0.0.1", 0, backlog=4_096)
    port = server.sockets[0].getsockname()[1]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(_settings(folder, port, streams)))
    entrance = free_port()
    url = f"http://127.0.0.1:{entrance}"
    command = [sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", str(entrance)]
    proxy = running(command, folder / "proxy.log", f"{url}/livez", 60)
    pid = await asyncio.to_thread(proxy.__enter__)
    try:
        process = psutil.Process(pid)
        await _ask(entrance)  # The first request loads everything that the proxy loads once.
        before = process.memory_info().rss
        idle = await _probed(url, 5)
        begun = time.monotonic()
        places = asyncio.Semaphore(OPENED_AT_ONCE)
        opened = await asyncio.gather(*(_open(entrance, places) for _ in range(streams)))
        opening = time.monotonic() - begun
        held = await _probed(url, seconds)
        after = process.memory_info().rss
        upstream.ending.set()
        whole = sum(await asyncio.gather(*(_rest(reader, writer) for reader, writer in opened)))
    finally:
        await asyncio.to_thread(proxy.__exit__, None, None, None)
        server.close()
    table = Table(f"{streams:,} streams, one event in {every:g} s each", "result", "target")
    table.add_row("complete", f"{whole:,}", f"{streams:,}")
    table.add_row("opened a second", f"{streams / opening:,.0f}", "")
    table.add_row("kB of memory a stream", f"{(after - before) / streams / 1e3:.0f}", "")
    table.add_row("health before, ms, median and p99", _two(idle), "")
    table.add_row("health meanwhile, ms, median and p99", _two(held), f"p99 under {MOST_GAP:g} with 1,000 streams")
    Console(width=110).print(table)
    return 0 if whole == streams else 1


class _Upstream:
    """Respond to each request with a stream that continues until ``ending`` is set."""

    def __init__(self, every: float) -> None:
        self.ending = asyncio.Event()
        self._every = every

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request on a connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(_event(CHUNK))
        while body["messages"][0]["content"] == "stay" and not self.ending.is_set():
            try:
                async with asyncio.timeout(self._every):
                    await self.ending.wait()
            except TimeoutError:
                writer.write(_event(CHUNK))
                await writer.drain()
        writer.write(_event(END) + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()


async def _open(port: int, places: asyncio.Semaphore) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream, and wait for its first event."""
    async with places:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request("stay"))
        await reader.readuntil(b"word ")
        return reader, writer


async def _rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Read the rest of a stream. Return whether it's complete."""
    try:
        async with asyncio.timeout(120):
            await reader.readuntil(b"data: [DONE]\n\n")
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.close()
    return True


async def _ask(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("go"))
    await _rest(reader, writer)


async def _probed(url: str, seconds: float) -> list[float]:
    """Send health checks for ``seconds``. Return their latencies in milliseconds."""
    taken = []
    until = time.monotonic() + seconds
    async with aiohttp.ClientSession(trust_env=False) as http:
        while time.monotonic() < until:
            begun = time.perf_counter()
            async with http.get(f"{url}/livez") as answer:
                await answer.read()
            taken.append((time.perf_counter() - begun) * 1e3)
            await asyncio.sleep(PROBED_EVERY)
    return taken


def _request(content: str) -> bytes:
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%s" % (len(body), body)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _two(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.1f}, {statistics.quantiles(figures, n=100)[98]:.1f}"


def _settings(folder: Path, port: int, streams: int) -> dict[str, Any]:
    return {
        "server": {"max_concurrent": streams + 100, "deadline": 3_600},
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "upstreams": {"main": {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "sk-upstream"}},
        "models": [{"match": "*", "upstream": "main", "profile": {"context_window": 16_000}}],
    }
