"""The same conversation over an upstream's own API and over a bridge: the same prompt, recoveries, and records."""

import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from proxy.telemetry.record_json import record_json
from tests.kit.records import records_in
from tests.kit.scripted import chat, proxied
from tests.kit.three_apis import PATHS, Answer, error_body, request

PROFILE = {"context_window": 6_000, "max_output_tokens": 400, "tokenizer": "o200k_base"}
SIZE = 120
TURNS = 25

REFUSALS: dict[str, tuple[int, str]] = {
    "accepted": (200, ""),
    "overflow": (400, "This model's maximum context length is 3000 tokens. However, your messages had 5200 tokens."),
    "too-large": (413, "Request body too large: the limit is 20000 bytes."),
    "rate-limit": (429, "Rate limit reached. Try again in 7s."),
    "overloaded": (529, "Overloaded"),
    "unauthorized": (401, "Incorrect API key provided."),
}
_QUESTION = re.compile(r"(?:Question|Answer) \d+:")
_SPECIFIC = (
    *("id", "time", "explanation", "attempts", "bytes", "ms", "tokens", "usage", "cost", "archive"),
    "conversation",
)


class Upstream:
    """An upstream of all APIs. It refuses the first request of a model as the model's name says."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[str]] = {}
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, asked: Request) -> Response:
        text = (await asked.body()).decode()
        body = json.loads(text)
        api = next(name for name, path in PATHS.items() if asked.url.path == path)
        stream = bool(body.get("stream"))
        if "<transcript>" not in text:
            seen = self.bodies.setdefault(body["model"], [])
            seen.append(text)
            status, message = REFUSALS[body["model"]]
            if status >= 400 and len(seen) == 1:
                refused = json.dumps(error_body(api, message, None))
                return Response(refused, status, {"retry-after": "7"}, "application/json")
        events, whole = Answer("All right, the work continues as planned.").parts(api, stream=stream)
        if stream:
            return Response(b"".join(events), media_type="text/event-stream")
        return Response(whole, media_type="application/json")


@dataclass(frozen=True)
class Seen:
    """A request from both ends."""

    status: int
    retry_after: str | None
    kept: list[str]
    before: int
    after: int
    attempts: list[tuple[int | None, str]]
    record: dict[str, Any] = field(repr=False)


def run(api: str, behind: str, folder: Path, *, stream: bool) -> dict[str, Seen]:
    """Send a conversation of each kind over an API to an upstream that has only one."""
    folder.mkdir()
    store, upstream, answers = folder / "compaction.db", Upstream(), {}
    with serve(upstream.app) as url, httpx.Client(trust_env=False, timeout=60) as http:
        provider = {"provider": "anthropic"} if behind == "messages" else {}
        main = {"base_url": f"{url}/v1", "api_key": "sk-upstream", "speaks": [behind], **provider}
        settings = {
            "upstreams": {"main": main},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "store": {"url": f"sqlite:///{store}"},
        }
        with proxied(settings, folder) as entrance:
            for name in REFUSALS:
                raw = request(api, name, chat(TURNS, SIZE), stream=stream)
                answers[name] = http.post(f"{entrance}{PATHS[api]}", content=raw)
    records = {one.model: record_json(one) for one in records_in(store) if one.kind == "request"}
    return {
        name: Seen(
            answer.status_code,
            answer.headers.get("retry-after"),
            _QUESTION.findall(upstream.bodies[name][-1]),
            int(answer.headers["x-compaction-tokens-before"]),
            int(answer.headers["x-compaction-tokens-after"]),
            [(one["status"], one["result"]) for one in records[name]["attempts"]],
            {field: value for field, value in records[name].items() if field not in _SPECIFIC},
        )
        for name, answer in answers.items()
    }


CASES = [
    pytest.param(api, behind, number % 2 == 1, marks=pytest.mark.full if number % 3 else ())
    for number, (api, behind) in enumerate(itertools.permutations(PATHS, 2))
]
"""Each API streams in front of one other API, and not in front of the other one."""


@pytest.mark.parametrize(("api", "behind", "stream"), CASES)
def test_a_bridge_changes_nothing_else(api: str, behind: str, stream: bool, tmp_path: Path) -> None:
    native = run(api, api, tmp_path / "native", stream=stream)
    bridged = run(api, behind, tmp_path / "bridged", stream=stream)
    assert native["overflow"].attempts[0] == (400, "overflow")
    assert [native[name].status for name in REFUSALS] == [200, 200, 200, 429, 529, 401]
    for name, one in native.items():
        other = bridged[name]
        assert (other.status, other.retry_after, other.kept) == (one.status, one.retry_after, one.kept), name
        assert other.attempts == one.attempts, name
        assert other.record == one.record, name
        assert abs(other.before - one.before) <= one.before * 0.02, name
        assert abs(other.after - one.after) <= one.after * 0.02, name
