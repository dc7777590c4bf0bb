"""Refusals as gateways and providers outside OpenAI's style send them: under status 200, in pieces, compressed."""

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
