"""The tests of `check --live`: what the proxy needs to run."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

import aiohttp

from proxy.config import Settings
from proxy.config.checks import named_models
from proxy.config.upstreams import UpstreamSettings
from proxy.errors import ConfigurationError, ProxyError
from proxy.limits.profiles import Profiles
from proxy.litellm_package import TESTED, untested_version
from proxy.pipeline.runtime import require
from proxy.records import open_records
from proxy.store import StoreFailed, open_store, store_file
from proxy.upstream.registry import Upstreams

SECONDS = 10.0  # timeout of a request to an upstream

CLOCK_SECONDS = 60.0
"""Difference between the clocks here and at an upstream that is reported. Keys and entries expire by the clock."""

FILES = 4_096  # open files that a server with 1,000 concurrent requests needs, with some to spare

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test. ``fix`` says what to do unless the state is ``ok``."""

    state: State
    about: str
    result: str
    fix: str = ""

    @property
    def text(self) -> str:
        mark = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}[self.state]
        return f"{mark}  {self.about}: {self.result}" + (f". Fix: {self.fix}" if self.fix else "")


def examined(settings: Settings) -> list[Finding]:
    """Run all tests of a configuration. Sends one small request to each upstream."""

    async def connected() -> list[Finding]:
        upstreams = [await _upstream(settings, name, upstream) for name, upstream in settings.upstreams.items()]
        return [await _store(settings), *(finding for findings in upstreams for finding in findings)]

    return [*asyncio.run(connected()), *_limits(settings), *_files(), _litellm()]


async def _store(settings: Settings) -> Finding:
    path, kind = store_file(settings.store.url), settings.store.kind
    about = {"sqlite": f"store {path}", "memory": "store in memory", "redis": "store on Redis"}[kind]
    url, keys = settings.store.url, settings.store.encryption.keys
    try:
        async with aclosing(open_store(url, keys)) as store, aclosing(open_records(url, keys)) as records:
            await store.put("", "check", "test", b"test", 60)
            await store.replace("", "check", "test", b"test", b"", 0)
            await records.write([], 60)
    except (StoreFailed, OSError) as error:
        fix = "make the folder writable for the proxy's user, or set store.url to another file"
        if kind == "redis":
            fix = "start the server, or correct the address and the password in store.url"
        elif "malformed" in str(error) or "not a database" in str(error):
            fix = "the file is damaged: start the proxy, which moves it aside, or move it away and restore a backup"
        return Finding("failed", about, str(error), fix)
    unread = "" if kind != "memory" else "; summaries and records are lost when the proxy stops"
    return Finding("ok", about, f"writable{unread}")


async def _upstream(settings: Settings, name: str, upstream: UpstreamSettings) -> list[Finding]:
    about = f"upstream {name}"
    async with aclosing(Upstreams(settings.upstreams, None)) as upstreams:
        try:
            relay = await upstreams.relay(name)
            headers = relay.headers([], None, anthropic=upstream.provider == "anthropic")
            answer = await relay.request("GET", relay.url("/models", ""), headers, None, SECONDS)
        except (ProxyError, aiohttp.ClientError, TimeoutError) as error:
            # The next sentences of the message are advice for callers.
            reason = error.message.split(". ")[0].rstrip(".") if isinstance(error, ProxyError) else type(error).__name__
            fix = f"check upstreams.{name}.base_url, DNS, TLS, and the network"
            if "SSL_CERT_FILE" in reason:
                fix = "set the environment variable SSL_CERT_FILE to a file with the certificate of the CA, and restart"
            return [Finding("failed", about, reason, fix)]
        try:
            return list(_judged(about, name, upstream, answer.status, dict(answer.headers)))
        finally:
            await answer.close()


def _judged(
    about: str, name: str, upstream: UpstreamSettings, status: int, headers: dict[str, str]
) -> Iterator[Finding]:
    if status in (401, 403) and upstream.api_key is not None:
        yield Finding("failed", about, f"refuses the key (status {status})", f"set a valid upstreams.{name}.api_key")
    elif status in (401, 403):
        yield Finding("ok", about, "reachable; it needs the caller's key")
    elif status >= 500:
        yield Finding("warning", about, f"reachable, but returns status {status}", "look at the upstream's own status")
    else:
        key = "no key" if upstream.api_key is None else "the key is accepted"
        yield Finding("ok", about, f"reachable, {key}" if status < 400 else f"reachable (status {status} for /models)")
    if (sent := headers.get("date")) is not None:
        apart = abs(time.time() - parsedate_to_datetime(sent).timestamp())
        if apart > CLOCK_SECONDS:
            yield Finding("warning", "clock", f"differs from {name}'s by {apart:.0f} s", "synchronize it, with NTP")


def _limits(settings: Settings) -> Iterator[Finding]:
    try:
        require(settings, Profiles())
    except ConfigurationError as error:
        yield Finding("failed", "files for counting", error.message)
        return
    for _, _, profile in named_models(settings):
        if profile.has_limit:
            most = profile.max_input_tokens or profile.context_window
            yield Finding("ok", f"model {profile.model}", f"accepts {most:,} input tokens")
        else:
            fix = "add its size in tokens, as in profile: {context_window: 128000}"
            yield Finding("warning", f"model {profile.model}", "its limits are unknown until it refuses a request", fix)


def _files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < FILES:
        fix = f"raise it, for example with ulimit -Hn {FILES}, or LimitNOFILE in a systemd unit"
        yield Finding("warning", "open files", f"the limit is {most:,}", fix)
    else:
        yield Finding("ok", "open files", "no limit" if most == resource.RLIM_INFINITY else f"the limit is {most:,}")


def _litellm() -> Finding:
    if (installed := untested_version()) is None:
        return Finding("ok", "translation", f"LiteLLM {TESTED} is installed")
    fix = f"pip install 'litellm=={TESTED}.*'"
    return Finding("warning", "translation", f"LiteLLM {installed} is installed, but {TESTED} was tested", fix)
