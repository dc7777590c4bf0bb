"""Several workers on one store: one summary of a conversation, and one call for it."""

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

from proxy.server.loopback import serve
from tests.kit.program import program, write_config
from tests.kit.scripted import chat
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

WINDOW = 16_000
WORKERS = 2


def test_all_workers_use_one_summary(tmp_path: Path) -> None:
    made = count(1)

    def summariser(body: dict[str, Any]) -> Reply:
        return Reply(content=f"Goal: these are notes number {next(made)}.", delay=0.5)

    upstream = StandIn(window=WINDOW, summariser=summariser)
    profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
    with serve(upstream.app) as url, contextlib.ExitStack() as closing:
        main = {"upstreams": {"main": {"base_url": f"{url}/v1"}}}
        models = [{"match": "*", "upstream": "main", "profile": profile}]
        config = write_config({**main, "models": models}, tmp_path)
        running = closing.enter_context(program(config, "--workers", str(WORKERS)))
        port = running.port
        lines = []
        for _ in range(12):  # each stays with the worker that accepted it
            line = HTTPConnection("127.0.0.1", port, timeout=60)
            closing.callback(line.close)
            line.connect()
            lines.append(line)

        def asked(line: HTTPConnection, messages: list[Any]) -> str | None:
            headers = {"content-type": "application/json"}
            line.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": messages}), headers)
            answer = line.getresponse()
            answer.read()
            assert answer.status == 200
            return answer.getheader("x-compaction-summary")

        for turns in (8, 12):  # one checkpoint, and a later one that is built upon it
            with ThreadPoolExecutor(len(lines)) as pool:
                told = set(pool.map(asked, lines, [chat(turns, 900)] * len(lines)))
            assert told <= {"made", "stored"}
            time.sleep(0.5)  # summaries of later checkpoints are made ahead
            assert {asked(line, chat(turns, 900)) for line in lines} == {"stored"}
            assert len({request.raw for request in upstream.conversations}) == 1, "all were sent the same prompt"
            paid = [request.raw for request in upstream.summaries]
            assert len(set(paid)) == len(paid), "each was asked for once"
            upstream.requests.clear()

        one_session_for_all_workers(lines, running.link().removeprefix(running.url))


def one_session_for_all_workers(lines: Sequence[HTTPConnection], link: str) -> None:
    """Check that the link that the server wrote works once, and its session in every worker."""

    def got(line: HTTPConnection, path: str, **headers: str) -> tuple[int, str, bytes]:
        """Return the status, the cookie, and the body."""
        line.request("GET", path, headers=headers)
        answer = line.getresponse()
        return answer.status, answer.getheader("set-cookie", "").split(";")[0], answer.read()

    def callers(line: HTTPConnection, **headers: str) -> int:
        """Return the number of callers whose records a request sees."""
        records = json.loads(got(line, "/compaction/requests?limit=1000", **headers)[2])["data"]
        return len({record["caller"] for record in records})

    got(lines[0], "/v1/models", authorization="Bearer sk-other")
    answers = [got(line, link) for line in lines]
    assert sorted(status for status, _, _ in answers) == [303, *[401] * (len(lines) - 1)]
    (cookie,) = {found for _, found, _ in answers if found}
    assert until(lambda: callers(lines[0], cookie=cookie) == 2)
    assert {callers(line, cookie=cookie) for line in lines} == {2}
    assert {callers(line) for line in lines} == {1}
