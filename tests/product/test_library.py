"""``from proxy import compact``, as a program uses it."""

import asyncio
import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from proxy import Compaction, acompact, compact
from proxy.config import load
from proxy.demo.validity import faults
from proxy.errors import BadBody, ConfigurationError
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.upstream import Reply, StandIn
from tests.product.test_compress import APIS, Gateway, chat

NOTES = "## Task\nFind where values are computed.\n## Done\nThe agent searched all modules and read the results."


@pytest.mark.parametrize("api", APIS)
def test_a_conversation_fits(api: str) -> None:
    sent = APIS[api](24)
    before = copy.deepcopy(sent)
    found = compact(sent, model="gpt-4o-mini", window=16_000)
    assert sent == before
    assert found.tokens_after < 16_000 < found.tokens_before
    assert "summary" in found.steps
    assert found.messages[-1] is sent[-1]
    assert all(one in sent for one in found.removed)
    assert len(found.removed) > 20
    if api == "chat":
        assert not faults({"messages": found.messages})


def test_a_small_conversation_stays() -> None:
    sent = chat(2)
    found = compact(sent, model="gpt-4o-mini")
    assert all(ours is theirs for ours, theirs in zip(found.messages, sent, strict=True))
    assert (found.steps, found.removed) == ((), [])
    assert found.tokens_before == found.tokens_after > 1_000


def test_functions_write_summaries() -> None:
    prompts: list[str] = []

    def write(prompt: str) -> str:
        prompts.append(prompt)
        return NOTES

    async def write_later(prompt: str) -> str:
        await asyncio.sleep(0)
        return write(prompt)

    sent, arguments = chat(24), {"model": "gpt-4o-mini", "window": 16_000}
    first = compact(sent, summarize=write, **arguments)
    second = compact(sent, summarize=write_later, **arguments)
    third = asyncio.run(acompact(sent, summarize=write_later, **arguments))
    assert first == second == third
    assert "searched all modules" in json.dumps(first.messages)
    assert len(set(prompts)) == 1
    assert "Find where values are computed." in prompts[0]


def test_a_function_that_fails_gets_an_extract() -> None:
    def fail(prompt: str) -> str:
        raise RuntimeError("no model")

    found = compact(chat(24), model="gpt-4o-mini", window=16_000, summarize=fail)
    assert found == compact(chat(24), model="gpt-4o-mini", window=16_000)


def test_an_object_reuses_summaries() -> None:
    asked: list[str] = []

    def write(prompt: str) -> str:
        asked.append(prompt)
        return NOTES

    with Compaction(summarize=write) as compaction:
        prompts = [compaction.compact(chat(turns), model="gpt-4o-mini", window=16_000) for turns in range(1, 41)]
        assert len(asked) < 12
        note = next(one for one in json.dumps(prompts[-1].messages).split() if one.startswith("archive"))
        assert note
    continued = sum(
        json.dumps(later.messages).startswith(json.dumps(earlier.messages)[:-1]) for earlier, later in pairwise(prompts)
    )
    assert continued > 25


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("library")
    upstream = StandIn(window=128_000, summariser=lambda received: Reply(content=NOTES))
    with serve(upstream.app) as model:
        key = hashlib.sha256(b"sk-a").hexdigest()
        configuration = {
            "upstreams": {"main": {"base_url": f"{model}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "gpt-4o-mini", "upstream": "main", "profile": {"context_window": 16_000}}],
            "auth": {"mode": "keys"},
            "teams": {"a": {"keys": [f"sha256:{key}"]}},
            "store": {"url": f"sqlite:///{folder / 'store.db'}"},
        }
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(configuration))
        with serve(Proxy(load(path, {}))) as address:
            yield address


@pytest.mark.parametrize("api", APIS)
def test_prompts_are_those_of_the_gateway(url: str, api: str) -> None:
    with Compaction(summarize=lambda prompt: NOTES) as compaction:
        for turns in range(1, 61, 3):
            sent = APIS[api](turns)
            answer = Gateway(url).compress(model="gpt-4o-mini", messages=sent, api=api, config={"mode": "full"}).json()
            own = compaction.compact(sent, model="gpt-4o-mini", window=16_000, api=api)
            assert json.dumps(own.messages) == json.dumps(answer["messages"]), turns
            assert (own.tokens_before, own.tokens_after) == (answer["tokens_before"], answer["tokens_after"])


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ConfigurationError, match="trigger"):
        compact([], model="gpt-5", policy={"trigger": "soon"})
    with pytest.raises(ValueError, match="soap"):
        compact([], model="gpt-5", api="soap")
    with pytest.raises(BadBody, match="system"):
        compact([], model="gpt-5", api="chat", system="Be brief.")


def test_the_import_is_light() -> None:
    program = "import sys; from proxy import compact; sys.exit('litellm' in sys.modules or 'uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    program = (
        "import sys; from proxy import compact; compact([{'role': 'user', 'content': 'Hi'}], model='gpt-5'); "
        "sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
