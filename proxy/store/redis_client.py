"""Connect to Redis or Valkey: one server, a Sentinel group, or a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import DataError, RedisError, ResponseError

from proxy.store.interface import Refused, StoreFailed

SENTINEL_PORT = 26379

CONNECT_SECONDS = 2.0  # timeout of a connection attempt
SOCKET_SECONDS = 5.0  # Timeout of a response. Reads of requests have a shorter one.
CONNECTIONS = 50  # Maximum connections to one server. Further calls wait for a free one.

PARAMETERS = (
    *("client_name", "db", "health_check_interval", "password", "socket_connect_timeout", "socket_keepalive"),
    *("socket_timeout", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile"),
    *("ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password", "username"),
)
"""Query parameters of an address. Others of redis-py change what the client returns, such as ``decode_responses``."""

SCANNED = 1_000  # keys that one step of a scan looks at


def connect(url: str) -> Any:
    """Return a client for an address. It connects at first use.

    ``redis://HOST:PORT/DB`` is one server, ``redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB`` the primary server that
    Sentinels name, and ``redis+cluster://HOST:PORT`` a cluster. With ``rediss``, connections use TLS. Query parameters
    are ``PARAMETERS``. Raises ``ValueError`` for a wrong address.

    The result is ``Any`` because the three clients of redis-py share methods, but no type.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": SOCKET_SECONDS,
        "socket_keepalive": True,
        # redis-py's defaults take four round trips before the first command of a connection. A slow server would never
        # answer a request in time after a connection was closed.
        "protocol": 2,
        "driver_info": None,
        # A server that restarted or was replaced has closed the idle connections.
        "retry": Retry(ConstantBackoff(0.01), 1),
    }
    scheme, _, rest = url.partition("://")
    plain, _, form = scheme.partition("+")
    match form:
        case "cluster":
            return RedisCluster.from_url(f"{plain}://{rest}", **options)
        case "sentinel":
            return _by_sentinels(plain, rest, options)
    pool = BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, timeout=SOCKET_SECONDS, **options)
    return Redis.from_pool(pool)


def _by_sentinels(scheme: str, rest: str, options: dict[str, Any]) -> Any:
    location, _, query = rest.partition("?")
    authority, _, path = location.partition("/")
    credentials, separator, hosts = authority.rpartition("@")
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("the address of Sentinels needs the name of the service: redis+sentinel://HOST:PORT/SERVICE")
    user, _, password = credentials.partition(":")
    sentinels = []
    for host in hosts.split(","):
        parts = urlsplit(f"//{host}")
        sentinels.append((parts.hostname or "", parts.port or SENTINEL_PORT))
    parameters: Any = parse_url(f"redis://?{query}")
    given: dict[str, Any] = {**options, **parameters, "ssl": scheme == "rediss"}
    if separator:
        given |= {"username": unquote(user) or None, "password": unquote(password) or None}
    make: Any = Sentinel  # redis-py doesn't annotate it
    group = make(sentinels, sentinel_kwargs={**options, "ssl": scheme == "rediss"})
    return group.master_for(service, db=int(database or 0), **given)


def check(url: str) -> None:
    """Raise ``ValueError`` if no connection can be made with an address. Don't connect, and show no values."""
    location, _, query = url.partition("?")
    if "@" in query and "@" not in location:
        raise ValueError("must have %3F in place of ? in the password")
    scheme = "rediss" if location.startswith("rediss") else "redis"
    for parameter, value in parse_qsl(query, keep_blank_values=True):
        if parameter not in PARAMETERS:
            raise ValueError(f"has an unknown parameter, {parameter}")
        if parameter.startswith("ssl_") and scheme == "redis":
            raise ValueError(f"has the parameter {parameter}, which needs rediss://")
        if not _fits(f"{scheme}://localhost?{parameter}={quote(value, safe='')}"):
            raise ValueError(f"has a wrong value for the parameter {parameter}")
    try:
        connect(url)
    except TypeError:
        raise ValueError("has a parameter that the client of clusters doesn't take") from None


def _fits(url: str) -> bool:
    try:
        pool: Any = BlockingConnectionPool.from_url(url)  # redis-py doesn't annotate it
        connection = pool.make_connection()
        if isinstance(connection, SSLConnection):
            with contextlib.suppress(OSError):  # a file may exist only where the server runs
                connection.ssl_context.get()
    except (RedisError, TypeError, ValueError):
        return False
    return True


async def close(client: Any) -> None:
    """Close the connections of a client, and those to its Sentinels."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in () if manager is None else manager.sentinels:
        await sentinel.aclose()


def unlink(pipe: Any, *keys: str | bytes) -> None:
    """Add the removal of keys to a pipeline. In a cluster, one server must have all of them."""
    # The cluster's pipeline has a method of this name that isn't one of a pipeline.
    pipe.execute_command("UNLINK", *keys)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Raise ``StoreFailed`` for an error of the server or of the connection to it."""
    try:
        yield
    except DataError as error:
        raise Refused(f"Redis: {type(error).__name__}") from error
    except (RedisError, OSError) as error:
        # The message may contain a key's name, which contains a tenant's.
        raise StoreFailed(f"Redis: {type(error).__name__}") from error


def refusals(results: Sequence[object]) -> None:
    """Raise ``Refused`` if the server doesn't take one of several writes, or its error if it can't take any now."""
    errors = [result for result in results if isinstance(result, Exception)]
    for error in errors:
        # An error about the server's state begins with a code, such as MISCONF or NOREPLICAS.
        if type(error) is not ResponseError or str(error).partition(" ")[0].isupper():
            raise error
    if errors:
        raise Refused(f"Redis: {type(errors[0]).__name__}")


def name(*parts: str) -> str:
    """Return the name of a key. No part can contain a colon, or a character with a meaning in patterns."""
    return ":".join(quote(part, safe="") for part in parts)


def parts(key: bytes) -> list[str]:
    return [unquote(part) for part in key.decode().split(":")]


async def matching(client: Any, pattern: str) -> AsyncIterator[list[bytes]]:
    """Yield the names of keys that match a pattern, in batches. Keys that others add meanwhile may be missing."""
    batch: list[bytes] = []
    async for key in client.scan_iter(match=pattern, count=SCANNED):
        batch.append(key)
        if len(batch) >= SCANNED:
            yield batch
            batch = []
    if batch:
        yield batch


async def values_of(client: Any, keys: list[Any]) -> list[bytes | None]:
    if not keys:
        return []
    # In a cluster, the keys are on several servers.
    read = client.mget_nonatomic if isinstance(client, RedisCluster) else client.mget
    found: list[bytes | None] = await read(keys)
    return found
