"""Requests and upstream responses of 64 KB that try to cost more than their size, and large ones that are refused."""

import functools
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator

import brotli
import zstandard

from proxy.dialects.request import MAX_MESSAGES, MAX_VALUES

KB64 = 65_536
MB = 1_000_000
SKIPPABLE = b"\x50\x2a\x4d\x18\x00\x00\x00\x00"


def body(messages: str, **fields: object) -> bytes:
    """Return a request with these messages, written as JSON."""
    others = json.dumps({"model": "gpt-4o-mini", **fields})
    return others[:-1].encode() + b',"messages":[' + messages.encode() + b"]}"


def user(content: str) -> str:
    return '{"role":"user","content":' + content + "}"


def packed(plain: Callable[[int], bytes]) -> bytes:
    """Return a body compressed to 64 KB, with as much bulk in it as a body of that size may have.

    A field of random text compensates for parts that compress well.
    """
    for size in (1_350_000, 1_000_000, 500_000, 250_000, 125_000):
        bulk = plain(size)
        left = KB64 - 2_000 - len(gzip.compress(bulk, 6))
        if left > 0:
            noise = random.Random(1).randbytes(left * 5 // 6).hex().encode()
            return gzip.compress(b'{"user":"' + noise + b'",' + bulk[1:], 6)
    raise AssertionError("the body doesn't compress")


def asking(model: str, plain: Callable[[int], bytes], size: int, field: str = "messages") -> bytes:
    """Return a request for a model, with its conversation in this field."""
    return renamed(plain(size).replace(b"gpt-4o-mini", model.encode(), 1), field)


def renamed(raw: bytes, field: str) -> bytes:
    """Return a request with this field in place of ``messages``."""
    return raw.replace(b'"messages":', b'"%s":' % field.encode(), 1)


def repeated(piece: str, between: str = ",") -> Callable[[int], bytes]:
    return lambda size: body(between.join([piece] * (size // len(piece + between))))


def text(piece: str) -> Callable[[int], bytes]:
    return lambda size: body(user(json.dumps(piece * (size // len(piece)), ensure_ascii=False)))


def parts(part: str) -> Callable[[int], bytes]:
    return lambda size: body(user("[" + ",".join([part] * (size // (len(part) + 1))) + "]"))


def counted(size: int) -> bytes:
    """Return a request whose messages differ from each other."""
    return body(",".join(user(f'"{number}"') for number in range(size // 34)))


def calls(size: int) -> bytes:
    count = size // 160
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for number in range(count)
    ]
    asked = json.dumps({"role": "assistant", "content": None, "tool_calls": made})
    results = [
        json.dumps({"role": "tool", "tool_call_id": f"c{count - number - 1}", "content": "1"})
        for number in range(count)
    ]
    return body(",".join([user('"go"'), asked, *results]))


def tools(size: int) -> bytes:
    parameters = {f"p{number}": {"type": "string", "enum": ["a", "b"]} for number in range(size // 50)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": parameters}}}
    return body(user('"hi"'), tools=[tool])


def many_tools(size: int) -> bytes:
    return body(user('"hi"'), tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(size // 60)])


PLAIN: dict[str, Callable[[int], bytes]] = {
    "numbers": repeated("1"),
    "objects": repeated("{}"),
    "arrays": repeated("[]"),
    "short messages": repeated(user('""')),
    "different messages": counted,
    "empty parts": parts("{}"),
    "number parts": parts("1"),
    "text parts": parts('{"type":"text","text":"a"}'),
    "image parts": parts('{"type":"image_url","image_url":{"url":"https://a/b"}}'),
    "calls": calls,
    "tool parameters": tools,
    "many tools": many_tools,
    "one letter": text("a"),
    "two letters": text("ab"),
    "spaces": text(" "),
    "carets": text("^"),
    "base64": text("QUJD"),
    "escapes": lambda size: text('"')(size // 2),
    "lines": lambda size: text("\n")(size // 2),
    "families": lambda size: text("👩‍👩‍👧‍👦")(size // 4),
    "deep arrays": lambda size: body(user("[" * (size // 2) + "]" * (size // 2))),
    "deep but legal": lambda size: body(",".join([user("[" * 60 + "]" * 60)] * (size // 150))),
    "keys": lambda size: body("{" + ",".join(f'"k{number}":1' for number in range(size // 10)) + "}"),
    "escaped keys": lambda size: body("{" + ",".join(f'"\\u0061{number}":1' for number in range(size // 16)) + "}"),
    "long id": lambda size: body('{"role":"tool","tool_call_id":"' + "i" * size + '","content":""}'),
    "surrogates": lambda size: body(user('"' + "\\ud800" * (size // 6) + '"')),
    "fields": lambda size: b'{"model":"gpt-4o-mini",' + b'"a":1,' * (size // 6) + b'"messages":[]}',
    "not JSON": lambda size: b'{"model":"gpt-4o-mini","messages":[' + b"[1,NaN]," * (size // 8) + b"1]}",
}


def chance(size: int, alphabet: str) -> str:
    return "".join(random.Random(1).choices(alphabet, k=size))


@functools.cache
def packed_bombs() -> tuple[tuple[str, bytes, str], ...]:
    """Return bodies that are small only as long as they are compressed. The model doesn't matter."""
    empty = gzip.compress(b"")
    return (
        ("gzip members", empty * (KB64 // len(empty)), "gzip"),
        ("nested gzip members", gzip.compress(empty * 1_000_000)[:KB64], "gzip, gzip"),
        ("nested gzip members that end", gzip.compress(empty * 200_000), "gzip, gzip"),
        ("nested deflate streams", gzip.compress(zlib.compress(b"") * 500_000), "deflate, gzip"),
        (
            "empty stored blocks",
            gzip.compress(zlib.compress(b"")[:2] + b"\0\0\0\xff\xff" * 4 * MB)[:KB64],
            "deflate, gzip",
        ),
        ("zstd frames", gzip.compress(zstandard.compress(b"") * MB), "zstd, gzip"),
        ("skippable frames", gzip.compress(SKIPPABLE * 2 * MB), "zstd, gzip"),
        ("zstd", zstandard.compress(bytes(100 * MB)), "zstd"),
        ("brotli", brotli.compress(bytes(100 * MB), quality=1), "br"),
        ("gzip", gzip.compress(bytes(64 * MB)), "gzip"),
        ("gzip, gzip", gzip.compress(gzip.compress(bytes(100 * MB))), "gzip, gzip"),
    )


def requests(
    model: str = "gpt-4o-mini", field: str = "messages", *, every: int = 1
) -> Iterator[tuple[str, bytes, str | None]]:
    """Yield names, bodies of 64 KB at most, and their compression. The conversation is in this field.

    One in ``every`` of the bodies is there as it is, and one compressed.
    """
    for number, (name, plain) in enumerate(PLAIN.items()):
        made = functools.partial(asking, model, plain, field=field)
        if number % every == 0:
            yield name, made(KB64 - 2_000), None
        if number % every == every - 1:
            yield f"{name}, compressed", packed(made), "gzip"
    yield "one word", renamed(text(chance(60_000, "abcdefghijklmnopqrstuvwxyz"))(60_000), field), None
    yield from packed_bombs()


def nested(opening: str, closing: str, depth: int, times: int) -> bytes:
    one = opening * depth + "1" + closing * depth
    return ('{"error":{"message":"no","details":[' + ",".join([one] * times) + "]}}").encode()


ERRORS: dict[str, bytes] = {
    "nested arrays": nested("[", "]", 60, 500),
    "nested objects": nested('{"error":', "}", 60, 90),
    "errors": b'{"error":[' + b",".join([b'{"message":"too long"}'] * 2_700) + b"]}",
    "numbers": b'{"error":{"message":"no","param":[' + b"1," * 30_000 + b"1]}}",
    "JSON in JSON": json.dumps({"error": {"message": "{" * 60_000}}).encode(),
    "Python in JSON": json.dumps({"error": {"message": "[{'a': " * 9_000}}).encode(),
    "limits": json.dumps({"error": {"message": "maximum context length is 8192 tokens, " * 1_600}}).encode(),
    "page": b"<html>" + b"<p>too long" * 5_500,
    "tags": b"<" * 65_000,
    "quotes": b'{"error":{"message":"' + b'\\"' * 32_000 + b'"}}',
    "spaces": json.dumps({"error": {"message": "context" + " " * 60_000 + "length"}}).encode(),
    "words": chance(64_000, "abcdefgh ").encode(),
}


def errors() -> Iterator[tuple[str, bytes, str | None]]:
    """Yield names, upstream errors of 64 KB at most, and their compression."""
    for name, plain in ERRORS.items():
        yield name, plain, None
        start, end = plain[: len(plain) // 2], plain[len(plain) // 2 :]
        yield f"{name}, compressed", gzip.compress(start + start[-20_000:] * 15 + end), "gzip"
    yield from ((name, raw, how) for name, raw, how in requests() if how not in (None, "gzip"))


def in_tools(tool: bytes, between: bytes = b",") -> Callable[[int], bytes]:
    """Return requests with the same tool again and again."""
    return lambda size: (
        b'{"model":"gpt-4o-mini","input":"hi","tools":[' + between.join([tool] * (size // len(tool + between))) + b"]}"
    )


def distinct_fields(size: int) -> bytes:
    return b'{"model":"gpt-4o-mini",' + b"".join(b'"a%d":1,' % number for number in range(size // 11)) + b'"input":1}'


PASSED_ON: dict[str, Callable[[int], bytes]] = {
    "distinct fields": distinct_fields,
    "empty tools": in_tools(b"{}"),
    "tools that aren't objects": in_tools(b"1"),
    "tools with a model": in_tools(b'{"model":"gpt-4o-mini"}'),
    "tools with fields": in_tools(b"{" + b",".join(b'"a%d":1' % number for number in range(900)) + b"}"),
    "tools with NaN": in_tools(b'{"a":NaN}'),
    "UTF-16": lambda size: counted(size // 2).decode().encode("utf-16"),
    "control characters": lambda size: body(user('"' + "\x01" * size + '"')),
    "long numbers": lambda size: body("1" * size),
    "many long numbers": lambda size: body(",".join(["9" * 4_000] * (size // 4_001)) + ",NaN"),
}
"""Bodies for paths that are passed through, which the proxy reads if a team may use some models only."""


def passed_on(model: str, *, every: int) -> Iterator[tuple[str, bytes, str | None]]:
    """Yield names, these bodies and one in ``every`` of conversations, 64 KB at most, and their compression."""
    for name, plain in PASSED_ON.items():
        made = functools.partial(asking, model, plain)
        yield name, made(KB64 - 2_000), None
        yield f"{name}, compressed", packed(made), "gzip"
    yield from requests(model, "input", every=every)


CONTENT = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


def before_content(piece: bytes) -> bytes:
    """Return a JSON answer with many small values before its text."""
    start, _, end = CONTENT.partition(b'"message"')
    return start + b'"extra":[' + b",".join([piece] * (KB64 // (len(piece) + 1))) + b'],"message"' + end


def before_event(piece: bytes) -> bytes:
    """Return a stream with many small pieces before its first text."""
    return piece * (KB64 // len(piece)) + EVENT


ANSWERS: dict[str, bytes] = {
    "numbers": before_content(b"1"),
    "arrays": before_content(b"[]"),
    "objects": before_content(b"{}"),
    "nested arrays": before_content(b"[" * 60 + b"]" * 60),
    "no errors": before_content(b'{"error":null}'),
    "choices": before_content(b'{"choices":[{"content":""}]}'),
    "blank lines": b"\n" * KB64 + CONTENT,
    "choices without end": b'{"choices":[{' * (KB64 // 13),
    "no text": CONTENT.replace(b'"hi"', b'""').replace(b"[", b"[" + b"{}," * (KB64 // 3), 1),
}
STREAMS: dict[str, bytes] = {
    "comments": before_event(b":\n\n"),
    "comment lines": before_event(b":\n"),
    "blank lines": before_event(b"\n"),
    "returns": before_event(b"\r"),
    "empty data": before_event(b"data:\n\n"),
    "names": before_event(b"event:a\n\n"),
    "no choices": before_event(b'data:{"choices":[]}\n\n'),
    "roles": before_event(b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'),
    "data lines": before_event(b"data:1\n"),
    "texts": EVENT * (KB64 // len(EVENT)),
    "empty data after a text": EVENT + before_event(b"data:\n\n"),
}


def sized(piece: str, count: int) -> bytes:
    return body(",".join([piece] * count))


HEAVY: dict[str, Callable[[], bytes]] = {
    "messages": lambda: sized(user('""'), MAX_MESSAGES),
    "different messages": lambda: body(",".join(user(f'"{number}"') for number in range(MAX_MESSAGES))),
    "calls": lambda: calls(1_600_000),
    "values": lambda: body(user("[" + "1," * (MAX_VALUES - 10) + "1]")),
    "64 MB of messages": lambda: sized(user('""'), 2_000_000),
    "64 MB of numbers": lambda: sized("1", 31_900_000),
}
"""Bodies as large as the default limit, or with the highest number of messages or values."""
