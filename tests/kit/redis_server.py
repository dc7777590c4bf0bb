"""A Redis server for tests, on loopback and without files that outlive it."""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.kit.program import free_port
from tests.kit.waiting import until

# Debian's server is the same program as its checker of backups, which a smaller package has.
PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server") or shutil.which("redis-check-rdb")

MISSING = "needs Redis: apt-get install redis-tools"


class RedisServer:
    """A running server. ``stop`` and ``start`` are for tests of failures.

    Its data is lost then, unless ``options`` has ``--appendonly yes``.
    """

    def __init__(self, folder: Path, options: Sequence[str], config: Path | None, password: str) -> None:
        self.port = free_port()
        self.url = f"redis://:{password}@127.0.0.1:{self.port}/0" if password else f"redis://127.0.0.1:{self.port}/0"
        self._config = [] if config is None else [str(config)]
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        program = self._folder / "redis-server"  # the name decides what the program does
        if not program.exists():
            program.symlink_to(str(PROGRAM))
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        command = [str(program), *self._config, *where, *self._options]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        assert until(self._answers), (self._folder / "redis.log").read_text()

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def client(self) -> Redis:
        """Return a client. Close it."""
        return Redis.from_url(self.url)

    def raw(self) -> bytes:
        """Return the names and the values of all keys."""
        with self.client() as client:
            read: dict[bytes, Callable[[bytes], Any]] = {
                b"string": client.get,
                b"hash": client.hgetall,
                b"set": client.smembers,
                b"zset": lambda key: client.zrange(key, 0, -1),
            }
            return b"\n".join(
                part for key in client.scan_iter() for part in (key, *_parts(read[client.type(key)](key)))
            )

    def _answers(self) -> bool:
        with self.client() as client, contextlib.suppress(RedisError):
            return bool(client.ping())
        return False


def _parts(value: Any) -> list[bytes]:
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return [value] if isinstance(value, bytes) else list(value or ())


@contextlib.contextmanager
def redis_server(
    folder: Path, options: Sequence[str] = (), *, config: Path | None = None, password: str = ""
) -> Iterator[RedisServer]:
    """Run a server as long as the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, options, config, password)
    server.start()
    try:
        yield server
    finally:
        server.stop()
