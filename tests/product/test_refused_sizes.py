"""Sizes that only the upstream knows: long windows, plans without them, bodies of too many bytes, and other counts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.messages import assistant, system, user, words
from tests.kit.scripted import proxied
from tests.kit.three_apis import APIS, PATHS, Answer, error_body, tools
from tests.kit.three_apis import request as body_of

SONNET = "claude-sonnet-4-5"
BETA = {"anthropic-beta": "oauth-2025-04-20,context-1m-2025-08-07"}
Refuse = Callable[[str, bytes], Response | None]


class Upstream:
    """An upstream of all three APIs. ``refuse`` returns a refusal of a body, or ``None``."""

    def __init__(self, refuse: Refuse = lambda api, raw: None) -> None:
        self.refuse = refuse
        self.sent: list[bytes] = []
        self.statuses: list[int] = []
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        answer = Response(Answer("Noted.", more={"usage": None}).parts(api, stream=False)[1], 200, None, JSON)
        if b"<transcript>" not in raw:
            answer = self.refuse(api, raw) or answer
            self.sent.append(raw)
            self.statuses.append(answer.status_code)
        return answer


JSON = "application/json"


def refusal(api: str, status: int, message: str) -> Response:
    return Response(json.dumps(error_body(api, message, None)), status, None, JSON)


@contextmanager
def caller(upstream: Upstream, folder: Path, profile: Mapping[str, Any] | None = None) -> Iterator[Callable[..., Any]]:
    """Return a function that sends a body to the proxy."""
    with serve(upstream.app) as url, httpx.Client(trust_env=False, timeout=60) as http:
        model = {"match": "*", "upstream": "main", **({"profile": dict(profile)} if profile else {})}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream", "speaks": [*APIS]}},
            "models": [model],
        }
        with proxied(settings, folder) as entrance:
            yield lambda api, body, headers=None: http.post(
                f"{entrance}{PATHS[api]}", content=body, headers={"authorization": "Bearer k", **(headers or {})}
            )


def talk(turns: int, size: int, sentence: str = "") -> list[Any]:
    """Return a conversation of about ``2 * turns * size`` tokens."""
    said = [
        [user(f"{n}: " + words(size, sentence or f"u{n}x")), assistant(f"{n}: " + words(size, sentence or f"a{n}x"))]
        for n in range(turns)
    ]
    return [system(), *(message for turn in said for message in turn), user("Go on.")]


LONG = talk(20, 5_300)
"""Over 250,000 of Claude's tokens."""


@pytest.mark.parametrize(
    ("api", "model", "headers", "fields"),
    [
        ("messages", SONNET, BETA, {}),
        ("messages", SONNET, {"Anthropic-Beta": "context-1m-2025-08-07"}, {}),
        ("messages", SONNET, {}, {"betas": ["context-1m-2025-08-07"]}),
        ("messages", f"us.anthropic.{SONNET}-20250929-v1:0", {}, {"anthropic_beta": ["context-1m-2025-08-07"]}),
        ("messages", f"{SONNET}[1m]", {}, {}),
        ("chat", f"anthropic/{SONNET}", BETA, {}),
    ],
)
def test_a_client_may_ask_for_the_long_window(
    api: str, model: str, headers: dict[str, str], fields: dict[str, Any], tmp_path: Path
) -> None:
    upstream = Upstream()
    plain, body = (body_of(api, name, LONG, stream=False, **extra) for name, extra in ((SONNET, {}), (model, fields)))
    with caller(upstream, tmp_path) as ask:
        assert ask(api, plain).headers["x-compaction"] == "compacted"
        assert ask(api, body, headers).headers["x-compaction"] == "none"
        assert ask(api, plain).headers["x-compaction"] == "compacted", "the next client doesn't ask for it"
    assert upstream.sent[1] == body


def test_no_other_model_and_no_text_has_the_long_window(tmp_path: Path) -> None:
    upstream = Upstream()
    mentioned = body_of("messages", SONNET, [*LONG[:-1], user("Use betas context-1m-2025-08-07?")], stream=False)
    with caller(upstream, tmp_path) as ask:
        assert ask("messages", mentioned).headers["x-compaction"] == "compacted"
        assert ask("chat", body_of("chat", "gpt-4o", LONG, stream=False), BETA).headers["x-compaction"] == "compacted"
    with caller(upstream, tmp_path, {"context_window": 100_000}) as ask:
        long = ask("messages", body_of("messages", f"{SONNET}[1m]", LONG, stream=False), BETA)
    assert long.headers["x-compaction"] == "compacted", "the operator's limit comes first"


GATES = {
    "subscription": (400, "The long context beta is not yet available for this subscription."),
    "tier": (429, "Extra usage is required for long context requests."),
    "access": (403, "Your organization does not have access to the 1M context window. Upgrade your plan."),
    "eligible": (400, "This account is not eligible for long-context requests; a usage tier of 4 is required."),
}


@pytest.mark.parametrize(("wording", "dense"), [*combined(2, GATES, [False]), ("tier", True)])
def test_a_plan_without_long_prompts_is_learned(wording: str, dense: bool, tmp_path: Path) -> None:
    status, message = GATES[wording]
    conversation = talk(20, 5_300, "0 1 2 3 4 5 6 7 8 9 ") if dense else LONG
    body = body_of("messages", SONNET, conversation, stream=False)
    size = len(body) * 3 // 4
    upstream = Upstream(lambda api, raw: refusal(api, status, message) if len(raw) > size else None)
    with caller(upstream, tmp_path) as ask:
        answers = [ask("messages", body, BETA) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.headers["x-compaction-retries"] for answer in answers] == ["1", "0", "0"]
    assert upstream.statuses == [status, 200, 200, 200]
    assert not dense or len(body) < 400_000


NGINX = (
    "<html>\r\n<head><title>413 Request Entity Too Large</title></head>\r\n<body>\r\n<center><h1>413 Request Entity "
    "Too Large</h1></center>\r\n<hr><center>nginx/1.27.0</center>\r\n</body>\r\n</html>\r\n"
)
PAGES = {
    "nginx": (NGINX, "text/html"),
    "cloudflare": (NGINX.replace("nginx/1.27.0", "cloudflare"), "text/html; charset=UTF-8"),
    "empty": ("", "text/plain"),
    "kong": ('{"message":"Request size limit exceeded"}', JSON),
    "express": ('{"error":{"message":"request entity too large","type":"entity.too.large"}}', JSON),
}


@pytest.mark.parametrize(("page", "api"), [*zip(PAGES, cycle(APIS), strict=False)])
def test_a_body_of_too_many_bytes_is_compacted_below_them(api: str, page: str, tmp_path: Path) -> None:
    text, kind = PAGES[page]
    upstream = Upstream(lambda api, raw: Response(text, 413, None, kind) if len(raw) > 30_000 else None)
    with caller(upstream, tmp_path, {"context_window": 128_000}) as ask:
        answers = [ask(api, body_of(api, "m", talk(turns, 300), stream=False)) for turns in (40, 41, 42)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.headers["x-compaction-retries"] for answer in answers] == ["1", "0", "0"]
    assert upstream.statuses == [413, 200, 200, 200]


@pytest.mark.parametrize("text", ['{"error": {"message": "The uploaded image file is too large"}}', NGINX])
def test_what_cannot_be_compacted_gets_the_page(text: str, tmp_path: Path) -> None:
    upstream = Upstream(lambda api, raw: Response(text, 413, None, JSON))
    body = body_of("chat", "m", [user(words(3_000, "x"))], stream=False)
    with caller(upstream, tmp_path, {"context_window": 128_000}) as ask:
        assert (ask("chat", body).status_code, upstream.sent) == (413, [body])


WORDINGS: Sequence[str] = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in {counted} tokens.",
    "prompt is too long: {counted} tokens > {limit} maximum",
    "The input exceeds the context window of {limit} tokens.",
    "Prompt is too long.",
)


@pytest.mark.parametrize(("api", "wording"), [*zip(cycle(APIS), WORDINGS, strict=False)])
@pytest.mark.parametrize(("turns", "more"), [(12, 28_000), (24, 30_500)])
def test_the_upstream_counts_tools_that_the_proxy_doesnt(
    api: str, wording: str, turns: int, more: int, tmp_path: Path
) -> None:
    limit = 32_000

    def refuse(api: str, raw: bytes) -> Response | None:
        counted = len(raw) // 2 + more
        return refusal(api, 400, wording.format(limit=limit, counted=counted)) if counted > limit else None

    upstream = Upstream(refuse)
    fields = {"tools": tools(api), "max_tokens" if api != "responses" else "max_output_tokens": 300}
    with caller(upstream, tmp_path, {"context_window": limit}) as ask:
        answers = [ask(api, body_of(api, "m", talk(turns, 300), stream=False, **fields)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert upstream.statuses[0] == 400
    assert answers[1].headers["x-compaction-retries"] == "0"
