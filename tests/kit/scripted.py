"""A proxy in front of the stand-in upstream, and an official client in front of the proxy."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from starlette.types import ASGIApp

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.messages import assistant, system, user, words
from tests.kit.program import write_config
from tests.kit.upstream import StandIn

if TYPE_CHECKING:
    import openai

PROFILE = {"context_window": 16_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}


def key_hash(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@contextlib.contextmanager
def behind(
    upstream: StandIn | ASGIApp,
    folder: Path,
    *,
    profile: Mapping[str, Any] | None = PROFILE,
    policy: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Iterator[str]:
    """The URL of a proxy in front of an upstream. ``sections`` replace those of the configuration."""
    with serve(upstream.app if isinstance(upstream, StandIn) else upstream) as url:
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", **({"profile": dict(profile)} if profile else {})}],
            "policies": {"default": dict(policy or {})},
        }
        with proxied({**settings, **sections}, folder) as entrance:
            yield entrance


@contextlib.contextmanager
def protected(
    upstream: StandIn | ASGIApp, folder: Path, window: int, policy: Mapping[str, Any] | None = None
) -> Iterator[openai.OpenAI]:
    """A client of a proxy that knows the window of the upstream behind it."""
    limits = {"context_window": window, "max_input_tokens": window, "max_output_tokens": window // 4}
    profile = {**limits, "tokenizer": "o200k_base"}
    with behind(upstream, folder, profile=profile, policy=policy) as url, client(url) as caller:
        yield caller


@contextlib.contextmanager
def proxied(settings: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The URL of a proxy with these settings, as YAML has them; its store is in the folder unless they name one."""
    with serve(Proxy(load(write_config(settings, folder), {}))) as url:
        yield url


@contextlib.contextmanager
def client(url: str, key: str = "sk-client") -> Iterator[openai.OpenAI]:
    """Return the official client without retries, so that tests see every rejection."""
    import openai  # which takes a second, and most tests need no client

    with httpx.Client(trust_env=False) as direct:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120, http_client=direct)


def chat(count: int, size: int) -> list[Any]:
    """A conversation of ``count`` user messages and answers of ``size`` tokens each, and a last short question."""
    messages = [system()]
    for number in range(count):
        messages.append(user(f"Question {number}: " + words(size, f"q{number}x")))
        messages.append(assistant(f"Answer {number}: " + words(size, f"a{number}x")))
    return [*messages, user("What now?")]


def common_prefix(previous: list[bytes], current: list[bytes], tokens: Mapping[bytes, int]) -> int:
    """Tokens of the messages that two consecutive prompts begin with."""
    shared = 0
    for before, after in zip(previous, current, strict=False):
        if before != after:
            break
        shared += tokens[before]
    return shared
