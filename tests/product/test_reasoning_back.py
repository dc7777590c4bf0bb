"""Upstreams that refuse a call in the history without the readable reasoning before it, such as DeepSeek and Kimi.

See api-docs.deepseek.com/guides/thinking_mode: a call comes back with its reasoning in all later requests.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.messages import words
from tests.kit.scripted import proxied
from tests.kit.three_apis import PATHS, Answer

PROFILE = {"context_window": 8_000, "max_output_tokens": 1_000, "tokenizer": "o200k_base"}
UNITS = {"chat": "messages", "responses": "input", "messages": "messages"}


class Demanding:
    """An upstream of all three APIs. With ``seals``, its reasoning looks like that of OpenAI and Anthropic.

    ``refused`` are the calls that came without their reasoning.
    """

    def __init__(self, *, seals: bool = False) -> None:
        self.seals = seals
        self.bodies: list[bytes] = []
        self.refused: list[str] = []
        self._numbers = itertools.count()
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        if b"<transcript>" in raw:
            summary = Answer("The user asked for parts of the work, one after the other. All of them are done so far.")
            return Response(summary.parts(api, stream=False)[1], media_type="application/json")
        self.bodies.append(raw)
        units = json.loads(raw)[UNITS[api]]
        missing = [call for call, thoughts in _calls(api, units) if f"Thoughts before {call}." not in thoughts]
        if missing:
            self.refused += missing
            message = "The `reasoning_content` in the thinking mode must be passed back to the API."
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        return JSONResponse(self._next(api, f"call_{next(self._numbers)}", units[-1]))

    def _next(self, api: str, call: str, newest: dict[str, Any]) -> dict[str, Any]:
        """Return an answer with a call. Every third one is a text."""
        thought, done = f"Thoughts before {call}. " + words(30, f"{call}x"), int(call[5:]) % 3 == 2
        text, calls = ("Done with it.", []) if done else ("", [{"id": call, "name": "run"}])
        if api == "chat":
            made = [{"id": call, "type": "function", "function": {"name": "run", "arguments": "{}"}} for _ in calls]
            message = {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": made or None}
            reason = "stop" if done else "tool_calls"
            usage = {"prompt_tokens": 40, "completion_tokens": 80, "total_tokens": 120}
            return {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}
        answer: dict[str, Any] = json.loads(Answer(text).parts(api, stream=False)[1])
        if api == "responses":
            items: list[Any] = answer["output"]
            items.insert(0, {"type": "reasoning", "id": f"rs_{call}", **self._reasoning(thought)})
            items += [
                {"type": "function_call", "call_id": one["id"], "name": "run", "arguments": "{}"} for one in calls
            ]
        else:
            blocks: list[Any] = answer["content"]
            blocks.insert(0, {"type": "thinking", "thinking": thought, "signature": "sealed" * self.seals})
            blocks += [{"type": "tool_use", **one, "input": {}} for one in calls]
        return answer

    def _reasoning(self, thought: str) -> dict[str, Any]:
        if self.seals:
            return {"summary": [{"type": "summary_text", "text": thought}], "encrypted_content": "sealed"}
        return {"summary": [], "content": [{"type": "reasoning_text", "text": thought}]}


def _calls(api: str, units: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each call with the reasoning that belongs to it."""
    thoughts = ""
    for unit in units:
        if api == "chat":
            yield from ((call["id"], unit.get("reasoning_content") or "") for call in unit.get("tool_calls") or ())
        elif api == "messages":
            blocks = unit["content"] if isinstance(unit["content"], list) else []
            thoughts = "".join(block.get("thinking", "") for block in blocks)
            yield from ((block["id"], thoughts) for block in blocks if block["type"] == "tool_use")
        elif unit.get("type") == "reasoning":
            thoughts += "".join(part["text"] for part in (*unit["summary"], *unit.get("content", ())))
        elif unit.get("type") == "function_call":
            yield unit["call_id"], thoughts
        else:
            thoughts = ""


def post(caller: httpx.Client, api: str, body: str) -> httpx.Response:
    headers = {"authorization": "Bearer k", "content-type": "application/json"}
    return caller.post(PATHS[api], content=body, headers=headers)


def session(caller: httpx.Client, api: str, turns: int, model: str) -> Iterator[tuple[str, httpx.Response]]:
    """Send a session, and yield each request with its response. The client repeats what it got."""
    history: list[Any] = []
    results: list[str] = []
    for turn in range(turns):
        text = words(150, f"t{turn}x")
        if not results:
            history.append({"role": "user", "content": f"Do part {turn}. {text}"})
        elif api == "responses":
            history += [{"type": "function_call_output", "call_id": id, "output": text} for id in results]
        elif api == "messages":
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id in results]
            history.append({"role": "user", "content": blocks})
        else:
            history += [{"role": "tool", "tool_call_id": id, "content": text} for id in results]
        most = "max_output_tokens" if api == "responses" else "max_tokens"
        body = json.dumps({"model": model, UNITS[api]: history, most: 500})
        answer = post(caller, api, body)
        yield body, answer
        made = answer.json()
        if api == "chat":
            history.append(made["choices"][0]["message"])
        elif api == "responses":
            history += made["output"]
        else:
            history.append({"role": "assistant", "content": made["content"]})
        units = history[-1:] if api != "responses" else made["output"]
        results = [id for id, _ in _calls(api, units)]


def settings(url: str, **upstream: Any) -> dict[str, Any]:
    return {
        "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream", **upstream}},
        "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
    }


@pytest.mark.parametrize(
    ("speaks", "api", "model"), combined(3, [None, ["chat"]], PATHS, ["kimi-k2.6", "claude-sonnet-5-5"])
)
def test_reasoning_comes_back_with_its_calls(api: str, speaks: Any, model: str, tmp_path: Path) -> None:
    upstream, compacted, sent = Demanding(), 0, {}
    with (
        serve(upstream.app) as behind,
        proxied(settings(behind, speaks=speaks), tmp_path) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as caller,
    ):
        for body, answer in session(caller, api, 60, model):
            assert answer.status_code == 200, (answer.text, upstream.refused)
            compacted += answer.headers["x-compaction"] == "compacted"
            sent[body] = upstream.bodies[-1]
        for body in reversed(sent):
            assert post(caller, api, body).status_code == 200
            assert upstream.bodies[-1] == sent[body], "a conversation that goes back is sent alike"
    assert compacted > 20
    assert upstream.refused == []


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_reasoning_that_looks_sealed_is_sent_again_and_kept_from_then_on(api: str, tmp_path: Path) -> None:
    upstream, retries = Demanding(seals=True), 0
    with (
        serve(upstream.app) as behind,
        proxied(settings(behind), tmp_path) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as caller,
    ):
        for _ in range(2):
            for _, answer in session(caller, api, 60, "claude-sonnet-5-5"):
                assert answer.status_code == 200, answer.text
                retries += int(answer.headers["x-compaction-retries"])
    assert retries == 1
