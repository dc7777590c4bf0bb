"""A proxy in front of the stand-in upstream, and an official client in front of the proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from proxy.app import create_app
from proxy.config import load
from proxy.demo.serving import serve
from proxy.demo.upstream import StandIn


@contextlib.contextmanager
def protected(
    upstream: StandIn, folder: Path, window: int, policy: Mapping[str, Any] | None = None
) -> Iterator[openai.OpenAI]:
    """A client of a proxy in front of the upstream; the proxy knows the upstream's window."""
    profile = {"context_window": window, "max_input_tokens": window, "max_output_tokens": window // 4}
    with serve(upstream.app) as url:
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": {**profile, "tokenizer": "o200k_base"}}],
            "policies": {"default": dict(policy or {})},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        with serve(create_app(load(file, {}))) as entrance, client(entrance) as caller:
            yield caller


@contextlib.contextmanager
def client(url: str) -> Iterator[openai.OpenAI]:
    """The official client, which never tries again by itself: every refusal shall be seen."""
    with httpx.Client(trust_env=False) as direct:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="sk-client", max_retries=0, timeout=120, http_client=direct)


def common_prefix(previous: list[bytes], current: list[bytes], tokens: Mapping[bytes, int]) -> int:
    """Tokens of the messages that two consecutive prompts begin with."""
    shared = 0
    for before, after in zip(previous, current, strict=False):
        if before != after:
            break
        shared += tokens[before]
    return shared
