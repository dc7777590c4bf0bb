"""Read windows from the upstreams' own model lists, in the background."""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

import pytest
import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from proxy.config import Route, UpstreamSettings
from proxy.pipeline.runtime import Runtime
from proxy.server.loopback import serve
from proxy.upstream import limit_discovery as asking
from proxy.upstream.limit_discovery import EVERY, MOST_BYTES, SOON, reports_limits
from tests.kit.configurations import loads
from tests.kit.scripted import chat, client, proxied
from tests.kit.upstream import StandIn

WINDOW = 8_000
P = ParamSpec("P")


def running(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture(autouse=True)
def _asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "reports_limits", reports_limits)


@dataclass
class Telling:
    """An upstream that answers chat completions as the stand-in does, and enquiries as the test says.

    ``answers`` are by path: JSON, or a response, or how long to hang in seconds. ``asked`` are the enquiries.
    """

    answers: Mapping[str, Any]
    stand_in: StandIn = field(default_factory=lambda: StandIn(window=WINDOW))
    asked: list[tuple[str, str, str | None, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/v1/chat/completions":
            await self.stand_in.app(scope, receive, send)
            return
        request = Request(scope, receive)
        key = request.headers.get("authorization")
        self.asked.append((request.method, request.url.path, key, await request.body()))
        model = request.query_params.get("model")
        answer = self.answers.get(request.url.path + (f"?model={model}" if model else ""))
        response = answer if isinstance(answer, Response) else JSONResponse(answer or {}, 200 if answer else 404)
        await response(scope, receive, send)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.asked]


def listing(**entry: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "acme", "object": "model", **entry}]}


OLLAMA_INFO = {"general.architecture": "llama", "llama.context_length": 131_072, "llama.embedding_length": 4_096}

TELLING: dict[str, tuple[dict[str, Any], str]] = {
    "vLLM": ({"/v1/models": listing(max_model_len=WINDOW)}, "upstream: max_model_len in /models"),
    "OpenRouter": ({"/v1/models": listing(context_length=WINDOW)}, "upstream: context_length in /models"),
    "Groq": ({"/v1/models": listing(context_window=WINDOW)}, "upstream: context_window in /models"),
    "Mistral": ({"/v1/models": listing(max_context_length=WINDOW)}, "upstream: max_context_length in /models"),
    "LM Studio": (
        {
            "/v1/models": listing(),
            "/props": {"error": "Unexpected endpoint or method. (GET /props)"},
            "/api/v0/models": listing(max_context_length=131_072, loaded_context_length=WINDOW),
        },
        "upstream: loaded_context_length in /api/v0/models",
    ),
    "llama.cpp": (
        {
            "/v1/models": listing(meta={"n_ctx_train": 131_072}),
            "/props": {"default_generation_settings": {"n_ctx": WINDOW}, "total_slots": 1},
        },
        "upstream: n_ctx in /props",
    ),
    "Ollama, not set": (
        {
            "/v1/models": {"object": "list", "data": [{"id": "acme"}]},
            "/api/show": {"model_info": {"llama.context_length": WINDOW}, "parameters": None},
        },
        "upstream: context_length in /api/show",
    ),
    "Ollama, by the server's default": (
        {
            "/v1/models": {"object": "list", "data": [{"id": "acme:latest"}]},
            "/api/show": {"model_info": OLLAMA_INFO, "parameters": 'stop    "x"'},
            "/api/ps": {"models": [{"name": "acme:latest", "model": "acme:latest", "context_length": WINDOW}]},
        },
        "upstream: context_length in /api/ps",
    ),
}


def service_for(url: str, **upstream: Any) -> Runtime:
    upstreams = {"main": {"provider": "hosted_vllm", "base_url": f"{url}/v1", **upstream}}
    return Runtime(loads(yaml.safe_dump({"store": {"url": "sqlite://"}, "upstreams": upstreams}).encode(), {}))


@pytest.mark.parametrize("name", TELLING)
@running
async def test_the_window_is_the_upstreams_and_its_source_says_so(name: str) -> None:
    answers, source = TELLING[name]
    upstream = Telling(answers)
    with serve(upstream) as url:
        service = service_for(url, api_key="sk-own")
        route = Route("main", "acme", None)
        before = await service.profile(route)
        await service.configuration.limit_discovery.settled()
        after = await service.profile(route)
        await service.aclose()
    assert not before.has_limit
    assert (after.context_window, after.max_input_tokens, after.note) == (WINDOW, WINDOW, None)
    assert after.sources["context_window"] == source
    assert {key for _, _, key, _ in upstream.asked} == {"Bearer sk-own"}
    assert len(upstream.asked) <= 5


@running
async def test_the_table_gives_way_and_the_operator_does_not() -> None:
    upstream = Telling({"/v1/models": {"data": [{"id": "gpt-4o", "max_model_len": WINDOW}, {"id": "gpt-5.2"}]}})
    with serve(upstream) as url:
        service = service_for(url)
        await service.profile(Route("main", "gpt-4o", None))
        await service.configuration.limit_discovery.settled()
        told = await service.profile(Route("main", "gpt-4o", None))
        untold = await service.profile(Route("main", "gpt-5.2", None))
        stated = loads(b"models: [{match: x, upstream: openai, profile: {context_window: 5000}}]", {}).models[0].profile
        ours = await service.profile(Route("main", "gpt-4o", stated))
        await service.aclose()
    assert (told.context_window, told.max_input_tokens, told.max_output_tokens) == (WINDOW, WINDOW, WINDOW)
    assert untold.max_input_tokens == 272_000
    assert (ours.context_window, ours.sources["context_window"]) == (5_000, "override")
    assert upstream.paths == ["/v1/models"]


NOTHING: dict[str, Any] = {
    "no such path": None,
    "no JSON": PlainTextResponse("<html>"),
    "other JSON": [[1], None, {"id": 7}],
    "too large": PlainTextResponse(" " * (MOST_BYTES + 1) + json.dumps(listing(max_model_len=WINDOW))),
    "elsewhere": PlainTextResponse("", 302, {"location": "/v1/elsewhere"}),
    "too small": listing(max_model_len=255),
    "absurd": listing(max_model_len=20_000_001),
    "negative": listing(max_model_len=-1, context_length=True, context_window="many"),
    "deep": PlainTextResponse("[" * 100_000),
}


@pytest.mark.parametrize("name", NOTHING)
@running
async def test_an_upstream_that_tells_nothing_changes_nothing(name: str) -> None:
    upstream = Telling({"/v1/models": NOTHING[name], "/v1/elsewhere": listing(max_model_len=WINDOW)})
    with serve(upstream) as url, capture_logs() as logs:
        service = service_for(url)
        for _ in range(2):
            profile = await service.profile(Route("main", "acme", None))
            await service.configuration.limit_discovery.settled()
        assert not (await service.profile(Route("main", "acme", None))).has_limit
        await service.aclose()
    assert not profile.has_limit
    assert "/v1/elsewhere" not in upstream.paths
    (line,) = [entry for entry in logs if entry["event"] == "limits.not_told"]
    assert (line["log_level"], line["upstream"]) == ("info", "main")
    assert len(upstream.asked) <= 5, "asked once"


@running
async def test_it_is_asked_again_now_and_then_and_what_it_told_stays_where_it_fails() -> None:
    now = 0.0
    answers: dict[str, Any] = {"/v1/models": listing(max_model_len=WINDOW)}
    upstream = Telling(answers)
    with serve(upstream) as url:
        service = service_for(url)
        service.configuration.limit_discovery._clock = lambda: now
        service.configuration.limit_discovery._upstreams["main"].due = now

        async def window() -> int | None:
            await service.profile(Route("main", "acme", None))
            await service.configuration.limit_discovery.settled()
            return (await service.profile(Route("main", "acme", None))).context_window

        assert await window() == WINDOW
        answers["/v1/models"] = listing(max_model_len=2 * WINDOW)
        assert await window() == WINDOW
        now += EVERY
        assert await window() == 2 * WINDOW
        answers["/v1/models"] = None
        now += EVERY
        assert await window() == 2 * WINDOW
        await service.aclose()
    assert upstream.paths.count("/v1/models") == 3


@running
async def test_each_of_ollamas_models_is_asked_for_once_and_no_other() -> None:
    models = {"data": [{"id": "acme:latest"}, {"id": "tiny"}]}
    upstream = Telling({"/v1/models": models, "/api/show": {"parameters": "num_ctx 4096"}})
    with serve(upstream) as url:
        service = service_for(url)
        windows = []
        for model in ("acme", "made-up", "tiny", "tiny", "made-up-too", "acme:latest"):
            await service.profile(Route("main", model, None))
            await service.configuration.limit_discovery.settled()
            windows.append((await service.profile(Route("main", model, None))).context_window)
        await service.aclose()
    assert windows == [4_096, None, 4_096, 4_096, None, 4_096]
    shown = {json.loads(body)["model"] for _, path, _, body in upstream.asked if path == "/api/show"}
    assert shown == {"acme", "tiny"}
    assert upstream.paths.count("/v1/models") == 2


@pytest.mark.parametrize("kind", ["LM Studio", "llama-server"])
@running
async def test_a_model_that_loads_at_its_first_request_is_asked_for_again_soon(kind: str) -> None:
    now, others = 0.0, [{"id": "tiny"}, {"id": "large"}]
    answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "acme"}, *others]}}
    if kind == "LM Studio":
        idle = [{"id": "acme", "state": "not-loaded", "max_context_length": 131_072}]
        ready = [{"id": "acme", "state": "loaded", "max_context_length": 131_072, "loaded_context_length": WINDOW}]
        answers["/api/v0/models"] = {"data": [*idle, *others]}
        later, known = {"/api/v0/models": {"data": [*ready, *others]}}, 131_072
    else:
        answers["/props"] = {"role": "router", "default_generation_settings": {"params": None, "n_ctx": 0}}
        later, known = {"/props?model=acme": {"default_generation_settings": {"n_ctx": WINDOW}}}, None
    upstream = Telling(answers)
    with serve(upstream) as url:
        service = service_for(url)
        service.configuration.limit_discovery._clock = lambda: now
        service.configuration.limit_discovery._upstreams["main"].due = now

        async def window(model: str) -> int | None:
            await service.profile(Route("main", model, None))
            await service.configuration.limit_discovery.settled()
            return (await service.profile(Route("main", model, None))).context_window

        assert await window("acme") == known
        answers.update(later)
        now += SOON
        assert await window("acme") == WINDOW
        asked = len(upstream.asked)
        now += SOON
        assert await window("acme") == WINDOW
        assert len(upstream.asked) == asked, "a loaded model isn't asked for again"
        answers["/props?model=tiny"] = {"default_generation_settings": {"n_ctx": 4_096}}
        assert await window("tiny") == (4_096 if kind == "llama-server" else None)
        await service.aclose()


ASKED: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"base_url": "https://eu.api.openai.com/v1"}, False),
    ({"base_url": "https://acme.openai.azure.com/openai/v1"}, False),
    ({"provider": "azure", "base_url": "http://10.0.0.1/v1"}, False),
    ({"provider": "anthropic"}, False),
    ({"base_url": "http://10.0.0.1/v1", "lane": "translate"}, False),
    ({"base_url": "http://10.0.0.1/v1", "ask_limits": False}, False),
    ({"base_url": "http://10.0.0.1/v1"}, True),
    ({"provider": "openrouter"}, True),
    ({"provider": "lm_studio", "base_url": "http://localhost:1234/v1"}, True),
]


@pytest.mark.parametrize(("upstream", "asked"), ASKED)
def test_who_is_asked(upstream: dict[str, Any], asked: bool) -> None:
    assert reports_limits(UpstreamSettings.model_validate(upstream)) is asked


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    stand_in = StandIn(window=WINDOW)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/v1/chat/completions":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await stand_in.app(scope, receive, send)

    monkeypatch.setattr(asking, "WITHIN", 1.0)
    with serve(app) as url:
        yield url


@pytest.mark.long
def test_no_request_waits_and_shutting_down_does_not_either(hanging: str, tmp_path: Path) -> None:
    settings = {"upstreams": {"main": {"provider": "hosted_vllm", "base_url": f"{hanging}/v1"}}}
    asking.WITHIN = 600.0
    begun = time.monotonic()
    with proxied(settings, tmp_path) as url, client(url) as caller:
        for _ in range(3):
            caller.chat.completions.create(model="acme", messages=chat(1, 20))
    assert time.monotonic() - begun < 300
