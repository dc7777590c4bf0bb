"""An upstream adds a default output of its own to a request without one: the proxy states an output that fits."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.kit.combinations import combined
from tests.kit.messages import words
from tests.kit.scripted import behind
from tests.kit.three_apis import PATHS, Answer
from tests.kit.upstream import text_tokens

WINDOW, DEFAULT = 16_000, 12_000
FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
WORDINGS = {
    "vLLM": "This model's maximum context length is {w} tokens. However, you requested {t} tokens ({p} in the "
    "messages, {o} in the completion). Please reduce the length of the messages or completion.",
    "OpenRouter": "This endpoint's maximum context length is {w} tokens. However, you requested about {t} tokens ({p} "
    "of text input, {o} in the output). Please reduce the length of either one.",
    "SGLang": "Requested token count exceeds the model's maximum context length of {w} tokens. You requested a total "
    "of {t} tokens: {p} tokens from the input messages and {o} tokens for the completion.",
    "Together": "`inputs` tokens + `max_new_tokens` must be <= {w}. Given: {p} `inputs` tokens and {o} "
    "`max_new_tokens`",
    "Anthropic": "input length and `max_tokens` exceed context limit: {p} + {o} > {w}, decrease input length or "
    "`max_tokens` and try again",
    "Cerebras": "Please reduce the length of the messages or completion. Current length is {t} while limit is {w}",
    "with a sum": "prompt tokens + max_tokens = {t} exceeds the maximum context length {w}",
    "plus": "The prompt ({p} tokens) plus the default output ({o} tokens) exceeds the context window of {w} tokens.",
    "without figures": "The prompt plus max_tokens exceeds the model's context window.",
}


@pytest.mark.parametrize(("known", "number"), combined(3, [WINDOW, None, 8 * WINDOW], range(len(WORDINGS))))
def test_the_proxy_states_an_output(number: int, known: int | None, tmp_path: Path) -> None:
    wording, api = [*WORDINGS][number], ("chat", "responses")[number % 2]
    seen: list[tuple[int, int | None, int]] = []

    async def answer(request: Request) -> Response:
        body = json.loads(await request.body())
        prompt = text_tokens(json.dumps(body.get("messages") or body["input"]))
        stated = next((body[name] for name in FIELDS if name in body), None)
        output = stated or DEFAULT
        status = 400 if prompt + output > WINDOW else 200
        seen.append((prompt, stated, status))
        if status == 400:
            message = WORDINGS[wording].format(p=prompt, o=output, t=prompt + output, w=WINDOW)
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)
        return Response(Answer("ok", prompt=prompt).parts(api, stream=False)[1], media_type="application/json")

    app = Starlette(routes=[Route(PATHS[api], answer, methods=["POST"])])
    profile = {"tokenizer": "o200k_base", **({"context_window": known} if known else {})}
    messages: list[Any] = []
    with (
        behind(app, tmp_path, profile=profile, policy={"prepare": None}) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        for turn in range(5):
            messages.append({"role": "user", "content": f"Part {turn}: {words(900, f'u{turn}x')}"})
            field = "input" if api == "responses" else "messages"
            got = http.post(PATHS[api], json={"model": "m", field: messages})
            assert got.status_code == 200, got.text
            assert got.headers["x-compaction"] in ("none", "pending"), (turn, got.headers)
            messages.append({"role": "assistant", "content": words(900, f"a{turn}x")})
    assert all(prompt + (stated or 0) <= WINDOW for prompt, stated, status in seen if status == 200)
    stated = [one for _, one, status in seen if status == 200 and one is not None]
    assert min(stated) >= 1_000, "room for an answer"
