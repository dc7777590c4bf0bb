"""A real LiteLLM proxy whose guardrail asks the proxy to compact, in front of a strict stand-in of a model."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from proxy.config import load
from proxy.demo.agent import AGENTS
from proxy.demo.script import decide
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.upstream import EveryApi

PROGRAM = os.environ.get("LITELLM_PROXY", "")
WINDOW = 128_000
COMPACTED = 12_000
"""The window by which the proxy compacts what LiteLLM sends: all but the system's, the assistant's, and the last."""

MASTER = "sk-gateway"

STARTS = 400
"""Seconds that LiteLLM may take to start. A busy machine needs more than 100."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PROGRAM,
        reason="no LITELLM_PROXY. Fix: python3 -m venv /tmp/gateway && /tmp/gateway/bin/pip install --no-deps "
        "-r .ci/gateway.lock && export LITELLM_PROXY=/tmp/gateway/bin/litellm",
    ),
]


@contextlib.contextmanager
def gateway(folder: Path, model: str, compressor: str) -> Iterator[str]:
    """Run LiteLLM's proxy in front of ``model``, with ``compressor`` behind its guardrail."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    guardrail = {
        "guardrail": "headroom",
        "mode": "pre_call",
        "default_on": True,
        "api_base": compressor,
        "model": "agent",
        "unreachable_fallback": "fail_open",
    }
    configuration = {
        "model_list": [
            {
                "model_name": "agent",
                "litellm_params": {"model": "openai/gpt-4o-mini", "api_base": f"{model}/v1", "api_key": "sk-model"},
            }
        ],
        "guardrails": [{"guardrail_name": "compaction", "litellm_params": guardrail}],
        "general_settings": {"master_key": MASTER},
    }
    path = folder / "litellm.yaml"
    path.write_text(yaml.safe_dump(configuration))
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*", "PYTHONPATH": ""}
    command = [PROGRAM, "--config", str(path), "--port", str(port), "--host", "127.0.0.1", "--telemetry", "False"]
    with (folder / "litellm.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=folder)
        try:
            address = f"http://127.0.0.1:{port}"
            end = time.monotonic() + STARTS
            while not alive(address):
                running = process.poll() is None and time.monotonic() < end
                assert running, (folder / "litellm.log").read_text()[-3000:]
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def alive(address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{address}/health/liveliness", trust_env=False).status_code == 200
    return False


def compressor(folder: Path) -> Path:
    configuration = {
        "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-unused"}},
        "models": [{"match": "agent", "upstream": "main", "profile": {"context_window": COMPACTED}}],
        "store": {"url": f"sqlite:///{folder / 'store.db'}"},
    }
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(configuration))
    return path


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_sessions_fit_behind_litellm(tmp_path: Path, api: str) -> None:
    """Every second turn streams. The stand-in refuses what doesn't fit, and calls without their results."""
    model = EveryApi(window=WINDOW, responder=decide)
    with (
        serve(Proxy(load(compressor(tmp_path), {}))) as compressing,
        serve(model.app) as upstream,
        gateway(tmp_path, upstream, compressing) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER, max_retries=0, timeout=60) as client,
    ):
        agent = AGENTS[api](client, "agent")
        session = agent.run(60, lambda: None)
    assert session.error is None
    assert session.turns == 60
    assert model.faults == []
    assert len(model.conversations) == 60
    last = model.conversations[-1].body["messages"]
    came = json.dumps(agent.messages[: len(last)]) if api == "chat" else json.dumps(agent.messages)
    print(f"{api}: {len(json.dumps(last)):,} of {len(came):,} bytes")
    assert len(json.dumps(last)) < 0.7 * len(came)
    if api == "chat":
        assert [one["role"] for one in last] == [one["role"] for one in agent.messages[: len(last)]]


def test_without_the_compressor_litellm_decides(tmp_path: Path) -> None:
    model = EveryApi(window=WINDOW, responder=decide)
    with (
        serve(model.app) as upstream,
        gateway(tmp_path, upstream, "http://127.0.0.1:9") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER, max_retries=0, timeout=60) as client,
    ):
        session = AGENTS["chat"](client, "agent").run(4, lambda: None)
    assert session.turns == 4
