"""The limits of a team, as its clients see them."""

import contextlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from proxy.access import quotas
from proxy.telemetry.metrics import SUMMARIES, refused
from tests.kit.client import JSON
from tests.kit.client import ask as http
from tests.kit.program import call
from tests.kit.scripted import behind, chat, client, key_hash
from tests.kit.upstream import WORDS_PER_CHUNK, Reply, StandIn
from tests.kit.waiting import until

WINDOW = 16_000
LONG = chat(7, 1_000)
"""A conversation just over the trigger."""
SHORT: list[Any] = [{"role": "user", "content": "Hello"}]

SEARCH, OTHER = "cp-search", "cp-other"


def limited(upstream: StandIn, folder: Path, **limits: int) -> AbstractContextManager[str]:
    """Return the URL of a proxy whose teams ``search`` and ``other`` have these limits each."""
    expired = {"hash": key_hash("cp-old"), "expires": "2020-01-31"}
    teams = {
        "search": {"keys": [key_hash(SEARCH), expired], "limits": limits},
        "other": {"keys": [key_hash(OTHER)], "limits": limits},
    }
    return behind(upstream, folder, auth={"mode": "keys"}, teams=teams)


def ask(caller: openai.OpenAI, messages: list[Any]) -> Mapping[str, str]:
    return caller.chat.completions.with_raw_response.create(model="m", messages=messages).headers


def refusal(caller: openai.OpenAI) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as caught:
        ask(caller, SHORT)
    error = caught.value
    assert (error.code, error.type, error.param) == ("rate_limit_exceeded", "requests", None)
    assert error.response.headers["x-compaction"] == "none"
    return error


def test_a_key_that_has_expired_says_so(tmp_path: Path) -> None:
    upstream = StandIn()
    with limited(upstream, tmp_path) as url, client(url, "cp-old") as caller:
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(caller, SHORT)
        assert "expired on 2020-01-31" in str(caught.value)
        assert caught.value.code == "invalid_api_key"
    assert upstream.requests == []


def test_the_rate_is_a_teams_own(tmp_path: Path) -> None:
    upstream = StandIn()
    before = refused("rate")._value.get()
    with (
        limited(upstream, tmp_path, requests_per_minute=3) as url,
        client(url, SEARCH) as search,
        client(url, OTHER) as other,
    ):
        for _ in range(3):
            ask(search, SHORT)
        error = refusal(search)
        assert "3 requests per minute" in error.message
        assert error.response.headers["retry-after"] == "20"
        # Every path counts, and every one is refused.
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/embeddings"),
            ("GET", "/compaction/archive/" + "0" * 20),
        ):
            headers = {"authorization": f"Bearer {SEARCH}"}
            answer = httpx.request(method, url + path, headers=headers, trust_env=False)
            assert answer.status_code == 429, path
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert answer.headers["retry-after"] == "20"
        for _ in range(3):
            ask(other, SHORT)
        refusal(other)
    assert len(upstream.requests) == 6
    assert upstream.others == []
    assert refused("rate")._value.get() == before + 5


def test_the_openai_client_waits_and_tries_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MINUTE", 2.0)
    upstream = StandIn()
    with limited(upstream, tmp_path, requests_per_minute=2) as url, client(url, SEARCH) as caller:
        patient = caller.with_options(max_retries=4)
        for _ in range(4):
            ask(patient, SHORT)
    assert len(upstream.requests) == 4


def test_requests_at_the_same_time_are_a_teams_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def held_stream(body: dict[str, Any]) -> Reply:
        words = "word " * WORDS_PER_CHUNK * 8
        return Reply(content=words, go=go) if body.get("stream") else Reply(content="Done.")

    upstream = StandIn(responder=held_stream)
    with limited(upstream, tmp_path, concurrent=2) as url, client(url, SEARCH) as search, client(url, OTHER) as other:
        streams = [search.chat.completions.create(model="m", messages=SHORT, stream=True) for _ in range(2)]
        for stream in streams:
            next(stream)
        # A stream holds its place until its end.
        monkeypatch.setattr(quotas, "WAIT_SECONDS", 0.2)
        error = refusal(search)
        monkeypatch.setattr(quotas, "WAIT_SECONDS", 20.0)
        assert "limit of 2 concurrent requests" in error.message
        assert error.response.headers["retry-after"] == "1"
        ask(other, SHORT)
        go.set()
        for stream in streams:
            list(stream)
        ask(search, SHORT)
        # A client that leaves releases its place.
        go.clear()
        streams = [search.chat.completions.create(model="m", messages=SHORT, stream=True) for _ in range(2)]
        for stream in streams:
            next(stream)
            stream.close()
        ask(search, SHORT)
    assert upstream.faults == []


def test_those_who_wait_for_a_place_are_no_more_than_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "WAIT_SECONDS", 60.0)
    go = threading.Event()
    upstream = StandIn(responder=lambda body: Reply(content="Done.", go=go))
    with (
        limited(upstream, tmp_path, concurrent=2) as url,
        client(url, SEARCH) as caller,
        ThreadPoolExecutor(10) as pool,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(go.set)
        asked = [pool.submit(ask, caller, SHORT) for _ in range(10)]
        # Nothing has been answered so far: two are in work, two wait, and the others are told at once.
        for refused_one in islice(as_completed(asked, 20), 6):
            assert isinstance(refused_one.exception(), openai.RateLimitError)
        assert sum(one.done() for one in asked) == 6
        go.set()
        assert sorted(type(one.exception()).__name__ for one in asked) == [*["NoneType"] * 4, *["RateLimitError"] * 6]


def outcomes(name: str) -> float:
    return float(SUMMARIES.labels(outcome=name)._value.get())


def test_over_the_budget_a_digest_takes_the_summarys_place(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content="Goal: SUMMARY-1."))
    over = outcomes("over_budget")
    edited = [dict(message) for message in LONG]
    edited[3]["content"] = edited[3]["content"].replace("Question 1:", "Question one:")
    again = [dict(message) for message in edited]
    again[5]["content"] = again[5]["content"].replace("Question 2:", "Question two:")
    with (
        limited(upstream, tmp_path, summary_tokens_per_day=20_000) as url,
        client(url, SEARCH) as search,
        client(url, OTHER) as other,
    ):
        assert ask(search, LONG)["x-compaction-summary"] == "made"
        headers = ask(search, edited)
        (first,) = upstream.summaries
        assert 10_000 < first.tokens < 20_000, "the budget covers this one, and not two"
        assert (headers["x-compaction"], headers["x-compaction-summary"]) == ("compacted", "digest")
        assert "x-compaction-breaker" not in headers
        assert outcomes("over_budget") == over + 1
        assert "from the messages without a model" in json.dumps(upstream.conversations[-1].body["messages"])
        # A stored summary costs nothing.
        assert ask(search, LONG)["x-compaction-summary"] == "stored"
        assert ask(other, edited)["x-compaction-summary"] == "made"
    made = len(upstream.summaries)
    with limited(upstream, tmp_path, summary_tokens_per_day=20_000) as url, client(url, SEARCH) as search:
        assert ask(search, again)["x-compaction-summary"] == "digest", "a restart does not begin anew"
    assert len(upstream.summaries) == made
    with limited(upstream, tmp_path) as url, client(url, SEARCH) as search:
        assert ask(search, again)["x-compaction-summary"] == "made"
    assert {request.status for request in upstream.conversations} == {200}
    assert upstream.faults == []


def test_no_budget_at_all_is_no_fault_of_the_model(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    with limited(upstream, tmp_path, summary_tokens_per_day=0) as url, client(url, SEARCH) as caller:
        for number in range(5):
            edited = [*LONG[:-1], {"role": "user", "content": f"What now, {number}?"}]
            edited[1] = {"role": "user", "content": f"{number} {edited[1]['content']}"}
            headers = ask(caller, edited)
            assert headers["x-compaction-summary"] == "digest"
            assert "x-compaction-breaker" not in headers
    assert upstream.summaries == []


def test_a_team_over_its_budget_is_refused_and_others_are_not(tmp_path: Path) -> None:
    teams = {
        "search": {"keys": [key_hash(SEARCH)], "limits": {"spend": {"tokens": 30, "per": "day"}}},
        "other": {"keys": [key_hash(OTHER)], "limits": {"spend": {"usd": 1_000, "per": "month"}}},
    }
    with behind(StandIn(), tmp_path, auth={"mode": "keys"}, teams=teams, prices={"m": FREE_MODEL["free"]}) as url:
        with client(url, SEARCH) as caller:
            assert ask(caller, SHORT)["x-compaction-budget-remaining"] == "30 tokens"
            with pytest.raises(openai.APIStatusError) as caught:
                list(iter(lambda: ask(caller, SHORT)["x-compaction-budget-remaining"], "0 tokens"))
        assert (caught.value.code, caught.value.type) == ("budget_exceeded", "insufficient_quota")
        with client(url, OTHER) as caller:
            assert ask(caller, SHORT)["x-compaction-budget-remaining"] == "1000.0000 USD"


PRICED = {"paid": {"input_cost_per_token": 0.001, "output_cost_per_token": 0.001}}
FREE_MODEL = {"free": {"input_cost_per_token": 0, "output_cost_per_token": 0}}
ASKED = {
    "/v1/chat/completions": {"messages": SHORT},
    "/v1/responses": {"input": "Hello"},
    "/v1/compress": {"messages": SHORT},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/images/generations": {"prompt": "A house"},
}
FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--x--\r\n'


def spending(upstream: StandIn, folder: Path, usd: float) -> AbstractContextManager[str]:
    teams = {"search": {"keys": [key_hash(SEARCH)], "limits": {"spend": {"usd": usd, "per": "day"}}}}
    return behind(upstream, folder, auth={"mode": "keys"}, teams=teams, prices=PRICED | FREE_MODEL)


def test_a_budget_in_dollars_refuses_models_without_a_price(tmp_path: Path) -> None:
    upstream = StandIn()
    headers = [JSON, ("authorization", f"Bearer {SEARCH}")]
    with spending(upstream, tmp_path, 1_000) as url:
        for path in ASKED:
            body = json.dumps({"model": "unpriced", **ASKED[path]}).encode()
            refused_one = http(url, path, body, headers)
            assert (refused_one.status, refused_one.error["code"]) == (403, "model_not_allowed"), path
            assert "'unpriced' has no price" in refused_one.error["message"]
        form = ("content-type", "multipart/form-data; boundary=x")
        assert http(url, "/v1/audio/transcriptions", FORM, [form, headers[1]]).status == 403
        assert upstream.requests == upstream.others == []
        assert http(url, body=json.dumps({"model": "paid", "messages": SHORT}).encode(), headers=headers).status == 200


def test_a_budget_that_is_used_up_leaves_models_that_cost_nothing(tmp_path: Path) -> None:
    upstream = StandIn()
    headers = [JSON, ("authorization", f"Bearer {SEARCH}")]

    def status(path: str, model: str, **more: Any) -> int:
        return http(url, path, json.dumps({"model": model, **ASKED[path], **more}).encode(), headers).status

    with spending(upstream, tmp_path, 0.001) as url:
        assert status("/v1/chat/completions", "paid") == 200
        assert until(lambda: status("/v1/chat/completions", "paid") == 402)
        for path in ASKED:
            assert status(path, "free") not in (402, 403), path
            assert status(path, "paid") == 402, path
        assert status("/v1/chat/completions", "free", stream=True) == 200
        sent = len(upstream.requests)
        twice = json.dumps({"model": "free", "messages": SHORT}).encode().replace(b"{", b'{"model": "paid", ', 1)
        assert http(url, body=twice, headers=headers).status in (402, 403)
        assert status("/v1/chat/completions", "free", fallbacks=["paid"]) in (402, 403)
        assert len(upstream.requests) == sent


def test_official_clients_send_one_request_to_a_budget_that_is_used_up(tmp_path: Path) -> None:
    teams = {"search": {"keys": [key_hash(SEARCH)], "limits": {"spend": {"tokens": 1, "per": "month"}}}}
    counted = refused("budget")._value.get
    with (
        behind(StandIn(), tmp_path, auth={"mode": "keys"}, teams=teams) as url,
        httpx.Client(trust_env=False) as direct,
        httpx2.Client(trust_env=False) as other,
        openai.OpenAI(base_url=f"{url}/v1", api_key=SEARCH, max_retries=5, http_client=direct) as chat_client,
        anthropic.Anthropic(base_url=url, api_key=SEARCH, max_retries=5, http_client=other) as claude,
    ):
        ask(chat_client, SHORT)
        headers = [JSON, ("authorization", f"Bearer {SEARCH}")]
        assert until(lambda: http(url, body=BODY, headers=headers).status == 402)
        before, errors = counted(), []
        for send in (
            lambda: chat_client.chat.completions.create(model="m", messages=SHORT),
            lambda: chat_client.chat.completions.create(model="m", messages=SHORT, stream=True),
            lambda: chat_client.responses.create(model="m", input="Hello"),
            lambda: chat_client.embeddings.create(model="m", input="Hello"),
            lambda: claude.messages.create(model="m", max_tokens=9, messages=SHORT),
        ):
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
                send()
            errors.append(caught.value)
        assert counted() - before == len(errors) == 5
    assert {error.status_code for error in errors} == {402}
    for error in errors:
        headers = error.response.headers
        assert headers["x-should-retry"] == "false"
        assert "retry-after" not in headers, "some clients would wait until the next month"
        assert "used up its budget of 1 tokens per month" in error.message
    assert {(error.code, error.type) for error in errors[:-1]} == {("budget_exceeded", "insufficient_quota")}
    assert errors[-1].body["error"]["type"] == "billing_error"


PAID = [
    *(
        f"/v1/chat/completions{end}"
        for end in (";/cancel", "%3f/cancel", "%23/cancel", "/cancel", "//cancel", "/x/cancel")
    ),
    *(
        "/v1/completions/count_tokens",
        "/v1/responses/cancel",
        "/v1/responses/r_1/cancel/x",
    ),
    *(
        "/v1/messages/batches",
        "/v1/messages/count_tokens;x",
        "/v1/messages/count_tokens%3Fa",
        "/v1/messages/Count_Tokens",
    ),
    *(
        "/v1/Files",
        "/v1/%66iles",
        "/v1/files;a",
        "/v1/files%3Fx",
        "/v1/files\\\\x",
        "/v1/files/%252e%252e/chat/completions",
    ),
]
FREE = [
    *("/v1/files", "/v1/files/file-1/", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
    *(
        "/v1/responses/resp_1/cancel",
        "/v1/batches/batch_1/cancel",
        "/v1/threads/t/runs/r/cancel",
        "/v1/vector_stores/a.b",
    ),
    *("/v1//files/x", "/v1/files//x", "/v1/responses//input_tokens"),
]

BODY = json.dumps({"model": "m", "messages": SHORT}).encode()


def test_only_plain_paths_are_free_once_a_budget_is_used_up(tmp_path: Path) -> None:
    teams = {"search": {"keys": [key_hash(SEARCH)], "limits": {"spend": {"tokens": 1, "per": "day"}}}}
    headers = [JSON, ("authorization", f"Bearer {SEARCH}")]
    with behind(StandIn(), tmp_path, auth={"mode": "keys"}, teams=teams) as url:
        assert http(url, body=BODY, headers=headers).status == 200
        assert until(lambda: http(url, body=BODY, headers=headers).status == 402)
        for method in ("POST", "PUT", "PATCH", "GET", "DELETE"):  # some servers generate for any method with a body
            assert [path for path in PAID if http(url, path, BODY, headers, method).status != 402] == []
            assert [path for path in FREE if http(url, path, BODY, headers, method).status == 402] == []
        assert http(url, "/v1/x?_METHOD=POST", BODY, headers, "DELETE").status == 402
        for method in ("GET", "DELETE"):
            assert [
                path for path in ("/v1/files", PAID[0]) if http(url, path, None, headers, method).status == 402
            ] == []


def test_a_budget_shows_wherever_one_looks(tmp_path: Path) -> None:
    spend = {"search": {"tokens": 1_000_000, "per": "day"}, "other": {"usd": 2.5, "per": "month"}}
    teams = {
        "search": {"keys": [key_hash(SEARCH)], "limits": {"spend": spend["search"]}},
        "other": {"keys": [key_hash(OTHER)], "limits": {"spend": spend["other"]}},
    }
    store = {"url": f"sqlite:///{tmp_path}/store.db"}
    admin = {"admin": {"keys": [key_hash("cp-admin")]}, "auth": {"mode": "keys"}, "store": store}
    with (
        behind(StandIn(), tmp_path, teams=teams, **admin) as url,
        client(url, SEARCH) as caller,
        httpx.Client(base_url=url, headers={"authorization": "Bearer cp-admin"}, trust_env=False) as operator,
    ):
        usage = caller.chat.completions.create(model="m", messages=SHORT).usage
        assert usage is not None
        used = f"{usage.total_tokens} tokens"

        def budgets(path: str, **parameters: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = operator.get(f"/compaction/{path}", params=parameters).json()["budgets"]
            return found

        assert until(lambda: budgets("status")[1]["used"] == used)
        other, search = budgets("status")
        page = operator.get("/compaction/savings").text
        assert budgets("report") == [other, search]
        assert budgets("report", team="other") == [other]
        own = httpx.get(f"{url}/compaction/status", headers={"authorization": f"Bearer {OTHER}"}, trust_env=False)
    left = f"{1_000_000 - usage.total_tokens:,} tokens"
    assert (search["limit"], search["left"]) == ("1,000,000 tokens per day", left)
    assert (other["limit"], other["used"], other["left"]) == ("2.50 USD per month", "0.0000 USD", "2.5000 USD")
    assert search["again"].endswith("T00:00:00.000Z")
    assert own.json()["budgets"] == [other], "a team sees its own"
    again = f"{search['again'][:10]} 00:00"
    assert all(f'<td class="n">{text}</td>' in page for text in (used, left))
    assert f"<td>{again}</td>" in page
    sentence = f"1,000,000 tokens per day: {used} used, {left} left; it begins again at {again} UTC"
    assert sentence in " ".join(call(tmp_path, "check", "config.yaml", "--team", "search").stdout.split())
    assert f"Budget of search: {sentence}." in " ".join(
        call(tmp_path, "report", "--config", "config.yaml").stdout.split()
    )
    assert json.loads(call(tmp_path, "report", "--config", "config.yaml", "--json").stdout)["budgets"] == [
        other,
        search,
    ]
    (tmp_path / "store.db").unlink()
    elsewhere = call(tmp_path, "check", "config.yaml", "--team", "search", COLUMNS="150").stdout
    assert "1,000,000 tokens per day: an unknown amount;" in elsewhere, "only the server's machine has the store"
