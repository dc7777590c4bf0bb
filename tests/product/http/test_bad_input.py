"""Requests that are wrong: each is refused in OpenAI's shape with words that help, or passed on untouched."""

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import brotli
import pytest
import zstandard

from tests.kit.client import CHAT, JSON, Got, StartProxy, ask, chat, connected, request_bytes
from tests.kit.raw_upstream import RawUpstream

KEY = "sk-team-a"
ROUTED = {
    "auth": {"mode": "keys"},
    "upstreams": {"main": {"api_key": "sk-operators"}},
    "models": [{"match": "gpt-4o-mini", "upstream": "main"}, {"match": "gpt-4o", "upstream": "main"}],
    "teams": {"a": {"keys": [f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"], "models": ["gpt-4o-mini"]}},
}

HI = '"messages":[{"role":"user","content":"hi"}]'
MB = 1_000_000

Refusal = tuple[int, str]
PASSED: None = None
"""The upstream gets it as it is."""

NO_MODEL = (400, "invalid_body")
UNKNOWN = (404, "model_not_found")
ENCODING = (415, "unsupported_content_encoding")


@dataclass(frozen=True)
class Case:
    """A request, and what becomes of it without routes (``plain``) and with routes, keys and teams (``routed``)."""

    name: str
    body: bytes
    plain: Refusal | None = PASSED
    routed: Refusal | None = PASSED
    headers: tuple[tuple[str, str], ...] = (JSON,)


def fields(text: str) -> bytes:
    return ('{"model":"gpt-4o-mini",' + text + "," + HI + "}").encode()


def messages(text: str) -> bytes:
    return ('{"model":"gpt-4o-mini","messages":' + text + "}").encode()


def model(text: str) -> bytes:
    return ('{"model":' + text + "," + HI + "}").encode()


def encoded(name: str, how: str, body: bytes, refusal: Refusal) -> Case:
    return Case(name, body, refusal, refusal, (JSON, ("content-encoding", how)))


NO_JSON = {
    "nothing": b"",
    "white space": b" \n",
    "broken off": b'{"model":"gpt-4o-mini","messages":[{"role"',
    "a comma too many": b'{"model":"gpt-4o-mini","messages":[],}',
    "something after it": chat() + b" x",
    "NUL bytes": b"\x00" * 64,
    "a form": b"model=gpt-4o-mini&messages=hi",
    "noise": bytes(range(256)) * 8,
    "invalid UTF-8 in a key": b'{"\xff\xfe":1,"model\xff":"gpt-4o-mini"}',
    "invalid UTF-8 in the model": b'{"model":"gpt\xff",' + HI.encode() + b"}",
    "20,000 levels of lists": fields('"deep":' + "[" * 20_000 + "]" * 20_000),
    "20,000 levels in a message": messages('[{"role":"user","content":' + "[" * 20_000 + "]" * 20_000 + "}]"),
    "20,000 levels in the model": model("[" * 20_000 + "]" * 20_000),
    "levels that never close": b"[" * 100_000,
}

# Wrong in a way that is the upstream's to judge: the model can be read, or nothing depends on it.
FOR_THE_UPSTREAM = {
    "no messages": b'{"model":"gpt-4o-mini"}',
    **{f"messages: {value}": messages(value) for value in ("5", '"hi"', "{}", "null", "true", "[]")},
    **{f"messages: [{value}]": messages(f"[{value}]") for value in ("5", "null", '"hi"', "[]", "{}", "1e400")},
    **{f"role: {value}": messages(f'[{{"role":{value},"content":"x"}}]') for value in ("5", "null", '"critic"', "[]")},
    **{
        f"content: {value}": messages(f'[{{"role":"user","content":{value}}}]')
        for value in ("5", "{}", "true", "[5]", "[null]")
    },
    "an orphan result": messages('[{"role":"tool","tool_call_id":"c1","content":"x"}]'),
    "a call without a result": messages(
        '[{"role":"assistant","tool_calls":[{"id":"a"}]},{"role":"user","content":"x"}]'
    ),
    **{
        f"tool_calls: {value}": messages(f'[{{"role":"assistant","tool_calls":{value}}}]')
        for value in ("5", '"x"', "[5]", "[{}]", "{}")
    },
    **{
        f"{name}: {value}": fields(f'"{name}":{value}')
        for name, values in {
            "stream": ('"yes"', "1", "null", "[]"),
            "max_tokens": ("-5", "0", "1.5", '"many"', "1e400", "9" * 5_000, "null", "{}", "true"),
            "max_completion_tokens": ("-1", "1e308", "9223372036854775808"),
            "temperature": ("{}", "1e400", "-0.0"),
            "tools": ("5", '"x"', "{}", "[5]", "[null]", '[{"type":5}]'),
            "functions": ("5", "[5]", '[{"name":null}]'),
            "tool_choice": ("5", "[]", '{"function":5}'),
            "response_format": ("5", "[]", '{"type":5}', '{"type":"json_schema","json_schema":5}'),
            "stream_options": ("5", '{"include_usage":5}'),
            "n": ("-1", "1e9"),
            "metadata": ("5",),
        }.items()
        for value in values
    },
    "an answer of its own": fields('"mock_response":"x","extra_body":{"mock_response":"x"}'),
    "a byte order mark": b"\xef\xbb\xbf" + chat(),
    "UTF-16": chat().decode().encode("utf-16"),
    "UTF-32": chat().decode().encode("utf-32-le"),
    "invalid UTF-8 in a message": b'{"model":"gpt-4o-mini","messages":[{"role":"user","content":"\xff\xc3"}]}',
    "control characters": b'{"model":"gpt-4o-mini","messages":[{"role":"user","content":"a\x00\x01\nb"}]}',
    "not a number": fields('"temperature":NaN,"top_p":-Infinity'),
    "half a surrogate pair": fields('"user":"\\ud83d"'),
    "half a surrogate pair as a key": fields('"\\ud83d":1'),
    "a field of a megabyte": fields('"user":"' + "x" * MB + '"'),
    "a key of a megabyte": fields('"' + "x" * MB + '":1'),
}

CASES: Sequence[Case] = (
    *(Case(name, body, PASSED, NO_MODEL) for name, body in NO_JSON.items()),
    *(Case(name, body) for name, body in FOR_THE_UPSTREAM.items()),
    *(Case(f"model: {value}", model(value), PASSED, NO_MODEL) for value in ("null", "5", "[]", "{}", "true")),
    Case("no model", f"{{{HI}}}".encode(), PASSED, NO_MODEL),
    *(
        Case(name, model(value), PASSED, UNKNOWN)
        for name, value in {
            "an empty model": '""',
            "an unknown model": '"gpt-9"',
            "a model of a megabyte": '"' + "m" * MB + '"',
            "a model with line breaks": '"gpt-4o-mini\\r\\nx-injected: 1"',
            "a model with a path": '"../../admin?x=#"',
            "a model with NUL": '"gpt\\u0000"',
            "a model of half a surrogate pair": '"\\ud83d"',
            "a model with a glob": '"*"',
        }.items()
    ),
    # The proxy ignores these fields. A gateway behind it may follow them, past the team's list of models.
    *(
        Case(f"where it goes, by its own account: {text}", fields(text), PASSED, (403, "model_not_allowed"))
        for text in (
            '"api_base":"http://127.0.0.1:9/"',
            '"base_url":"http://127.0.0.1:9/"',
            '"api_key":"sk-x"',
            '"custom_llm_provider":"x"',
            '"extra_body":{"api_base":"http://127.0.0.1:9/"}',
            '"extra_body":{"litellm_params":{"api_key":"x"}}',
        )
    ),
    Case("a model of another team", model('"gpt-4o"'), PASSED, (403, "model_not_allowed")),
    Case(
        "the model twice",
        b'{"model":"gpt-4o-mini","model":"gpt-4o-mini","messages":[]}',
        PASSED,
        (403, "model_not_allowed"),
    ),
    Case("x-compaction: nonsense", chat(), NO_MODEL, NO_MODEL, (JSON, ("x-compaction", "please"))),
    Case("another content type", chat(), headers=(("content-type", "text/plain"),)),
    Case("a content type that is none", chat(), headers=(("content-type", ";;==,"),)),
    Case("no content type", chat(), headers=()),
    encoded("gzip that is none", "gzip", chat(), ENCODING),
    encoded("gzip that is broken off", "gzip", gzip.compress(chat())[:-9], ENCODING),
    encoded("gzip with something after it", "gzip", gzip.compress(chat()) + b"xx", ENCODING),
    encoded("gzip with a wrong checksum", "gzip", gzip.compress(chat())[:-8] + b"\0" * 8, ENCODING),
    encoded("deflate that is none", "deflate", chat(), ENCODING),
    encoded("br that is none", "br", chat(), ENCODING),
    encoded("br that is broken off", "br", brotli.compress(chat())[:-3], ENCODING),
    encoded("zstd that is none", "zstd", chat(), ENCODING),
    encoded("zstd that is broken off", "zstd", zstandard.compress(chat())[:-3], ENCODING),
    encoded("an unknown encoding", "snappy", chat(), ENCODING),
    encoded("an encoding with odd characters", "gzip;q=1", chat(), ENCODING),
    encoded("three encodings", "gzip, gzip, gzip", chat(), ENCODING),
)


@pytest.fixture(scope="module")
def plain(start_module_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_module_proxy(upstream.url)


@pytest.fixture(scope="module")
def routed(start_module_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_module_proxy(upstream.url, ROUTED)


def lives_on(url: str) -> None:
    assert ask(url, body=chat(), headers=[JSON, ("authorization", f"Bearer {KEY}")]).status == 200


def check(got: Got, refusal: Refusal | None, upstream: RawUpstream, before: int, body: bytes) -> None:
    if refusal is None:
        assert got.status == 200, got.body
        assert len(upstream.arrived) == before + 1
        assert upstream.last.body == body
        return
    error = got.error
    assert (got.status, error["code"]) == refusal
    assert len(upstream.arrived) == before
    # Words that say what to do, and no echo of a megabyte.
    assert len(error["message"]) < 400
    assert any(verb in error["message"] for verb in ("Send", "Ask", "Use", "Correct"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(plain: str, routed: str, upstream: RawUpstream, case: Case) -> None:
    rejects_or_passes(plain, routed, upstream, case)


def rejects_or_passes(plain: str, routed: str, upstream: RawUpstream, case: Case) -> None:
    before = len(upstream.arrived)
    check(ask(plain, body=case.body, headers=case.headers), case.plain, upstream, before, case.body)
    lives_on(plain)
    before = len(upstream.arrived)
    headers = [*case.headers, ("authorization", f"Bearer {KEY}")]
    check(ask(routed, body=case.body, headers=headers), case.routed, upstream, before, case.body)
    lives_on(routed)


@pytest.mark.parametrize("cut", [0, 1, 60])
def test_an_upload_that_breaks_off(plain: str, upstream: RawUpstream, cut: int) -> None:
    before = len(upstream.arrived)
    whole = request_bytes(chat())
    with connected(plain) as connection:
        connection.sendall(whole[: len(whole) - 60 + min(cut, 59)])
    lives_on(plain)
    assert len(upstream.arrived) == before + 1


def test_a_compressed_request_is_unpacked(plain: str, upstream: RawUpstream) -> None:
    packed = {
        "gzip": gzip.compress(chat()),
        "x-gzip": gzip.compress(chat()[:10]) + gzip.compress(chat()[10:]),
        "deflate": zlib.compress(chat()),
        "br": brotli.compress(chat()),
        "zstd": zstandard.compress(chat()),
        "ZSTD , GZip": gzip.compress(zstandard.compress(chat())),
        "identity": chat(),
    }
    for how, body in packed.items():
        got = ask(plain, body=body, headers=[JSON, ("content-encoding", how)])
        assert (got.status, upstream.last.body) == (200, chat()), how
        assert upstream.last.header("content-encoding") is None


def test_other_paths_take_bad_input_too(plain: str, routed: str, upstream: RawUpstream) -> None:
    bodies = [case.body for case in CASES if len(case.body) < 2 * MB]
    for body in bodies[::4]:
        got = ask(plain, "/v1/embeddings", body)
        assert (got.status, upstream.last.body) == (200, body)
        refused = ask(routed, "/v1/embeddings", body, [JSON, ("authorization", f"Bearer {KEY}")])
        assert refused.status == 200 or refused.error["code"] == "model_not_allowed"
    assert ask(plain, CHAT, chat()).status == 200
