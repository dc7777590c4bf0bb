"""A proxy in front of the stand-in upstream, and an official client in front of the proxy."""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from proxy.config import load
from proxy.demo.counting import first_tokens
from proxy.demo.serving import serve
from proxy.demo.upstream import StandIn
from proxy.server.app import create_app

ROOT = Path(__file__).parents[2]


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
def proxied(settings: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The URL of a proxy with these settings, as YAML has them; its store is in the folder unless they name one."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"store": {"url": f"sqlite:///{folder}/store.db"}, **settings}))
    with serve(create_app(load(file, {}))) as url:
        yield url


@contextlib.contextmanager
def client(url: str, key: str = "sk-client") -> Iterator[openai.OpenAI]:
    """Return the official client without retries, so that tests see every rejection."""
    with httpx.Client(trust_env=False) as direct:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120, http_client=direct)


@contextlib.contextmanager
def served(settings: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The same as ``proxied``, but by the command ``serve``, in a process of its own."""
    file = folder / "served.yaml"
    file.write_text(yaml.safe_dump({"store": {"url": f"sqlite:///{folder}/store.db"}, **settings}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_server(f"http://127.0.0.1:{port}/livez", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_for_server(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server in a process answers."""
    with httpx.Client(trust_env=False) as http:
        for _ in range(600):
            assert process.poll() is None, "the server ended by itself"
            with contextlib.suppress(httpx.TransportError):
                if http.get(url).status_code == 200:
                    return
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@functools.cache
def words(count: int, seed: str = "word") -> str:
    """``count`` tokens of text, of another wording for each seed."""
    return first_tokens(" ".join(f"{seed}{number % 10}" for number in range(count)), count)


def chat(count: int, size: int) -> list[Any]:
    """A conversation of ``count`` user messages and answers of ``size`` tokens each, and a last short question."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(count):
        messages.append({"role": "user", "content": f"Question {number}: " + words(size, f"q{number}x")})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + words(size, f"a{number}x")})
    return [*messages, {"role": "user", "content": "What now?"}]


def common_prefix(previous: list[bytes], current: list[bytes], tokens: Mapping[bytes, int]) -> int:
    """Tokens of the messages that two consecutive prompts begin with."""
    shared = 0
    for before, after in zip(previous, current, strict=False):
        if before != after:
            break
        shared += tokens[before]
    return shared
