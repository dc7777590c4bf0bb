"""A text that takes too long to count or to shorten costs its own request the compaction, and others nothing."""

import http.client
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from proxy.compaction.stages import evict_results
from proxy.dialects import units
from proxy.tokens.text import count, encoding
from tests.kit.messages import assistant, call, result
from tests.kit.scripted import PROFILE, behind, chat
from tests.kit.upstream import StandIn

LONG = chat(7, 1_000)
"""A conversation just over the trigger."""

MARK = "never ends"
ENDLESS = [*LONG[:-1], assistant(None, call("c", "fetch")), result("c", f"{MARK} " * 8_000), *chat(7, 1_000)[1:]]


class Endless:
    """Work on a text with ``MARK`` that pauses and never ends."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def instead(self, usual: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def work(text: Any) -> Any:
            while MARK in (text if isinstance(text, str) else bytes(text).decode()):
                self.begun.set()
                try:
                    count(encoding("o200k_base"), "x")
                except BaseException:
                    self.ended.set()
                    raise
            return usual(text)

        return work


@pytest.fixture(params=["count", "shorten"])
def endless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Endless:
    made, place = Endless(), {"count": (units, "has_remote_media"), "shorten": (evict_results, "lossless")}
    module, name = place[request.param]
    monkeypatch.setattr(module, name, made.instead(getattr(module, name)))
    return made


def ask(url: str, messages: list[Any]) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": messages}, timeout=60)
    assert answer.status_code == 200
    return str(answer.headers["x-compaction"])


def test_the_request_leaves_unchanged_at_half_of_its_deadline(endless: Endless, tmp_path: Path) -> None:
    upstream = StandIn(window=1_000_000)
    with behind(upstream, tmp_path, profile={**PROFILE, "context_window": 16_000}, server={"deadline": 4}) as url:
        assert ask(url, ENDLESS) == "failed"
        assert endless.ended.wait(30), "its work stops"
        assert upstream.conversations[-1].body["messages"] == ENDLESS
        assert ask(url, LONG) == "compacted"


def test_others_do_not_wait_and_the_work_ends_when_the_client_leaves(endless: Endless, tmp_path: Path) -> None:
    with behind(StandIn(window=1_000_000), tmp_path, profile={**PROFILE, "context_window": 16_000}) as url:
        leaving = http.client.HTTPConnection(urlsplit(url).netloc)
        leaving.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": ENDLESS}))
        assert endless.begun.wait(30)
        assert ask(url, LONG) == "compacted"
        assert not endless.ended.is_set()
        leaving.close()
        assert endless.ended.wait(30)
