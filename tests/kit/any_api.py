"""An upstream of all three APIs, and the official SDKs that send chat messages to a proxy in front of it."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.recorded import as_blocks, as_items
from tests.kit.scripted import PROFILE, proxied
from tests.kit.three_apis import PATHS, Answer


class Upstream:
    """An upstream of all three APIs that gives the same answer to every request, and remembers the requests.

    ``bodies`` are the requests of clients, ``summaries`` those for summaries. ``output`` has the items of the next
    answer on Responses.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.summaries: list[str] = []
        self.output: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        more: dict[str, Any] = {"usage": None}
        if "<transcript>" in (text := json.dumps(body, ensure_ascii=False)):
            self.summaries.append(text)
        else:
            self.bodies.append(body)
            more |= {"output": self.output} if self.output else {}
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        answer = Answer("All right, the work continues as planned.", more=more).parts(api, stream=False)[1]
        return Response(answer, media_type="application/json")


@contextlib.contextmanager
def sdk(api: str, folder: Path, upstream: Upstream, policy: dict[str, Any]) -> Iterator[Any]:
    """Return a function that sends chat messages by the SDK of an API."""
    with serve(upstream.app) as behind, httpx.Client(trust_env=False) as direct:
        provider = "anthropic" if api == "messages" else "openai"
        settings = {
            "upstreams": {"main": {"provider": provider, "base_url": f"{behind}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": policy},
        }
        with proxied(settings, folder) as url:
            ours = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=direct)
            theirs = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)

            def send(messages: list[Any]) -> Any:
                if api == "chat":
                    return ours.chat.completions.create(model="m", messages=messages)
                if api == "responses":
                    items: Any = [item for listed in as_items(messages) for item in listed]
                    return ours.responses.create(model="m", input=items, store=False)
                return theirs.messages.create(model="m", max_tokens=100, messages=as_blocks(messages))  # type: ignore[arg-type]

            yield send


def strings(value: Any) -> Iterator[str]:
    """Yield all texts of a body. The arguments of a call on Messages count as JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from [json.dumps(inner, ensure_ascii=False)] if key == "input" and isinstance(inner, dict) else []
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def units(body: dict[str, Any]) -> list[Any]:
    return body.get("messages", body.get("input"))  # type: ignore[return-value]
