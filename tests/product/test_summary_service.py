"""A writer whose service has a path and a form of its own, as CONTRIBUTING describes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.pipeline import summary_models
from proxy.server.loopback import serve
from proxy.summary.forms import Messages, SummaryForm
from proxy.summary.quality import Written
from proxy.summary.writer import SummaryTask, SummaryTry, SummaryWriter
from proxy.summary.writers import write
from tests.kit.front_door import WITHOUT_A_MODEL
from tests.kit.records import records_in
from tests.kit.scripted import PROFILE, chat, client, proxied
from tests.kit.upstream import StandIn


class _Service(SummaryForm):
    api = "chat"
    path = "/summarize"
    limits = ("limit",)

    def body(self, model: str, messages: Messages, most: int | None) -> dict[str, Any]:
        return {"engine": model, "text": messages[-1]["content"], "limit": most}

    def read(self, answer: Any) -> Written:
        return Written(answer["summary"], "stop")


class ServiceWriter(SummaryWriter):
    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        models = await self.models.for_transcript(task.max_tokens, _Service())
        return [SummaryTry((model.name,), partial(write, task, model)) for model in models]


@pytest.mark.parametrize("provider", ["openai", "bedrock"])
def test_a_service_writes_summaries_unless_its_upstream_needs_translation(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(summary_models.WRITERS, "transcript", (ServiceWriter,))
    received: list[tuple[dict[str, Any], str]] = []

    async def summarize(request: Request) -> Response:
        received.append((await request.json(), request.headers["authorization"]))
        return JSONResponse({"summary": "Goal: notes of the service."})

    upstream = StandIn(window=16_000)
    with (
        serve(Starlette(routes=[Route("/v1/summarize", summarize, methods=["POST"])])) as service,
        serve(upstream.app) as url,
    ):
        settings = {
            "upstreams": {
                "main": {"base_url": f"{url}/v1", "api_key": "sk-main"},
                "notes": {"provider": provider, "base_url": f"{service}/v1", "api_key": "sk-notes"},
            },
            "models": [
                {"match": name, "upstream": to, "profile": PROFILE} for name, to in (("n", "notes"), ("*", "main"))
            ],
            "policies": {"default": {"summary": {"model": "n"}}},
        }
        with proxied(settings, tmp_path) as entrance, client(entrance) as caller:
            caller.chat.completions.create(model="m", messages=chat(7, 1_000))
    if provider == "bedrock":
        assert (received, len(upstream.summaries)) == ([], 0)
        assert WITHOUT_A_MODEL in upstream.conversations[-1].raw.decode()
        return
    ((body, key),) = received
    assert (list(body), key) == (["engine", "text", "limit"], "Bearer sk-notes")
    assert "notes of the service" in upstream.conversations[-1].raw.decode()
    assert [record.upstream for record in records_in(tmp_path / "store.db") if record.kind == "summary"] == ["notes"]
