"""Conversations that the upstream keeps: requests that continue by ``previous_response_id`` over ``/v1/responses``."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.dialects import request as parsing
from tests.kit.agent_script import SCHEMA, SYSTEM, TOOLS, question, result
from tests.kit.scripted import behind, client
from tests.kit.strict_responses import TOO_LONG, StrictResponses

WINDOW = 8_000
TURNS = 40
MODEL = "gpt-4.1"
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 1_000, "tokenizer": "o200k_base"}
FIXED: Any = {
    "model": MODEL,
    "instructions": SYSTEM,
    "tools": [{"type": "function", "name": name, "description": "A tool.", "parameters": SCHEMA} for name in TOOLS],
}


def chained(caller: openai.OpenAI, turns: int) -> Iterator[Any]:
    """Send a session in which each request has only its new items. Every second response is streamed."""
    previous: str | None = None
    part, outputs = 0, []
    for turn in range(turns):
        if not outputs:
            part += 1
        items = outputs or [{"role": "user", "content": question(part)}]
        fields: Any = {**FIXED, "input": items}
        if previous is not None:
            fields["previous_response_id"] = previous
        if turn % 2:
            with caller.responses.stream(**fields) as events:
                response = events.get_final_response()
        else:
            response = caller.responses.create(**fields)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": result(item.call_id, item.name)}
            for item in response.output
            if item.type == "function_call"
        ]
        previous = response.id
        yield response


def test_a_chain_that_no_longer_fits_is_compacted_at_the_upstream(tmp_path: Path) -> None:
    upstream = StrictResponses(WINDOW)
    with behind(upstream.app, tmp_path, profile=PROFILE) as url, client(url) as caller:
        answers = list(chained(caller, TURNS))
    assert [answer.status for answer in answers] == ["completed"] * TURNS
    assert upstream.faults == []
    compactions = [received for received in upstream.requests if received.path.endswith("/compact")]
    assert len(compactions) == len(upstream.refused) >= 2
    assert all(received.headers["authorization"] == "Bearer sk-upstream" for received in compactions)
    continued = [received for received in upstream.requests if "previous_response_id" not in received.body]
    assert len(continued) == len(compactions) + 1, "the first request, and one after each compaction"


def test_a_policy_compacts_a_chain_before_it_overflows(tmp_path: Path) -> None:
    upstream = StrictResponses(WINDOW)
    policy = {"responses": {"state": "compact"}}
    with behind(upstream.app, tmp_path, profile=PROFILE, policy=policy) as url, client(url) as caller:
        answers = list(chained(caller, TURNS))
    assert [answer.status for answer in answers] == ["completed"] * TURNS
    assert (upstream.faults, upstream.refused) == ([], [])
    compactions = [received for received in upstream.requests if received.path.endswith("/compact")]
    assert len(compactions) >= 2
    largest = max(received.tokens for received in upstream.conversations)
    assert largest > 0.7 * WINDOW, "the proxy doesn't compact much too early"


def test_a_policy_leaves_a_chain_to_the_upstream(tmp_path: Path) -> None:
    upstream = Chain(JSONResponse(COMPACTED))
    with asked(upstream, tmp_path, policy={"responses": {"state": False}}) as ask:
        got = ask()
    assert (got.status_code, got.json()) == (400, {"error": REFUSAL})
    assert "without 'previous_response_id'" in got.headers["x-compaction-advice"]
    assert upstream.paths == ["/v1/responses"]


class Chain:
    """An upstream that refuses every request that continues ``previous_response_id``, and compacts as a test says."""

    def __init__(self, compacted: Response, stored: Response | None = None) -> None:
        self.paths: list[str] = []
        self._compacted = compacted
        self._stored = stored or JSONResponse({}, 404)
        self.app = Starlette(
            routes=[
                Route("/v1/responses/compact", self._compact, methods=["POST"]),
                Route("/{path:path}", self._any, methods=["GET", "POST", "DELETE"]),
            ]
        )

    async def _compact(self, request: Request) -> Response:
        self.paths.append(_path(request))
        return self._compacted

    async def _any(self, request: Request) -> Response:
        self.paths.append(_path(request))
        if request.method == "GET":
            return self._stored
        if {"previous_response_id", "conversation"} & json.loads(await request.body()).keys():
            return JSONResponse({"error": REFUSAL}, 400)
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
        return JSONResponse({"id": "resp_2", "object": "response", "status": "completed", "output": [message]})


def _path(request: Request) -> str:
    return str(request.scope["raw_path"].decode())


REFUSAL = {"message": TOO_LONG[0], "type": "invalid_request_error", "param": "input", "code": TOO_LONG[1]}
COMPACTED = {"object": "response.compaction", "output": [{"type": "compaction", "encrypted_content": "x"}]}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "1"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"}


@contextlib.contextmanager
def asked(upstream: Chain, folder: Path, policy: Any = None, **server: Any) -> Iterator[Any]:
    """A function that sends a request which continues a response."""
    with (
        behind(upstream.app, folder, profile=PROFILE, policy=policy, server=server) as url,
        httpx.Client(trust_env=False) as plain,
    ):

        def ask(previous: str = "resp_1", items: Any = "go on", **fields: Any) -> httpx.Response:
            body = {"model": MODEL, "previous_response_id": previous, "input": items, **fields}
            return plain.post(f"{url}/v1/responses", json=body, headers={"authorization": "Bearer sk-client"})

        yield ask


def test_calls_that_only_the_upstream_has_are_fetched(tmp_path: Path) -> None:
    upstream = Chain(JSONResponse(COMPACTED), JSONResponse({"output": [CALL]}))
    with asked(upstream, tmp_path) as ask:
        got = ask(items=[OUTPUT])
    assert (got.status_code, got.headers["x-compaction"]) == (200, "compacted")
    assert (got.headers["x-compaction-steps"], got.headers["x-compaction-retries"]) == ("server_state", "1")
    assert upstream.paths == ["/v1/responses", "/v1/responses/compact", "/v1/responses/resp_1", "/v1/responses"]


@pytest.mark.parametrize("previous", ["../files/secret", "resp_1?include=x", "resp/../../models", "a b#c"])
def test_an_id_is_one_segment_of_the_path(previous: str, tmp_path: Path) -> None:
    upstream = Chain(JSONResponse(COMPACTED), JSONResponse({"output": [CALL]}))
    with asked(upstream, tmp_path) as ask:
        assert ask(previous, [OUTPUT]).status_code == 200
    fetched = upstream.paths[2].removeprefix("/v1/responses/")
    assert "/" not in fetched
    assert str(httpx.URL(f"http://x/{fetched}").path)[1:] == previous


@pytest.mark.parametrize("previous", [".", ".."])
def test_an_id_that_would_change_the_path_is_not_fetched(previous: str, tmp_path: Path) -> None:
    upstream = Chain(JSONResponse(COMPACTED), JSONResponse({"output": [CALL]}))
    with asked(upstream, tmp_path) as ask:
        assert ask(previous, [OUTPUT]).json()["error"]["code"] == TOO_LONG[1]
    assert upstream.paths == ["/v1/responses", "/v1/responses/compact"]


@pytest.mark.parametrize(
    ("compacted", "reason"),
    [
        *((JSONResponse({"error": {}}, status), f"status {status}") for status in (404, 405, 501)),
        (JSONResponse([]), "not an object"),
        (Response(b"{", media_type="application/json"), "not JSON"),
        (JSONResponse({"output": []}), "no output"),
        (JSONResponse({"output": [{"pad": "x" * 300_000}]}), "longer than 200,000 bytes"),
    ],
)
def test_a_client_gets_its_error_if_the_upstream_cannot_compact(
    compacted: Response, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream = Chain(compacted)
    with asked(upstream, tmp_path, body_limit=200_000) as ask:
        got = ask()
    assert (got.status_code, got.json()) == (400, {"error": REFUSAL})
    assert got.headers["x-compaction"] == "none"
    advice = got.headers["x-compaction-advice"]
    assert f"(/responses/compact: {reason})" in advice
    assert "Send the whole conversation without 'previous_response_id'" in advice
    assert reason in capsys.readouterr().out


def test_a_client_gets_the_upstreams_error_if_the_compacted_history_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "MAX_MESSAGES", 20)
    upstream = Chain(JSONResponse({"output": [{"role": "user", "content": "x"}] * 21}))
    with asked(upstream, tmp_path) as ask:
        got = ask()
    assert (got.status_code, got.json()) == (400, {"error": REFUSAL})
    assert "(/responses/compact: too many items)" in got.headers["x-compaction-advice"]


def test_a_stored_conversation_gets_advice(tmp_path: Path) -> None:
    upstream = Chain(JSONResponse(COMPACTED))
    with asked(upstream, tmp_path) as ask:
        got = ask(None, conversation="conv_1")
    assert (got.status_code, got.json()) == (400, {"error": REFUSAL})
    assert "without 'conversation'" in got.headers["x-compaction-advice"]
    assert upstream.paths == ["/v1/responses"]
