"""Refusals as gateways and providers outside OpenAI's style send them, and errors about other matters."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import brotli
import httpx
import openai
import pytest
import zstandard

from tests.kit.refusing import ANSWER, First, Refusing
from tests.kit.scripted import behind, chat, client, words
from tests.kit.upstream import gather

LIMIT = 5_000
SENTENCE = f"The prompt has 6200 tokens, but this model takes {LIMIT} tokens of context at most."
ELSE = "The tool named in message 3 is not known."
JSON = ("content-type", "application/json")
EVENTS = ("content-type", "text/event-stream")
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@pytest.fixture(scope="module")
def upstream() -> Refusing:
    return Refusing()


@pytest.fixture(scope="module")
def caller(upstream: Refusing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a proxy that believes in a far larger window; each test has a model of its own."""
    profile = {"context_window": 320_000, "tokenizer": "o200k_base"}
    with behind(upstream, tmp_path_factory.mktemp("shapes"), profile=profile) as url, client(url) as asking:
        yield asking


SHAPES: dict[str, Callable[[str], Any]] = {
    "code and message": lambda said: {"code": 20_015, "message": said, "data": None},
    "response": lambda said: {"Response": {"Error": {"Code": "Invalid", "Message": said}, "RequestId": "r"}},
    "detail array": lambda said: {"detail": [{"loc": ["body", "messages"], "msg": said, "input": "x" * 9_000}]},
    "error in a choice": lambda said: {
        "id": "c",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "error": {"message": said}}],
    },
    "no choices": lambda said: {"id": "c", "choices": [], "object": "error", "message": said},
    "lambda": lambda said: {"statusCode": 400, "body": json.dumps({"error": {"message": said}})},
    "error": lambda said: {"id": "c", "error": {"message": said}, "usage": None},
}


def ask(caller: openai.OpenAI, model: str, *, stream: bool) -> tuple[str, str]:
    """Return the answer, and the number of retries for it."""
    messages = chat(10, 300)
    answer: Any = caller.chat.completions.with_raw_response.create(model=model, messages=messages, stream=stream)
    said = gather(answer.parse())["content"] if stream else answer.parse().choices[0].message.content
    return said, answer.headers["x-compaction-retries"]


def bytes_of(caller: openai.OpenAI, model: str, *, stream: bool) -> tuple[int, bytes]:
    body = {"model": model, "messages": chat(10, 300), "stream": stream}
    headers = {"authorization": "Bearer k", "accept-encoding": "gzip, deflate, br, zstd"}
    url = f"{caller.base_url}chat/completions"
    with (
        httpx.Client(trust_env=False, timeout=30) as http,
        http.stream("POST", url, json=body, headers=headers) as answer,
    ):
        return answer.status_code, b"".join(answer.iter_raw())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_refusal_in_a_200(shape: str, stream: bool, upstream: Refusing, caller: openai.OpenAI) -> None:
    model = f"200 {shape} {stream}"
    upstream.firsts[model] = First(200, [json.dumps(SHAPES[shape](SENTENCE)).encode()], (JSON,))
    assert ask(caller, model, stream=stream) == (ANSWER, "1")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_another_error_in_a_200_arrives_as_it_came(
    shape: str, stream: bool, upstream: Refusing, caller: openai.OpenAI
) -> None:
    model = f"else {shape} {stream}"
    body = json.dumps(SHAPES[shape](ELSE), indent=1).encode()
    upstream.firsts[model] = First(200, [body], (JSON,))
    assert bytes_of(caller, model, stream=stream) == (200, body)
    assert len(upstream.asked[model]) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_refusal_as_an_event(shape: str, upstream: Refusing, caller: openai.OpenAI) -> None:
    events = b": wait\n\ndata: " + json.dumps(SHAPES[shape](SENTENCE)).encode() + b"\n\n"
    for kind in (EVENTS, JSON):
        model = f"event {shape} {kind[1]}"
        upstream.firsts[model] = First(200, [events], (kind,))
        assert ask(caller, model, stream=True) == (ANSWER, "1")


def test_the_sentence_is_added_to_whatever_shape(upstream: Refusing, caller: openai.OpenAI) -> None:
    """A system prompt that alone is too large: the proxy can't make anything smaller."""
    messages = [{"role": "system", "content": words(6_200, "system")}, {"role": "user", "content": "What now?"}]
    for number, (shape, of) in enumerate(SHAPES.items()):
        if shape == "lambda":
            continue  # a JSON text within JSON
        whole = json.dumps(of(SENTENCE)).encode()
        for status, body, kind in (
            (200, whole, JSON),
            (400, whole, JSON),
            (200, b"event: error\ndata: " + whole + b"\n\n", EVENTS),
            (200, b"data: " + whole + b"\n\n", JSON),
        ):
            if shape == "error in a choice" and (status == 400 or kind is EVENTS):
                continue  # what failed as a whole has no choices
            model = f"added {number} {status} {body[:5]!r} {kind[1]}"
            upstream.firsts[model] = First(status, [body], (kind,))
            asked = {"model": model, "messages": messages, "stream": kind is EVENTS}
            url = f"{caller.base_url}chat/completions"
            with httpx.Client(trust_env=False, timeout=30) as http:
                answer = http.post(url, json=asked, headers={"authorization": "Bearer k"})
            assert answer.status_code == status
            assert len(upstream.asked[model]) == 1
            _, separator, end = answer.text.partition(SENTENCE)
            assert separator, (shape, answer.text)
            assert end.startswith(" (The compaction proxy couldn't make the request small enough. "), (shape, end)
            for line in answer.text.splitlines():
                if "{" in line:
                    json.loads(line.removeprefix("data: "))


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("named", [b"", b"event: error\n", b"event: exception\n"])
def test_an_event_in_pieces(named: bytes, end: bytes, upstream: Refusing, caller: openai.OpenAI) -> None:
    error = b"data: " + json.dumps({"code": 400, "message": SENTENCE}).encode() + b"\n\n"
    events = b"\xef\xbb\xbf: wait\n\n" + ROLE + b": wait\n\n" + named + error
    events = events.replace(b"\n", end)
    for size in (1, 7, len(events)):
        model = f"pieces {named!r} {end!r} {size}"
        pieces = [events[at : at + size] for at in range(0, len(events), size)]
        upstream.firsts[model] = First(200, pieces, (EVENTS,))
        assert ask(caller, model, stream=True) == (ANSWER, "1")


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_compressed_refusal(packing: str, status: int, upstream: Refusing, caller: openai.OpenAI) -> None:
    packed = PACKINGS[packing](json.dumps({"detail": {"error": SENTENCE}}).encode())
    other = PACKINGS[packing](json.dumps({"detail": {"error": ELSE}}).encode())
    headers = (JSON, ("content-encoding", packing))
    model = f"{packing} {status}"
    upstream.firsts[model] = First(status, [packed[:9], packed[9:]], headers)
    assert ask(caller, model, stream=False) == (ANSWER, "1")
    upstream.firsts[f"else {model}"] = First(status, [other], headers)
    assert bytes_of(caller, f"else {model}", stream=False) == (status, other)


def test_a_large_compressed_answer_is_passed_on_as_it_comes(upstream: Refusing, caller: openai.OpenAI) -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": f"{words(9_000, 'large')} {SENTENCE}"},
        "finish_reason": "stop",
    }
    body = json.dumps({"id": "c", "choices": [choice]}).encode()
    packed = zlib.compress(body, 0)
    headers = (JSON, ("content-encoding", "deflate"), ("content-length", str(len(packed))))
    upstream.firsts["large"] = First(200, [packed], headers)
    assert bytes_of(caller, "large", stream=False) == (200, packed)
    assert len(upstream.asked["large"]) == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_compressed_bytes_that_cannot_be_unpacked_arrive_as_they_came(
    packing: str, upstream: Refusing, caller: openai.OpenAI
) -> None:
    for status in (200, 400):
        model = f"broken {packing} {status}"
        upstream.firsts[model] = First(status, [b"no such thing"], (JSON, ("content-encoding", packing)))
        assert bytes_of(caller, model, stream=False) == (status, b"no such thing")


@pytest.mark.parametrize(
    "header", [("x-amzn-errortype", "ThrottlingException:http://internal/"), ("retry-after", "9")], ids=lambda h: h[0]
)
@pytest.mark.parametrize("status", [200, 400])
def test_headers_that_deny_it(header: tuple[str, str], status: int, upstream: Refusing, caller: openai.OpenAI) -> None:
    body = json.dumps({"code": 1, "message": f"Request has 6200 tokens, more than the maximum of {LIMIT}."}).encode()
    said = f"{header[0]} {status}"
    upstream.firsts[f"with {said}"] = First(status, [body], (JSON, header))
    assert bytes_of(caller, f"with {said}", stream=False) == (status, body)
    assert len(upstream.asked[f"with {said}"]) == 1
    upstream.firsts[f"without {said}"] = First(status, [body], (JSON,))
    assert ask(caller, f"without {said}", stream=False) == (ANSWER, "1")


def test_a_limit_above_the_count_is_taken_for_a_count_that_differs(upstream: Refusing, caller: openai.OpenAI) -> None:
    """The request fits by the proxy's count, but not with the reserve of the assumed window."""
    body = json.dumps({"error": {"message": "This model's maximum context length is 9000 tokens."}}).encode()
    upstream.firsts["above"] = First(400, [body], (JSON,))
    assert ask(caller, "above", stream=False) == (ANSWER, "1")


PHRASE = "maximum context length is 300 tokens"
URL = f"https://images.example/?{PHRASE}"
TPM = "on tokens per minute (TPM): Limit 2000, Requested {}. Visit https://console.example/limits for more."

ERRORS: list[tuple[str, int, dict[str, Any]]] = [
    ("image code", 400, {"message": f"Failed to load image: {URL}", "code": "invalid_image_url"}),
    ("image", 400, {"message": f"Failed to load image: {URL}"}),
    ("status", 400, {"message": f"404, message='Not Found', url='{URL}'"}),
    ("parameter", 400, {"message": f"Invalid parameter: 'tool_call_id' of '{PHRASE}' not found"}),
    ("json", 400, {"message": f"Failed to parse tool call arguments as JSON: {PHRASE}"}),
    ("quoted", 400, {"message": f"Refused by the guard. The text was: {PHRASE}"}),
    ("percent", 400, {"message": "Bad request: see prompt is too long and exceeds its window"}),
    (
        "param",
        400,
        {"message": "The maximum context length is 300 tokens", "param": "messages[0].content[1].image_url"},
    ),
    ("images", 400, {"message": "The number of images in the prompt exceeds the limit of 20."}),
    ("minutes", 400, {"message": "The input video is too long: 90 minutes, the limit is 60 minutes"}),
    ("a query", 400, {"message": "web_search: query too long. The tool input exceeds 400 characters."}),
    ("documents", 400, {"message": "Input exceeds the maximum of 10 documents"}),
    ("functions", 400, {"message": "The prompt has 300 functions, the limit is 128 functions"}),
    ("stop", 400, {"message": "Length of stop_seqs(16) exceeds the limit max_model_len(8). Please reduce the length."}),
    ("an id", 400, {"message": "The length of the conversation id exceeds 64"}),
    ("media", 400, {"message": "Too much media: 0 document pages + 107 images > 100"}),
    ("tools", 400, {"message": "You may not include more than 128 tools in your request."}),
    ("a range", 400, {"message": "Invalid max_tokens value, the valid range of max_tokens is [1, 4096]"}),
    ("a temperature", 400, {"message": "Invalid value for 'temperature': must be at most 2.", "param": "temperature"}),
    ("much output", 400, {"message": "max_tokens is too large: 9000. This model supports at most 4096 output tokens."}),
    ("a quoted one", 400, {"message": "Invalid 'messages[1].content': \"maximum context length is 8000 tokens\"."}),
    ("an error of the server", 500, {"message": "The server had an error.", "type": "server_error"}),
    ("waiting helps", 429, {"message": "Rate limit reached " + TPM.format(1_500), "code": "rate_limit_exceeded"}),
]


@pytest.fixture(scope="module")
def entrance(upstream: Refusing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    profile = {"context_window": 8_000, "tokenizer": "o200k_base"}
    policy = {"trigger": {"fraction": 1.0}}
    with behind(upstream, tmp_path_factory.mktemp("matters"), profile=profile, policy=policy) as entrance:
        yield entrance


def conversation() -> list[dict[str, Any]]:
    turns = [
        {"role": role, "content": f"{role} {turn}: " + "the garden behind the house was planted " * 15}
        for turn in range(12)
        for role in ("user", "assistant")
    ]
    quoting = {
        "role": "user",
        "content": f"Look at {URL}, at {PHRASE}, and at https://a.example/prompt%20is%20too%20long+and+exceeds+its+window",
    }
    return [*turns, quoting]


def asked(entrance: str, model: str, key: str = "k") -> httpx.Response:
    body = {"model": model, "messages": conversation()}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(trust_env=False, timeout=30) as http:
        return http.post(f"{entrance}/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(("name", "status", "error"), ERRORS, ids=[row[0] for row in ERRORS])
def test_the_error_arrives_unchanged_and_the_next_request_whole(
    name: str, status: int, error: dict[str, Any], upstream: Refusing, entrance: str
) -> None:
    body = json.dumps({"error": error}).encode()
    upstream.firsts[name] = First(status, [body], (("content-type", "application/json"),))
    refused = asked(entrance, name)
    assert (refused.status_code, refused.content) == (status, body)
    following = asked(entrance, name)
    assert following.headers["x-compaction"] == "none"
    assert [len(asked["messages"]) for asked in upstream.asked[name]] == [25, 25]


def test_an_older_error_in_the_conversation_hides_none(upstream: Refusing, entrance: str) -> None:
    """The figures are the upstream's own."""
    model = "quotes an error"
    message = "Sorry, maximum context length is 3000 tokens. However, your messages resulted in 3411 tokens."
    body = json.dumps({"error": {"message": message}}).encode()
    upstream.firsts[model] = First(400, [body], (("content-type", "application/json"),))
    assert asked(entrance, model).json()["choices"][0]["message"]["content"] == ANSWER
