"""A chat template wants alternating roles, and nothing in the configuration says so."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.messages import assistant, call, result, system, user, words
from tests.kit.scripted import PROFILE, behind
from tests.kit.strict_template import mistral_accepts
from tests.kit.three_apis import APIS, PATHS, Answer
from tests.kit.three_apis import request as body_of

WORDINGS = {
    "Mistral": (400, "After the optional system message, conversation roles must alternate user/assistant/..."),
    "Gemma": (400, "Conversation roles must alternate user/assistant/user/assistant/..."),
    "llama.cpp": (500, "Jinja Exception: Conversation roles must alternate user/assistant/user/assistant/..."),
    "a gateway": (422, 'messages: roles must alternate, but found multiple "user" roles in a row'),
}
TURNS = 40


class Template:
    """An upstream of all three APIs that refuses other messages."""

    def __init__(self, wording: str) -> None:
        self.refused = 0
        self._wording = WORDINGS[wording]
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        units = [unit for unit in body.get("messages", body.get("input")) if unit.get("role")]
        if "<transcript>" not in json.dumps(body) and not mistral_accepts(units):
            self.refused += 1
            status, message = self._wording
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
        return Response(Answer("Noted.").parts(api, stream=False)[1], media_type="application/json")


def talk(turns: int) -> list[Any]:
    said = [[user(words(90, f"u{n}x")), assistant(words(90, f"a{n}x"))] for n in range(turns)]
    return [system(), *(message for turn in said for message in turn), user("Go on.")]


def loop(turns: int) -> list[Any]:
    said = [
        [assistant("Next.", call(f"c{n:08}", path=f"/srv/{n}")), result(f"c{n:08}", words(150, f"r{n}x"))]
        for n in range(turns)
    ]
    return [system(), user("Fix it."), *(message for turn in said for message in turn)]


@pytest.mark.parametrize(
    ("api", "wording", "made"),
    [
        *(("chat", wording, talk) for wording in WORDINGS),
        ("chat", "Mistral", loop),
        *((api, "Gemma", talk) for api in APIS if api != "chat"),
    ],
)
def test_one_refusal_shows_what_the_template_wants(api: str, wording: str, made: Any, tmp_path: Path) -> None:
    template = Template(wording)
    with serve(template.app) as url, httpx.Client(trust_env=False, timeout=60) as http:
        main = {"base_url": f"{url}/v1", "api_key": "k", "speaks": list(APIS)}
        profile = {**PROFILE, "context_window": 6_000}
        with behind(template.app, tmp_path, profile=profile, upstreams={"main": main}) as entrance:
            verdicts = []
            for turns in range(4, TURNS, 3):
                body = body_of(api, "m", made(turns), stream=False)
                response = http.post(f"{entrance}{PATHS[api]}", content=body, headers={"authorization": "Bearer k"})
                assert response.status_code == 200, response.text
                verdicts.append(response.headers["x-compaction"])
    assert verdicts.count("compacted") >= 3
    assert template.refused <= 1
