"""A summary call meets what its conversation meets, and lacks what only that has. It still succeeds."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from tests.kit.scripted import PROFILE, proxied
from tests.kit.three_apis import APIS, PATHS, Answer

Body = dict[str, Any]
Rule = Callable[[str, Body], "Refusal | None"]
Refusal = tuple[int, Any]

IDENTITY = "You are the Agent, the official command line of the Provider."
NOTES = "Goal: KEPT answers to the questions. State: question 3 is answered. Next step: answer the newest one."


@dataclass
class Upstream:
    """An upstream that refuses by a rule. ``calls`` has the API, the body, and the status of each request."""

    rule: Rule
    apis: Sequence[str] = APIS
    calls: list[tuple[str, Body, int]] = field(default_factory=list)

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route(PATHS[api], self._answer, methods=["POST"]) for api in self.apis])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        refusal = self.rule(api, body)
        self.calls.append((api, body, 200 if refusal is None else refusal[0]))
        if refusal is not None:
            return JSONResponse(refusal[1], refusal[0])
        whole = json.dumps(body)
        notes = f"<notes>\n{NOTES}\n</notes>" if "<write_notes>" in whole else NOTES
        stream = bool(body.get("stream"))
        answer = Answer(notes if is_summary(body) else "ok")
        parts, one = answer.parts(api, stream=stream)
        return Response(b"".join(parts) if stream else one, media_type="text/event-stream" if stream else None)

    @property
    def summaries(self) -> list[tuple[str, Body, int]]:
        return [call for call in self.calls if is_summary(call[1])]


def is_summary(body: Body) -> bool:
    whole = json.dumps(body)
    return "<transcript>" in whole or "<write_notes>" in whole


def conversation(api: str, seed: str, **fields: Any) -> Body:
    turns = [
        (role, f"{role} {seed} {n}: {words(1_000, f'{seed}{n}x')}") for n in range(7) for role in ("user", "assistant")
    ]
    messages: list[Body] = [{"role": role, "content": text} for role, text in (*turns, ("user", "What now?"))]
    head = {
        "chat": {"messages": [{"role": "system", "content": IDENTITY}, *messages]},
        "responses": {"instructions": IDENTITY, "input": messages, "store": False},
        "messages": {"system": [{"type": "text", "text": IDENTITY}], "messages": messages, "max_tokens": 500},
    }
    return {"model": "m", **head[api], **fields}


def origins(
    upstream: Upstream,
    folder: Path,
    bodies: Sequence[tuple[str, Body]],
    summary: Mapping[str, Any] | None = None,
    speaks: Sequence[str] | None = None,
) -> list[str]:
    """Send requests, and return the origins of their summaries."""
    with serve(upstream.app) as url:
        main = {"base_url": f"{url}/v1", "api_key": "sk-up", **({"speaks": [*speaks]} if speaks else {})}
        settings = {
            "upstreams": {"main": main},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": {"prepare": None, "summary": dict(summary or {})}},
        }
        found = []
        with proxied(settings, folder) as entrance, httpx.Client(trust_env=False, timeout=60) as http:
            for api, body in bodies:
                answer = http.post(entrance + PATHS[api], json=body, headers={"authorization": "Bearer sk-me"})
                assert answer.status_code == 200, answer.text
                found.append(answer.headers["x-compaction-summary"])
    return found


OWN: dict[str, Any] = {
    "client_metadata": {"installation": "1"}, "x_new_field": {"a": 1}, "include_commentary": True, "guardrail": "g1",
    "betaFeature": "on", "trace_options": [1], "agent_id": "a",
}  # fmt: skip
"""Fields of one client that the proxy doesn't know."""

_EXTRA = {"type": "extra_forbidden", "loc": ["body", "NAME"], "msg": "Extra inputs are not permitted"}
WORDINGS: Sequence[Refusal] = (
    (400, {"error": {"message": "Unknown parameter: 'NAME'.", "param": "NAME", "code": "unknown_parameter"}}),
    (400, {"error": {"message": "Unrecognized request argument supplied: NAME"}}),
    (422, {"detail": [_EXTRA]}),
    (400, {"type": "error", "error": {"message": "NAME: Extra inputs are not permitted"}}),
    (400, {"error": {"message": 'Invalid JSON payload received. Unknown name "NAME": Cannot find field.'}}),
    (400, {"error": {"message": "property 'NAME' is unsupported", "type": "invalid_request_error"}}),
    (400, {"error": {"message": "Additional properties are not allowed ('NAME' was unexpected) - 'messages'"}}),
    (422, {"object": "error", "message": {"detail": [{**_EXTRA, "input": "k"}]}}),
    (400, {"detail": "Unsupported parameter: NAME"}),
)


def refusing(own: str | None, first: int) -> Rule:
    """Refuse unknown fields, one at a time in other words, but for the API ``own``."""

    def rule(api: str, body: Body) -> Refusal | None:
        name = next((name for name in body if name in OWN), None)
        if name is None or api == own:
            return None
        status, wording = WORDINGS[(first + [*OWN].index(name)) % len(WORDINGS)]
        return status, json.loads(json.dumps(wording).replace("NAME", name))

    return rule


@pytest.mark.parametrize("first", [0, 4, 6])
@pytest.mark.parametrize("own", APIS)
def test_fields_of_one_api_go_to_this_api_only(own: str, first: int, tmp_path: Path) -> None:
    upstream = Upstream(refusing(own, first))
    assert origins(upstream, tmp_path, [(own, conversation(own, "one", **OWN))]) == ["made"]
    assert [(api, status) for api, _, status in upstream.summaries] == [(own, 200)]
    assert OWN.items() <= upstream.summaries[0][1].items()


@pytest.mark.parametrize("first", [0, 4, 6])
@pytest.mark.parametrize(("own", "other"), [pair for pair in itertools.permutations(APIS, 2) if pair[1] != "messages"])
def test_a_refused_field_is_left_out_if_the_upstream_has_another_api(
    own: str, other: str, first: int, tmp_path: Path
) -> None:
    upstream = Upstream(refusing(None, first), [other])
    bodies = [(own, conversation(own, seed, **OWN)) for seed in ("one", "two")]
    assert origins(upstream, tmp_path, bodies, speaks=[other]) == ["made", "made"]
    assert len([1 for *_, status in upstream.summaries if status != 200]) <= len(OWN), "remembered"


SAYS: Sequence[Refusal] = (
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "Error"}}),
    (400, {"error": {"message": "system: This credential is only authorized for use with the Agent."}}),
    (403, {"error": {"message": "Only the Agent may use this plan."}}),
    (401, {"error": {"type": "authentication_error", "message": "OAuth authentication is currently not supported."}}),
    (400, {"detail": "Instructions are not valid"}),
    (422, {"detail": [{"loc": ["body", "system"], "msg": "Value error, unknown client", "type": "value_error"}]}),
)


def head_of(api: str, body: Body) -> str:
    if api == "chat":
        first = body["messages"][0]
        return str(first["content"]) if first["role"] == "system" else ""
    head = body.get("system", "") if api == "messages" else body.get("instructions", "")
    return head if isinstance(head, str) else str(head[0]["text"])


@pytest.mark.parametrize(("says", "api"), combined(3, range(len(SAYS)), APIS))
def test_an_upstream_that_takes_only_the_agents_prompt_continues_it(
    api: str, says: int, tmp_path: Path, caplog: Any
) -> None:
    upstream = Upstream(lambda api, body: None if head_of(api, body).startswith(IDENTITY) else SAYS[says])
    bodies = [(api, conversation(api, seed)) for seed in ("one", "two", "three")]
    assert origins(upstream, tmp_path, bodies) == ["made"] * 3
    statuses = [status for *_, status in upstream.summaries]
    assert statuses[-3:] == [200, 200, 200]
    assert len(statuses) <= 4, "the proxy doesn't ask for a transcript again"


BACKEND: Sequence[tuple[Callable[[Body], bool], Refusal]] = (
    (lambda body: not body.get("instructions"), (400, {"detail": "Instructions are required"})),
    (lambda body: body.get("stream") is not True, (400, {"detail": "Stream must be set to true"})),
    (lambda body: "max_output_tokens" in body, (400, {"detail": "Unsupported parameter: max_output_tokens"})),
    (lambda body: body.get("store") is not False, (400, {"detail": "Store must be set to false"})),
    (
        lambda body: '"role": "system"' in json.dumps(body["input"]),
        (400, {"detail": "System messages are not allowed"}),
    ),
)
"""The rules of a login's backend for the Responses API."""


@pytest.mark.parametrize(
    ("order", "method", "identity"),
    combined(3, [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 1, 0, 3)], ["transcript", "continue"], [False, True]),
)
def test_a_backend_with_several_demands(method: str, order: tuple[int, ...], identity: bool, tmp_path: Path) -> None:
    def rule(api: str, body: Body) -> Refusal | None:
        for broken, refusal in (BACKEND[number] for number in order):
            if broken(body):
                return refusal
        return SAYS[4] if identity and not body["instructions"].startswith(IDENTITY) else None

    upstream = Upstream(rule, ["responses"])
    bodies = [("responses", conversation("responses", seed, stream=True)) for seed in ("one", "two", "three")]
    assert origins(upstream, tmp_path, bodies, {"method": method}, ["responses"]) == ["made"] * 3
    assert [status for *_, status in upstream.summaries][-2:] == [200, 200]
    assert len(upstream.summaries) <= 3 + len(BACKEND) + 2 * identity


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_that_are_asked_at_once_learn_from_each_other(rows: int, tmp_path: Path) -> None:
    """A window so small that several parts of a transcript are summarized at once."""
    seen = itertools.count()

    def rule(api: str, body: Body) -> Refusal | None:
        if not is_summary(body):
            return None
        name = next((name for name in ("user", "metadata", "service_tier")[:rows] if name in body), None)
        next(seen)
        return None if name is None else (400, {"error": {"message": f"Unknown parameter: '{name}'."}})

    fields = {"user": "u", "metadata": {"a": "b"}, "service_tier": "flex"}
    bodies = [("chat", conversation("chat", seed, **fields)) for seed in ("one", "two")]
    assert origins(Upstream(rule, ["chat"]), tmp_path, bodies, {"max_tokens": 300}, ["chat"]) == ["made", "made"]
