"""Answers of an upstream in every spelling: JSON, errors, and event streams in odd pieces, also compressed."""

import gzip
import random
import zlib
from dataclasses import dataclass
from typing import Any

from tests.kit.odd_bodies import VALUES, value
from tests.kit.raw_upstream import Step, chunk, head
from tests.kit.varied_bodies import BLOCKS, ITEMS, TEXT, Spelled, spelled

PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress}


@dataclass(frozen=True, slots=True)
class Varied:
    """An answer. ``parts`` is its body as it is on the wire, ``plain`` without its content encoding."""

    status: str
    content_type: str | None
    parts: tuple[bytes, ...]
    plain: bytes
    encoding: str | None = None

    @property
    def body(self) -> bytes:
        """The body on the wire."""
        return b"".join(self.parts)

    @property
    def steps(self) -> list[Step]:
        """The script of a raw upstream. Only an answer in one part has its length in a header."""
        headers = [("X-Request-Id", "req_é".encode().decode("latin-1"))]
        if self.content_type is not None:
            headers.append(("Content-Type", self.content_type))
        if self.encoding is not None:
            headers.append(("Content-Encoding", self.encoding))
        if len(self.parts) == 1:
            return [head(self.status, [*headers, ("Content-Length", str(len(self.body)))]) + self.body]
        steps: list[Step] = [head(self.status, [*headers, ("Transfer-Encoding", "chunked")])]
        return [*steps, *(chunk(part) for part in self.parts if part), chunk(b"")]


STATUSES = (
    *("200 OK",) * 10,
    "201 Created",
    "202 Accepted",
    "299 Odd",
    "400 Bad Request",
    "401 Unauthorized",
    "403 Forbidden",
    "404 Not Found",
    "409 Conflict",
    "418 I'm a teapot",
    "422 Unprocessable Content",
    "429 Too Many Requests",
    "500 Oh No",
    "503 Service Unavailable",
    "529 Overloaded",
)

ERRORS: tuple[Any, ...] = (
    {"error": {"message": TEXT, "type": "invalid_request_error", "param": None, "code": None, "x": Spelled("1.10")}},
    {"type": "error", "error": {"type": "overloaded_error", "message": TEXT}, "request_id": "req_1"},
    {"error": TEXT},
    {"detail": [{"loc": ["body", 0], "msg": TEXT}]},
    [{"error": {"code": 400, "message": TEXT, "status": "INVALID_ARGUMENT"}}],
    Spelled("<html>\r\n<h1>502</h1></html>\n"),
    Spelled(""),
    Spelled("null"),
    Spelled("\x00 no JSON \udcff\udcfe"),
)

JSON_TYPES = (
    "application/json",
    "application/json; charset=utf-8; odd=1",
    "Application/JSON",
    "application/problem+json",
    "text/plain;charset=latin-1",
    None,
)

STREAM_TYPES = ("text/event-stream", "text/event-stream; charset=utf-8", "Text/Event-Stream;odd=1")


PLAIN_ANSWERS = (
    b'{"id":"x","object":"chat.completion","created":1e9,"choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"\\u00e9\\/ \\ud800"},"finish_reason":"odd_reason"}],"usage":{"prompt_tokens":1.0},"x":-0.0,"x":1e400}',
    b'\r\n { "choices" : [ ] ,\t"unknown" : {"error":null} }\n',
    b"[]",
    b"",
    b"no JSON at all \xff\xfe",
    '{"choices":[{"message":{"content":"\U0001f9d1\u200d\U0001f680 é \u2028"}}],"error":null}'.encode(),
    b'{"error_count":0,"choices":[{"message":{"content":"an \\"error\\" is quoted"}}]}',
)

CHUNK = (
    b'{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"\xc3\xa9 \xf0\x9f\x98\x80 \\u00e9\\/"},'
    b'"finish_reason":null}],"x":1.10}'
)
STREAMS = (
    b"data: " + CHUNK + b"\n\ndata: [DONE]\n\n",
    b": comment\n\n: another\n\nid: 7\nevent: chunk\nretry: 10\ndata: " + CHUNK + b"\n\ndata:[DONE]\n\n",
    b"data: " + CHUNK + b"\r\n\r\ndata: " + CHUNK + b"\r\n\r\ndata: [DONE]\r\n\r\n",
    b"data: " + CHUNK + b"\r\rdata: [DONE]\r\r",
    b"\xef\xbb\xbfdata: " + CHUNK + b"\n\ndata: [DONE]",
    b'data: {"choices":[{"delta":{"content":\ndata: "two lines"}}]}\n\ndata: [DONE]\n\n\n\n',
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\ndata: {"choices":[],"usage":{}}\n\n',
    b"data: no JSON \xff\n\n",
    b"",
)


def answers(api: str, count: int) -> list[Varied]:
    """Return answers to requests that don't stream."""
    made = (random.Random(f"{api} answer {at}") for at in range(count))
    plain = [Varied("200 OK", "application/json", (body,), body) for body in PLAIN_ANSWERS]
    return [*plain, *(_answer(api, at, dice) for at, dice in enumerate(made))][:count]


def streams(api: str, count: int) -> list[Varied]:
    """Return answers to requests that stream. One in ten is an error, or JSON although the client wants a stream."""
    made = (random.Random(f"{api} stream {at}") for at in range(count))
    thirds = [(body, len(body) // 3 + 1) for body in STREAMS]
    cut = [(body, tuple(body[at : at + third] for at in range(0, len(body), third))) for body, third in thirds]
    plain = [Varied("200 OK", "text/event-stream", (*parts, b""), body) for body, parts in cut]
    varied = (_answer(api, at, dice) if at % 10 == 9 else _stream(api, dice) for at, dice in enumerate(made))
    return [*plain, *varied][:count]


def _answer(api: str, at: int, dice: random.Random) -> Varied:
    status = STATUSES[at % len(STATUSES)]
    if status[0] == "2" and at % 11:
        said = {**_ANSWERS[api](dice), f"x_{at}": Spelled(value(dice, 3)), "odd": Spelled(dice.choice(VALUES))}
    else:
        said = ERRORS[at % len(ERRORS)]
    plain = spelled(said, dice).encode(errors="surrogateescape")
    return _packed(status, dice.choice(JSON_TYPES), plain, dice, pieces=dice.choice((1, 1, 2, 7)))


def _stream(api: str, dice: random.Random) -> Varied:
    newline = dice.choice(("\n", "\n", "\r\n", "\r"))
    lines = ["\ufeff"] if dice.random() < 0.1 else [""]
    for event in _EVENTS[api](dice):
        name = event.get("type") if api != "chat" else None
        before = [line for line in _odd_lines(dice) if dice.random() < 0.3]
        if name and dice.random() < 0.8:
            before.append(f"event:{dice.choice(('', ' '))}{name}")
        text = spelled(event, dice)
        colon = dice.choice(("data:", "data: "))
        # White space between tokens may be a line break, and each line of an event's data begins with the field.
        data = (
            [colon + line for line in text.splitlines()] if newline != "\r" else [colon + " ".join(text.splitlines())]
        )
        lines.append(newline.join([*before, *data]) + newline * 2)
    if api == "chat" or dice.random() < 0.1:
        lines.append(f"data:{dice.choice(('', ' '))}[DONE]" + newline * dice.randint(0, 3))
    if dice.random() < 0.2:
        lines.append(f": the end{newline}")
    plain = "".join(lines).encode()
    return _packed("200 OK", dice.choice(STREAM_TYPES), plain, dice, pieces=dice.randint(2, 12))


def _odd_lines(dice: random.Random) -> list[str]:
    return [": a comment, é", ":", "retry: 10", f"id: {dice.random()}", "unknown: field", "nocolon"]


def _packed(status: str, content_type: str | None, plain: bytes, dice: random.Random, pieces: int) -> Varied:
    encoding = dice.choice((None, None, None, "gzip", "deflate"))
    body = plain if encoding is None else PACKERS[encoding](plain)
    cuts = sorted(dice.randint(0, len(body)) for _ in range(pieces - 1))
    if pieces > 3:
        # Cut inside a character and inside the name of a field, if there are any.
        cuts = sorted({*cuts, *(at + 1 for at, byte in enumerate(body) if byte >= 0xF0), body.find(b"data:") + 2})
    parts = tuple(body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True))
    return Varied(status, content_type, parts, plain, encoding)


def _usage(dice: random.Random) -> Any:
    odd: tuple[Any, ...] = (
        None,
        {},
        {"input_tokens": 9, "output_tokens": Spelled("1e0"), "total_tokens": Spelled("10.0")},
        {"prompt_tokens": 9, "completion_tokens": 1, "cost": Spelled("0.10"), "prompt_tokens_details": None},
        {"input_tokens": 9, "cache_read_input_tokens": None, "iterations": [], "server_tool_use": {"x": 1}},
        {"input_tokens": -1, "output_tokens": "three", "service_tier": "é"},
        "no object",
    )
    return dice.choice(odd)


def _completion(dice: random.Random) -> dict[str, Any]:
    contents: tuple[Any, ...] = (TEXT, "", None, [{"type": "text", "text": TEXT}, {"type": "odd"}])
    message = {
        "role": "assistant",
        "content": dice.choice(contents),
        "refusal": dice.choice((None, TEXT)),
        "reasoning_content": TEXT,
        "tool_calls": dice.choice((None, [], [{"id": "c", "function": {"name": "f", "arguments": '{"é": 1e400}'}}])),
        "audio": None,
    }
    choices = [{"index": 0, "message": message, "finish_reason": dice.choice(("stop", "length", "odd", None))}]
    return {"id": "x", "object": "chat.completion", "choices": choices, "usage": _usage(dice)}


def _chunks(dice: random.Random) -> list[dict[str, Any]]:
    deltas: list[Any] = [
        {"role": "assistant", "content": ""},
        {"content": TEXT},
        {"reasoning_content": TEXT},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]},
        {"odd": Spelled(dice.choice(VALUES)), "content": None},
        {},
    ]
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": dice.choice(("stop", "tool_calls", "odd"))}]})
    return [*events, {"choices": [], "usage": _usage(dice)}, {"unknown": "chunk", "choices": []}]


def _response(dice: random.Random) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "status": dice.choice(("completed", "incomplete", "in_progress", "odd")),
        "output": dice.sample(ITEMS[16:], 4),
        "incomplete_details": None,
        "input_transformations": [{"type": "reasoning", "action": "removed"}],
        "usage": _usage(dice),
    }


def _response_events(dice: random.Random) -> list[dict[str, Any]]:
    response = _response(dice)
    item = dice.choice([one for one in ITEMS[16:] if isinstance(one, dict)])
    final = dice.choice(("response.completed", "response.incomplete", "response.odd_end"))
    return [
        {"type": "response.created", "response": {**response, "output": [], "usage": None}, "sequence_number": 0},
        {"type": "response.in_progress", "response": {"id": "resp_1"}},
        {"type": "response.unknown_event", "odd": Spelled(dice.choice(VALUES))},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.reasoning_summary_text.delta", "delta": TEXT},
        {"type": "response.output_text.delta", "delta": TEXT, "logprobs": [], "obfuscation": "x"},
        {"type": "response.function_call_arguments.delta", "delta": '{"é'},
        {"type": "keepalive"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": final, "response": response},
    ]


def _message(dice: random.Random) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": dice.sample(BLOCKS, 4),
        "stop_reason": dice.choice(("end_turn", "pause_turn", "refusal", "compaction", "odd", None)),
        "stop_details": None,
        "container": {"id": "c"},
        "context_management": {"applied_edits": []},
        "usage": _usage(dice),
    }


def _message_events(dice: random.Random) -> list[dict[str, Any]]:
    block = dice.choice([one for one in BLOCKS if isinstance(one, dict)])
    deltas = [
        {"type": "text_delta", "text": TEXT},
        {"type": "input_json_delta", "partial_json": '{"é'},
        {"type": "thinking_delta", "thinking": TEXT},
        {"type": "signature_delta", "signature": "Erc" + "B" * 90},
        {"type": "citations_delta", "citation": {"cited_text": TEXT}},
        {"type": "compaction_delta", "content": TEXT},
        {"type": "odd_delta", "odd": Spelled(dice.choice(VALUES))},
    ]
    return [
        {"type": "message_start", "message": {**_message(dice), "content": []}},
        {"type": "ping"},
        {"type": "unknown_event", "odd": None},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in dice.sample(deltas, 4)),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": _usage(dice)},
        {"type": "message_stop"},
    ]


_ANSWERS = {"chat": _completion, "responses": _response, "messages": _message}
_EVENTS = {"chat": _chunks, "responses": _response_events, "messages": _message_events}
