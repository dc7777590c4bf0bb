"""What is read as an overflow, what is not, and how fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from proxy.upstream.overflow import Overflow, recognise

CATALOGUE = Path(__file__).parents[3] / "shared" / "data" / "overflow-errors.jsonl"
SILENT = {"truncated", "silent"}


def wire(**error: Any) -> bytes:
    return json.dumps({"error": error}).encode()


# One row: the case, status, body, and (kind, limit, scope, counted, output, remedy).
OVERFLOWS: list[tuple[str, int, bytes, Overflow]] = [
    (
        "openai",
        400,
        wire(
            message="This model's maximum context length is 128000 tokens. However, your messages resulted in 140321 "
            "tokens. Please reduce the length of the messages.",
            type="invalid_request_error",
            param="messages",
            code="context_length_exceeded",
        ),
        Overflow("input", 128000, "total", 140321, None, "compact"),
    ),
    (
        "openai, thousands separated",
        400,
        wire(
            message="Input tokens exceed the configured limit of 272,000 tokens. "
            "Your messages resulted in 280,001 tokens."
        ),
        Overflow("input", 272000, "input", 280001, None, "compact"),
    ),
    (
        "openai, a code and nothing else",
        400,
        wire(message="Sorry.", type="invalid_request_error", code="context_length_exceeded"),
        Overflow("input", None, None, None, None, "compact"),
    ),
    (
        "openai, failed response in a stream",
        200,
        b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed","error":'
        b'{"code":"context_length_exceeded","message":"Your input exceeds the context window of this model."}}}\n\n',
        Overflow("input", None, None, None, None, "compact"),
    ),
    (
        "azure, sum of both",
        400,
        wire(
            message="This model's maximum context length is 8192 tokens. However, you requested 9100 tokens "
            "(5100 in the messages, 1000 in the functions, and 3000 in the completion). Please reduce the length.",
            code="context_length_exceeded",
        ),
        Overflow("input_plus_output", 8192, "total", 6100, 3000, "either"),
    ),
    (
        "anthropic",
        400,
        json.dumps(
            {
                "type": "error",
                "error": {
                    "type": "invalid_request_error",
                    "message": "prompt is too long: 209353 tokens > 199999 maximum",
                },
            }
        ).encode(),
        Overflow("input", 199999, "total", 209353, None, "compact"),
    ),
    (
        "anthropic, output takes most",
        400,
        wire(
            type="invalid_request_error",
            message="input length and `max_tokens` exceed context limit: 80000 + 128000 > 200000, decrease it",
        ),
        Overflow("input_plus_output", 200000, "total", 80000, 128000, "lower_output"),
    ),
    (
        "anthropic, event of a stream",
        200,
        b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error",'
        b'"message":"prompt is too long: 200049 tokens > 200000 maximum"}}\n\n',
        Overflow("input", 200000, "total", 200049, None, "compact"),
    ),
    (
        "gemini",
        400,
        wire(
            code=400,
            status="INVALID_ARGUMENT",
            message="The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        ),
        Overflow("input", 1048576, "input", 1200000, None, "compact"),
    ),
    (
        "vertex, in an array",
        400,
        b"["
        + wire(
            message="Unable to submit request because the input token count is 40000 but model only supports "
            "up to 32768. Reduce the input token count and try again."
        )
        + b"]",
        Overflow("input", 32768, "input", 40000, None, "compact"),
    ),
    (
        "vllm, a lower bound is no count",
        400,
        wire(
            message="This model's maximum context length is 8192 tokens. However, your prompt contains at least "
            "8193 input tokens, which exceeds this limit even without any output tokens. (parameter=input_tokens)",
            type="BadRequestError",
            code=400,
        ),
        Overflow("input", 8192, "total", None, None, "compact"),
    ),
    (
        "vllm, the error at the top",
        400,
        json.dumps(
            {
                "object": "error",
                "message": "This model's maximum context length is 32768 tokens. However, you requested 41648 tokens "
                "(37552 in the messages, 4096 in the completion).",
                "type": "BadRequestError",
                "code": 400,
            }
        ).encode(),
        Overflow("input", 32768, "total", 37552, 4096, "compact"),
    ),
    (
        "llama.cpp, numbers as fields",
        400,
        wire(code=400, message="?", type="exceed_context_size_error", n_prompt_tokens=17331, n_ctx=16384),
        Overflow("input", 16384, "total", 17331, None, "compact"),
    ),
    (
        "llama.cpp, old stream",
        200,
        b'error: {"code":400,"message":"the request exceeds the available context size. try increasing it"}\n\n',
        Overflow("input", None, None, None, None, "compact"),
    ),
    (
        "llama-cpp-python",
        500,
        wire(message="Requested tokens (817) exceed context window of 512", type="internal_server_error"),
        Overflow("input", 512, "total", 817, None, "compact"),
    ),
    (
        "openrouter, counted in parts",
        400,
        wire(
            code=400,
            message="This endpoint's maximum context length is 131072 tokens. However, you requested about 150000 "
            'tokens (90000 of text input, 10000 of tool input, 50000 in the output). Use the "middle-out" transform.',
        ),
        Overflow("input_plus_output", 131072, "total", 100000, 50000, "either"),
    ),
    (
        "openrouter, the provider's own as text",
        400,
        wire(
            code=400,
            message="Provider returned error",
            metadata={
                "provider_name": "Anthropic",
                "raw": wire(message="prompt is too long: 205412 tokens > 200000 maximum").decode(),
            },
        ),
        Overflow("input", 200000, "total", 205412, None, "compact"),
    ),
    (
        "openrouter, in the first chunk",
        200,
        b": OPENROUTER PROCESSING\n\n"
        + b'data: {"choices":[{"delta":{"content":""},"finish_reason":"error"}],"error":{"code":400,"message":'
        b'"Provider returned error","metadata":'
        b'{"raw":"{\\"message\\":\\"prompt is too long: 5000 tokens > 4096 maximum\\"}"}}}\n\n',
        Overflow("input", 4096, "total", 5000, None, "compact"),
    ),
    (
        "litellm as a hop, python's bytes",
        400,
        wire(
            message="litellm.BadRequestError: AnthropicException - b'"
            + wire(message="prompt is too long: 209353 tokens > 199999 maximum").decode()
            + "'. Received Model Group=claude\nAvailable Model Group Fallbacks=None",
            type=None,
            code="400",
        ),
        Overflow("input", 199999, "total", 209353, None, "compact"),
    ),
    (
        "a client library's repr as a hop",
        502,
        wire(
            message="Error code: 400 - {'error': {'message': \"This model's maximum context length is 8192 tokens. "
            "However, your messages resulted in 9000 tokens.\", 'code': 'context_length_exceeded'}}"
        ),
        Overflow("input", 8192, "total", 9000, None, "compact"),
    ),
    (
        "cut off in the middle",
        400,
        b'{"error":{"message":"prompt is too long: 209353 tokens > 199999 maximum","type":"inv',
        Overflow("input", 199999, "total", 209353, None, "compact"),
    ),
]


@pytest.mark.parametrize(
    ("status", "body", "expected"), [row[1:] for row in OVERFLOWS], ids=[row[0] for row in OVERFLOWS]
)
def test_families(status: int, body: bytes, expected: Overflow) -> None:
    assert recognise(status, body) == expected


QUOTE = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9031 tokens."

NOT_OVERFLOWS: list[tuple[str, int, bytes]] = [
    (
        "tokens per minute",
        429,
        wire(message="Request too large on tokens per min (TPM): Limit 30000, Requested 132819."),
    ),
    (
        "rate limit as an event",
        200,
        b'event: error\ndata: {"error":{"message":"too many input tokens per minute"}}\n\n',
    ),
    ("credits", 402, wire(message="Prompt tokens limit exceeded: 138741 > 21005. Upgrade to a paid account")),
    (
        "output cap",
        400,
        wire(message="max_tokens is too large: 32768. This model supports at most 16384 completion tokens"),
    ),
    ("output cap against the window", 400, wire(message="max_completion_tokens exceeds context window")),
    (
        "anthropic's output cap",
        400,
        wire(message="max_tokens: 9 > 8, the maximum allowed number of output tokens for x"),
    ),
    ("bytes", 413, wire(message="Maximum content size limit (26214400) exceeded (31457280 bytes read)")),
    (
        "characters",
        400,
        wire(message="Invalid 'input': string too long. Expected a string with maximum length 99", param="input"),
    ),
    ("array", 400, wire(message="Invalid 'messages': array too long. Expected an array with maximum length 2048")),
    ("images", 400, wire(message="At least one of the image dimensions exceed max allowed size: 8000 pixels")),
    ("a deadline", 400, wire(message="context deadline exceeded")),
    ("a name", 400, wire(message="please reduce the length of your model name")),
    (
        "a quoted message, as JSON in the text",
        400,
        wire(
            message="Unknown role. Message: " + json.dumps({"role": "tool", "content": QUOTE}), param="messages[7].role"
        ),
    ),
    ("a quoted message, in quotation marks", 400, wire(message=f'Tool output not understood: "{QUOTE}"')),
    ("a quoted message, as a repr", 400, wire(message=f"Bad message: {{'role': 'x', 'content': \"{QUOTE}\"}}")),
    ("a message echoed in a field", 400, wire(message="Filtered.", prompt_excerpt=QUOTE, echo={"message": QUOTE})),
    ("words of an answer", 200, json.dumps({"choices": [{"message": {"content": QUOTE}}]}).encode()),
    ("words of a chunk", 200, b"data: " + json.dumps({"choices": [{"delta": {"content": QUOTE}}]}).encode() + b"\n\n"),
    ("an answer's own field", 200, json.dumps({"choices": [], "message": QUOTE, "error": None}).encode()),
    ("nothing", 400, b""),
    ("no text", 400, b"\xff\xfe\x00\x80"),
    ("numbers", 400, b"[1, 2, [3]]"),
]


@pytest.mark.parametrize(("status", "body"), [row[1:] for row in NOT_OVERFLOWS], ids=[row[0] for row in NOT_OVERFLOWS])
def test_other_errors(status: int, body: bytes) -> None:
    assert recognise(status, body) is None


@pytest.mark.parametrize("status", [401, 403, 404])
def test_statuses_that_are_never_an_overflow(status: int) -> None:
    assert recognise(status, OVERFLOWS[0][2]) is None


def test_a_number_with_a_unit_or_out_of_bounds_is_no_limit() -> None:
    thousands = recognise(400, wire(message="prompt is too long for this model's context window of 128k tokens"))
    assert thousands is not None
    assert thousands.limit is None
    tiny = recognise(400, wire(message="prompt is too long: 30 tokens > 20 maximum"))
    assert tiny is not None
    assert (tiny.limit, tiny.scope) == (None, None)


def test_a_count_under_the_limit_is_not_believed() -> None:
    read = recognise(400, wire(message="prompt is too long: 3000 tokens > 4096 maximum"))
    assert read == Overflow("input", 4096, "total", None, None, "compact")


MEGABYTE = 1_000_000
HOSTILE = {
    "nested": b'{"error":' * 100_000,
    "brackets": b"[" * MEGABYTE,
    "quotes": wire(message='"' * MEGABYTE),
    "escapes": wire(message="\\" * MEGABYTE),
    "digits": wire(message="1" * MEGABYTE),
    "objects": wire(message="[{" * (MEGABYTE // 2)),
    "half a sentence": wire(message="maximum context length of " * (MEGABYTE // 26)),
    "many errors": json.dumps({"errors": [{"message": "exceed context " * 600}] * 100}).encode(),
    "many events": b'data: {"error":{"message":"no"}}\n\n' * 30_000,
    "echo": wire(message="no", echo=[{"message": QUOTE}] * 9_000),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("status", [200, 400])
def test_a_large_body_takes_milliseconds(status: int, body: bytes) -> None:
    def once() -> float:
        start = time.process_time()
        assert recognise(status, body) is None
        return time.process_time() - start

    # The longest takes 30 ms of CPU; what is quadratic in a megabyte takes minutes.
    assert min(once() for _ in range(2)) < 0.5


def test_a_body_that_is_too_long_is_read_at_its_start() -> None:
    body = b'{"error":{"message":"prompt is too long: 209353 tokens > 199999 maximum"},"echo":"' + b"x" * 4_000_000
    assert recognise(400, body + b'"}') == Overflow("input", 199999, "total", 209353, None, "compact")


def catalogue() -> list[dict[str, Any]]:
    if not CATALOGUE.exists():
        pytest.skip("the catalogue of real errors is not here")
    with CATALOGUE.open(encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    # Silent overflows, an answer cut off at the window's end, are no errors: they are outside this module.
    return [row for row in rows if not row["ambiguous"] and row["kind"] not in SILENT]


def test_catalogue_recall_and_false_alarms() -> None:
    rows = catalogue()
    recognised = {row["id"] for row in rows if recognise(row["http_status"], row["body"].encode())}
    overflows = {row["id"] for row in rows if row["is_overflow"]}
    assert len(overflows) > 100
    assert len(overflows & recognised) >= 0.99 * len(overflows), sorted(overflows - recognised)
    assert not recognised - overflows


def test_catalogue_figures() -> None:
    rows = [row for row in catalogue() if row["is_overflow"]]
    wrong: dict[str, list[str]] = {"limit": [], "scope": [], "counted": [], "output": [], "remedy": []}
    for row in rows:
        read = recognise(row["http_status"], row["body"].encode())
        if read is None:
            continue
        expected = {
            "limit": row["limit_tokens"],
            "scope": row.get("limit_scope") if row["limit_tokens"] else None,
            "counted": None if row.get("prompt_is_lower_bound") else row["prompt_tokens"],
            "output": row["output_tokens_requested"],
            "remedy": row["remedy"].replace("lower_max_tokens", "lower_output"),
        }
        for name, value in expected.items():
            if getattr(read, name) != value:
                wrong[name].append(row["id"])
    for name, ids in wrong.items():
        assert len(ids) <= 0.01 * len(rows), (name, ids)


def test_silent_overflows_are_left_to_others() -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "model_context_window_exceeded"}]}
    assert recognise(200, json.dumps(body).encode()) is None
