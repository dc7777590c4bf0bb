"""Each word that a translation writes is refused in the wordings of real servers, whole and streamed."""

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest
from cachetools import TTLCache
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from proxy.upstream import traits
from tests.kit.refusals import WORDINGS, Refusal
from tests.kit.scripted import proxied
from tests.kit.three_apis import PATHS, Answer, Call, event
from tests.kit.waiting import until

_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
_OPTIONS = {"temperature": 0.5, "top_p": 0.9, "service_tier": "flex"}

ASKED: dict[str, dict[str, Any]] = {
    "messages": {
        "max_tokens": 900,
        **_OPTIONS,
        "metadata": {"user_id": "someone"},
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 5_000},
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "tools": [{"name": "get", "input_schema": _SCHEMA}],
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hi"}],
    },
    "responses": {
        "max_output_tokens": 900,
        **_OPTIONS,
        "user": "someone",
        "safety_identifier": "s",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": _SCHEMA}},
        "tool_choice": "required",
        "tools": [{"type": "function", "name": "get", "parameters": _SCHEMA}],
        "instructions": "Be brief.",
        "input": "hi",
    },
    "chat": {
        "max_completion_tokens": 900,
        **_OPTIONS,
        "user": "someone",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}},
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "get", "parameters": _SCHEMA}}],
        "messages": [{"role": "user", "content": "hi"}],
    },
}
BRIDGES = (("messages", "chat"), ("responses", "chat"), ("chat", "responses"), ("messages", "responses"))
KEPT = frozenset(
    {
        *("model", "messages", "input", "tools", "tool_choice", "response_format", "text", "text.format", "stream"),
        *("store", "prompt_cache_retention", "max_output_tokens"),
    }
)
"""Fields that no refusal changes."""

INSIDE = ("stream_options.include_usage", "reasoning.effort", "text.verbosity", "text.format")


class Case(NamedTuple):
    client: str
    upstream: str
    stream: bool
    field: str
    wording: str
    how: str = "status"
    """Where the refusal is: in the ``status``, or with status 200 ``whole``, or in an event of a stream."""
    otherwise: int = 200
    """The status of the answer to a request without the field. ``field`` may be several ones."""

    @property
    def model(self) -> str:
        return "-".join([self.upstream, *map(str, self)]).replace(" ", "_")


class Picky:
    """An upstream whose models each refuse one field, in the wording of one server.

    A ``hostile`` model refuses another field of the request each time, in other words.
    """

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.hostile: dict[str, int] = {}
        self.answers: dict[str, Answer] = {}
        self.sent: dict[str, list[dict[str, Any]]] = {}
        self.app = Starlette(routes=[Route(path, self._answer, methods=["POST"]) for path in PATHS.values()])

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.sent.setdefault(body["model"], []).append(body)
        api = next(name for name, path in PATHS.items() if request.url.path == path)
        if body["model"] in self.hostile:
            self.hostile[body["model"]] = number = self.hostile[body["model"]] + 1
            field, wording = [*body][number % len(body)], [*WORDINGS.values()][number % len(WORDINGS)]
            return _refused(wording(field, body[field]))
        case = self.cases.get(body["model"])
        for field in case.field.split() if case else ():
            if case is not None and (value := at(body, field)) is not None:
                return _told(WORDINGS[case.wording](field, value), api, case.how)
        if case is not None and case.otherwise != 200:
            return _refused(Refusal(case.otherwise, b'{"error":{"message":"Something else."}}'))
        answer = self.answers.get(body["model"], Answer("Noted."))
        events, whole = answer.parts(api, stream=bool(body.get("stream")))
        if events:
            return Response(b"".join(events), media_type="text/event-stream")
        return Response(whole, media_type="application/json")


def _refused(refusal: Refusal) -> Response:
    return Response(refusal.body, refusal.status, media_type="application/json")


def _told(refusal: Refusal, api: str, how: str) -> Response:
    """Return a refusal with status 200, unless it has its own."""
    if how == "status":
        return _refused(refusal)
    if how == "whole":
        return Response(refusal.body, media_type="application/json")
    error = json.loads(refusal.body)["error"]
    begun = {"id": "r", "object": "response", "status": "in_progress", "output": []}
    role = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    opening = [event({"type": "response.created", "response": begun}) if api == "responses" else event(role)]
    if how == "failed":
        failed = {**begun, "status": "failed", "error": error}
        last = {"type": "response.failed", "response": failed}
    else:
        last = {**error, "type": "error"} if api == "responses" else {"error": error}
    events = [*(opening if how in ("late", "failed") else ()), event(last)]
    return Response(b"".join(events), media_type="text/event-stream")


def at(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


class Front(NamedTuple):
    upstream: Picky
    url: str
    http: httpx.Client
    hours: list[float]

    def ask(self, client: str, model: str, stream: bool) -> httpx.Response:
        body = {**ASKED[client], "model": model, "stream": stream}
        return self.http.post(f"{self.url}{PATHS[client]}", json=body)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    upstream, hours = Picky(), [0.0]
    clocked = partial(TTLCache, timer=lambda: hours[0] * 3_600)
    with (
        pytest.MonkeyPatch.context() as patch,
        serve(upstream.app) as url,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        patch.setattr(traits, "TTLCache", clocked)
        upstreams = {api: {"base_url": f"{url}/v1", "api_key": "k", "speaks": [api]} for api in ("chat", "responses")}
        profile = {"like": "gpt-5"}
        models = [{"match": f"{api}-*", "upstream": api, "profile": profile} for api in upstreams]
        settings = {"upstreams": upstreams, "models": models, "policies": {"default": {}}}
        with proxied(settings, tmp_path_factory.mktemp("front")) as entrance:
            yield Front(upstream, entrance, http, hours)


def written(front: Front, client: str, upstream: str, stream: bool) -> list[str]:
    """Return the fields that leave if nothing is refused."""
    model = f"{upstream}-{client}-probe-{stream}"
    assert front.ask(client, model, stream).status_code == 200
    body = front.upstream.sent[model][-1]
    return [name for name in (*body, *INSIDE) if at(body, name) is not None and name != "stream"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "upstream"), BRIDGES)
def test_a_refused_word_is_taken_back_and_the_next_request_leaves_right(
    client: str, upstream: str, stream: bool, front: Front, full: bool
) -> None:
    """Without ``--full``, each field has one of the wordings, and another one in each API."""
    wrong = []
    fields = written(front, client, upstream, stream)
    assert len(fields) >= 10
    turn = 2 * BRIDGES.index((client, upstream)) + stream
    for number, (place, field) in itertools.product(range(8 if full else 1), enumerate(fields)):
        wording = [*WORDINGS][(turn + place + number) % len(WORDINGS)]
        case = Case(client, upstream, stream, field, wording)
        front.upstream.cases[case.model] = case
        answers = [front.ask(client, case.model, stream) for _ in range(2)]
        seen = [answer.status_code for answer in answers], len(front.upstream.sent[case.model])
        expected = ([WORDINGS[wording](field, 1).status] * 2, 2) if field in KEPT else ([200, 200], 3)
        if seen != expected:
            wrong.append((field, wording, seen, answers[-1].text[:150]))
    assert wrong == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wording", WORDINGS)
def test_a_client_gets_the_refusal_of_its_own_word_unchanged(wording: str, stream: bool, front: Front) -> None:
    for api in ("chat", "responses"):
        case = Case(api, api, stream, "temperature", wording)
        front.upstream.cases[case.model] = case
        answers = [front.ask(api, case.model, stream) for _ in range(2)]
        refusal = WORDINGS[wording]("temperature", 0.5)
        assert [(answer.status_code, answer.content) for answer in answers] == [refusal, refusal]
        wishes = stream and api == "chat"  # the proxy's wish for the usage is the first suspect, once an hour
        assert len(front.upstream.sent[case.model]) == 2 + wishes


def test_several_refused_words_are_taken_back_one_after_the_other(front: Front) -> None:
    case = Case("messages", "chat", False, "temperature top_p stop", "OpenAI")
    front.upstream.cases[case.model] = case
    assert [front.ask("messages", case.model, False).status_code for _ in range(2)] == [200, 200]
    assert len(front.upstream.sent[case.model]) == 3 + 1 + 1
    assert all(name not in front.upstream.sent[case.model][-1] for name in case.field.split())


@pytest.mark.parametrize(("status", "first"), [(400, True), (429, False), (500, False)])
def test_the_first_of_two_refusals_is_for_the_client(status: int, first: bool, front: Front) -> None:
    case = Case("messages", "chat", False, "temperature", "OpenAI", otherwise=status)
    front.upstream.cases[case.model] = case
    answer = front.ask("messages", case.model, False)
    assert answer.status_code == status
    assert ("temperature" in answer.json()["error"]["message"]) is first


HOWS = [*((*bridge, how) for bridge in BRIDGES for how in ("first", "late", "whole")), ("chat", "responses", "failed")]


@pytest.mark.parametrize(("client", "upstream", "how"), [*HOWS, ("messages", "responses", "failed")])
def test_a_refusal_with_status_200_is_undone_like_another(client: str, upstream: str, how: str, front: Front) -> None:
    for field in ("temperature", "top_p", "reasoning.effort" if upstream == "responses" else "stop"):
        if client == "responses" and field == "stop":
            continue
        case = Case(client, upstream, True, field, "OpenAI", how)
        front.upstream.cases[case.model] = case
        answers = [front.ask(client, case.model, True) for _ in range(2)]
        assert all("Not" in answer.text and "ed." in answer.text for answer in answers)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [at(body, field) is None for body in front.upstream.sent[case.model]] == [False, True, True]


@pytest.mark.parametrize(("client", "upstream"), BRIDGES)
def test_a_hostile_upstream_gets_no_protected_part_changed(client: str, upstream: str, front: Front) -> None:
    model = f"{upstream}-{client}-hostile"
    front.upstream.hostile[model] = 0
    for turn in range(16):
        front.upstream.sent[model] = []
        assert front.ask(client, model, False).status_code in (400, 422)
        sent = front.upstream.sent[model]
        assert len(sent) <= 4, turn
        kept = [{name: body[name] for name in KEPT & body.keys()} for body in sent]
        assert kept == [kept[0]] * len(sent)


def test_a_misread_refusal_costs_one_call_an_hour(front: Front) -> None:
    """The upstream blames a field for another reason than its being there."""
    model = "chat-messages-misread"
    refuses = WORDINGS["OpenAI"]("temperature", 0.5)
    calls = []
    always = Case("messages", "chat", False, "messages", "misread")
    front.upstream.cases[model] = always
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORDINGS, "misread", lambda field, value: refuses)
        for hour in (0.0, 0.5, 0.9, 1.1, 1.5):
            front.hours[0] = hour
            front.upstream.sent[model] = []
            assert front.ask("messages", model, False).status_code == 400
            calls.append(len(front.upstream.sent[model]))
    assert calls == [2, 1, 1, 2, 1]


def test_what_helped_is_remembered_for_a_day(front: Front) -> None:
    case = Case("messages", "chat", False, "top_p", "Groq")
    model = "chat-messages-day"
    front.upstream.cases[model] = case
    start, calls = front.hours[0], []
    for hour in (0, 23, 25):
        front.hours[0] = start + hour
        front.upstream.sent[model] = []
        assert front.ask("messages", model, False).status_code == 200
        calls.append(len(front.upstream.sent[model]))
    assert calls == [2, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_that_was_left_out_ends_the_answer(stream: bool, front: Front) -> None:
    case = Case("messages", "chat", stream, "stop", "Groq")
    model = f"chat-messages-stops-{stream}"
    front.upstream.cases[model] = case
    front.upstream.answers[model] = Answer("All of this. END and nothing of that.")  # its halves part at the sequence
    for _ in range(2):
        answer = front.ask("messages", model, stream).text
        assert '"stop_reason":"stop_sequence"' in answer
        assert '"stop_sequence":"END"' in answer
        assert "this. " in answer
        assert "nothing" not in answer
    assert [body.get("stop") for body in front.upstream.sent[model]] == [["END"], None, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "upstream"), BRIDGES)
def test_a_client_that_wants_one_call_gets_one(client: str, upstream: str, stream: bool, front: Front) -> None:
    model = f"{upstream}-{client}-calls-{stream}"
    front.upstream.cases[model] = Case(client, upstream, stream, "parallel_tool_calls", "OpenAI")
    front.upstream.answers[model] = Answer(calls=(Call("call_1", "get", '{"path":"a"}'), Call("call_2", "get")))
    for _ in range(2):
        answer = front.ask(client, model, stream)
        assert answer.status_code == 200
        assert "call_1" in answer.text
        assert "call_2" not in answer.text
    assert len(front.upstream.sent[model]) == 3


@pytest.mark.parametrize(("client", "upstream"), BRIDGES)
def test_json_that_strict_parsers_refuse_is_translated(client: str, upstream: str, front: Front) -> None:
    r"""Clients cut texts within an emoji: anthropics/claude-code #56064 and #6199, elizaOS/eliza #18079."""
    model = f"{upstream}-{client}-odd"
    body = json.dumps({**ASKED[client], "model": model}).replace('"hi"', r'"hi \ud83d"').replace("0.9", "1e999")
    huge = body.replace('"string"', f'"string", "maximum": {10**30}', 1)
    for sent in (body, huge):
        headers = {"content-type": "application/json"}
        answer = front.http.post(f"{front.url}{PATHS[client]}", content=sent, headers=headers)
        assert answer.status_code == 200, answer.text
    assert all(r"hi \ufffd" in json.dumps(sent) for sent in front.upstream.sent[model])


def test_a_record_names_a_tier_that_was_left_out(front: Front) -> None:
    model = "chat-responses-record"
    front.upstream.cases[model] = Case("responses", "chat", False, "service_tier", "Groq")
    ids = [front.ask("responses", model, False).headers["x-compaction-id"] for _ in range(2)]
    records = lambda: [front.http.get(f"{front.url}/compaction/requests/{id}").json() for id in ids]  # noqa: E731
    assert until(lambda: all("edited" in record for record in records()))
    assert [record["edited"] for record in records()] == [["without service_tier"]] * 2
