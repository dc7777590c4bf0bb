"""Recognize overflow errors, reject other errors, and stay fast."""

import json
import time
from typing import Any

import pytest

from bench.overflow.lines import CATALOGUE, lines
from bench.overflow.scores import leaving_out, ours, score
from proxy.overflow import Overflow, recognise
from proxy.overflow.general import Scope
from tests.kit.error_forms import in_forms_of
from tests.kit.three_apis import APIS


def wire(**error: Any) -> bytes:
    return json.dumps({"error": error}).encode()


def too_long(limit: int | None = None, counted: int | None = None, scope: Scope = "total") -> Overflow:
    return Overflow("input", limit, scope if limit else None, counted, None, "compact")


WINDOW = "This model's maximum context length is"
TOO_LONG = "prompt is too long: 9000 tokens > 8192 maximum"
READ = too_long(8192, 9000)
QUOTE = f"{WINDOW} 8192 tokens. However, your messages resulted in 9031 tokens."

# Sentences of providers, and how they are read.
SENTENCES: list[tuple[str, Overflow]] = [
    (f"{WINDOW} 128000 tokens. However, your messages resulted in 140321 tokens.", too_long(128000, 140321)),
    (
        "Input tokens exceed the configured limit of 272,000 tokens. Your messages resulted in 280,001 tokens.",
        too_long(272000, 280001, "input"),
    ),
    (
        f"{WINDOW} 32768 tokens. However, you requested 41648 tokens (37552 in the messages, 4096 in the completion).",
        Overflow("input", 32768, "total", 37552, 4096, "compact"),
    ),
    (
        "input length and `max_tokens` exceed context limit: 80000 + 128000 > 200000, decrease it",
        Overflow("input_plus_output", 200000, "total", 80000, 128000, "lower_output"),
    ),
    (  # Characters aren't a count, nor is the bound that they exceed.
        f"{WINDOW} 2048 tokens. However, your prompt contains 32342 characters (more than 24576 characters, which is "
        "the upper bound for 2048 input tokens). Please reduce the length. (parameter=input_text, value=32342)",
        too_long(2048),
    ),
    (  # Neither is a lower bound.
        f"{WINDOW} 8192 tokens. However, your prompt contains at least 8193 input tokens, which exceeds this limit "
        "even without any output tokens. (parameter=input_tokens)",
        too_long(8192),
    ),
    (
        "This endpoint's maximum context length is 131072 tokens. However, you requested about 150000 tokens (90000 of "
        'text input, 10000 of tool input, 50000 in the output). Use the "middle-out" transform.',
        Overflow("input_plus_output", 131072, "total", 100000, 50000, "either"),
    ),
    ("prompt is too long: 30 tokens > 20 maximum", too_long(None, 30)),  # too small for a limit
]


@pytest.mark.parametrize(("message", "expected"), SENTENCES)
def test_sentences_of_providers(message: str, expected: Overflow) -> None:
    assert recognise(400, wire(message=message)) == expected


# One row: the case, status, body, and the reading.
OVERFLOWS: list[tuple[str, int, bytes, Overflow]] = [
    ("a code and nothing else", 400, wire(message="Sorry.", code="context_length_exceeded"), too_long()),
    (
        "a failed response in a stream",
        200,
        b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed","error":'
        b'{"code":"context_length_exceeded","message":"Your input exceeds the context window of this model."}}}\n\n',
        too_long(),
    ),
    (
        "openrouter, in the first chunk",
        200,
        b": OPENROUTER PROCESSING\n\n"
        + b'data: {"choices":[{"delta":{"content":""},"finish_reason":"error"}],"error":'
        + json.dumps({"code": 400, "metadata": {"raw": json.dumps({"message": TOO_LONG})}}).encode()
        + b"}\n\n",
        READ,
    ),
    (
        "a client library's repr as a hop",
        502,
        wire(message=f"Error code: 400 - {{'error': {{'message': \"{QUOTE}\", 'code': 'context_length_exceeded'}}}}"),
        too_long(8192, 9031),
    ),
]


@pytest.mark.parametrize(
    ("status", "body", "expected"), [row[1:] for row in OVERFLOWS], ids=[row[0] for row in OVERFLOWS]
)
def test_families(status: int, body: bytes, expected: Overflow) -> None:
    assert recognise(status, body) == expected


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
    ("output cap against the window", 400, wire(message="max_completion_tokens exceeds context window")),
    (
        "a quoted message, as JSON in the text",
        400,
        wire(
            message="Unknown role. Message: " + json.dumps({"role": "tool", "content": QUOTE}), param="messages[7].role"
        ),
    ),
    ("a quoted message, in quotation marks", 400, wire(message=f'Tool output not understood: "{QUOTE}"')),
    ("words of a chunk", 200, b"data: " + json.dumps({"choices": [{"delta": {"content": QUOTE}}]}).encode() + b"\n\n"),
    ("nothing", 400, b""),
]


@pytest.mark.parametrize(("status", "body"), [row[1:] for row in NOT_OVERFLOWS], ids=[row[0] for row in NOT_OVERFLOWS])
def test_other_errors(status: int, body: bytes) -> None:
    assert recognise(status, body) is None


@pytest.mark.parametrize("status", [401, 402, 404])
def test_statuses_that_are_never_an_overflow(status: int) -> None:
    assert recognise(status, wire(message=TOO_LONG)) is None


def test_where_permission_is_denied_only_a_context_window_counts() -> None:
    """Together's list of errors has a prompt beyond the context length under this status."""
    assert recognise(403, wire(message="Input token count + max_tokens must be less than the model context length."))
    assert recognise(403, wire(message="Prompt is too long.", code="context_length_exceeded")) is None
    assert recognise(403, wire(message="Your plan does not allow a context length over 200000 tokens.")) is None


# Wordings without a row in the table: message, limit, counted.
UNKNOWN_WORDINGS: list[tuple[str, int | None, int | None]] = [
    (
        "The prompt you sent is 45,123 tokens which goes over the 32,768 token context window of this model.",
        32768,
        45123,
    ),
    ("Your request has 210000 input tokens, more than the 200000 that this model can handle.", 200000, 210000),
    ("The number of tokens in your prompt (9000) exceeds the max of 8192", 8192, 9000),
    ("Input too long for requested model", None, None),
    ("input_tokens (40000) + max_new_tokens (1000) must be <= 32768", 32768, 40000),
    ("This request would use 300000 tokens. The maximum for this model is 262144 tokens.", 262144, 300000),
    ("Text too long. The model can process a maximum of 4096 tokens, but 5000 were given", 4096, 5000),
    ("Request contains 50000 tokens; supported context: 32768 tokens.", 32768, 50000),
    ("context length of 8192 tokens exceeded", 8192, None),
    ("Le prompt dépasse la longueur de contexte maximale: 9000 tokens (limite: 8192 tokens)", 8192, 9000),
    ("maximum input length is 8000 tokens, your input has 8350 tokens", 8000, 8350),
]


# Wordings of servers with later rows, and similar ones: message, limit, counted.
MORE_WORDINGS: list[tuple[str, int | None, int | None]] = [
    ("Number of input tokens must be no more than 8192, got 9300", 8192, 9300),  # YandexGPT
    ("Prompt tokens too long", None, None),  # Qianfan, MindIE
    ("Prompt sequence length is greater than 32768, perhaps consider using `truncate_sequence`?", 32768, None),
    ("The message you submitted was too long, please submit something shorter.", None, None),  # ChatGPT
    ("You requested 4104tokens, the context window is 4096tokens", 4096, 4104),
    ("Context length is 8\u202f192 tokens; the prompt has 9\u202f300 tokens, which exceeds it", 8192, 9300),
    ("The model requires a larger context", None, None),
    ("prompt token count of 8490 exceeds the limit of 5000", 5000, 8490),
    ("Input content length exceeds threshold.", None, None),
    ("Model context limit reached. Conversation size exceeds model capacity.", None, None),
    ("The input token count exceeds the maximum number of tokens allowed 5000.", 5000, None),
    ("request (9746 tokens) exceeds the available context size (5000 tokens)", 5000, 9746),
    ("输入 token 超限", None, None),
    # ikawrakow/ik_llama.cpp #1619
    ("Input prompt is too big compared to KV size. Please try increasing KV size.", None, None),
]


PAIRS = [
    ("ctx overflow: need 9001 have 8192", 8_192, 9_001),
    ("Your messages use 130,000 of the 128,000 tokens available", 128_000, 130_000),
    ("Prompt tokens: 70000/65536", 65_536, 70_000),
    ("Input tokens (5000) + max_tokens (4000) > context (8192)", 8_192, None),
    ("Failed: sequence of 2100 tokens cannot fit in model with max position embeddings 2048", 2_048, 2_100),
    ("The input is too long: 90000 characters, at most 65536", None, None),
]


@pytest.mark.parametrize(("message", "limit", "counted"), [*UNKNOWN_WORDINGS, *MORE_WORDINGS, *PAIRS])
def test_wordings_that_nobody_has_seen(message: str, limit: int | None, counted: int | None) -> None:
    read = recognise(400, wire(message=message))
    assert read is not None
    assert (read.limit, read.counted) == (limit, counted)


INNER = json.dumps({"error": {"message": TOO_LONG}})
ENVELOPES: list[object] = [
    TOO_LONG,
    INNER,
    {"errors": [{"status": "400", "title": "Bad Request", "detail": TOO_LONG}]},
    {"error": {"type": "validation", "issues": [{"message": TOO_LONG}]}},
    {"title": "Not valid", "status": 400, "invalid-params": [{"name": "messages", "reason": TOO_LONG}]},
    {"error": {"message": "Provider returned error", "metadata": {"raw": json.dumps({"detail": TOO_LONG})}}},
    {"error": f"Error code: 400 - {{'error': {{'message': '{TOO_LONG}', 'type': 'x', 'code': None}}}}"},
    {"error": {"code": "bad_request", "hint": TOO_LONG}},
]


@pytest.mark.parametrize("envelope", ENVELOPES, ids=json.dumps)
def test_where_the_error_may_be(envelope: object) -> None:
    assert recognise(400, json.dumps(envelope).encode()) == READ


PAGE = f"<html><head><style>{'p {margin: 0}' * 1_000}</style></head><p>{TOO_LONG.replace('>', '&gt;')}</p></html>"
TEXTS = [
    TOO_LONG,
    f"400 Bad Request: {TOO_LONG}",
    PAGE,
    "<?xml version='1.0'?><Error><Code>Bad</Code><Message>" + TOO_LONG.replace(">", "&gt;") + "</Message></Error>",
    f"{{'error': {{'message': '{TOO_LONG}', 'type': 'x'}}}}",
    f'Traceback (most recent call last):\n  File "/app/x.py", line 120, in generate\nValueError: {TOO_LONG}',
    f'{{"error":{{"message":"{TOO_LONG}","type":"cut o',
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_error_that_is_no_json(text: str) -> None:
    assert recognise(500, text.encode()) == READ


IN_SUCCESS: list[object] = [
    {"code": 20_015, "message": TOO_LONG, "data": None},
    {"id": "c", "choices": None, "base_resp": {"status_code": 2013, "status_msg": TOO_LONG}},
    {"error_code": 336_103, "error_msg": TOO_LONG, "id": "as"},
    {"success": False, "errors": [{"code": 5021, "message": TOO_LONG}], "messages": [], "result": {}},
    {"statusCode": 400, "body": INNER},
    {"choices": [{"message": {"content": ""}, "finish_reason": "error", "error": {"code": 400, "message": TOO_LONG}}]},
    {"validationException": {"message": TOO_LONG}},
    [{"error": {"message": TOO_LONG}}],
    INNER,
]


@pytest.mark.parametrize("value", IN_SUCCESS, ids=json.dumps)
def test_an_error_in_an_answer_that_did_not_fail(value: object) -> None:
    body = json.dumps(value).encode()
    assert recognise(200, body) == READ
    assert recognise(200, b": wait\r\n\r\ndata: " + body + b"\r\n\r\n") == READ


@pytest.mark.parametrize("name", ["error", "exception", "stream_error"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_event_that_is_named_an_error(name: str, end: str, mark: str) -> None:
    lines = [": wait", "", f"event: {name}", f'data: {{"message": "{TOO_LONG}"}}', "", ""]
    assert recognise(200, (mark + end.join(lines)).encode()) == READ


CODES_IN_OTHER_STYLES = [
    *("ContextLengthExceeded", "ContextWindowExceededException", "CONTEXT_LENGTH_EXCEEDED", "context-length-exceeded"),
    *("context length exceeded", "contextLengthExceededError"),
]
SHAPES_OF_CODES = [
    *("PromptTooLongError", "err_prompt_exceeded", "CONTEXT_TOO_LONG", "input_tokens_limit_reached"),
    *("conversation_size_exceeded", "exceeds_model_context", "too_many_prompt_tokens", "context_window_error"),
]
CODES_OF_OTHERS = [
    *("token_quota_exceeded", "context_deadline_exceeded", "output_tokens_exceeded", "max_output_context_exceeded"),
    *("prompt_image_too_large", "input_file_too_large", "tokens_per_minute_exceeded", "prompt_name_too_long"),
]


@pytest.mark.parametrize("code", [*CODES_IN_OTHER_STYLES, *SHAPES_OF_CODES])
def test_codes_of_overflows(code: str) -> None:
    assert recognise(400, wire(message="Sorry.", code=code)) is not None
    assert recognise(400, json.dumps({"__type": code, "message": "Sorry."}).encode()) is not None


def test_a_code_that_contradicts_the_sentence() -> None:
    assert recognise(400, wire(message="Too many tokens per minute.", code="err_prompt_exceeded")) is None


@pytest.mark.parametrize("code", CODES_OF_OTHERS)
def test_codes_of_other_errors(code: str) -> None:
    assert recognise(400, wire(message="Sorry.", code=code)) is None


ANSWERS: list[object] = [
    {"code": 0, "message": "Success", "choices": [{"message": {"content": TOO_LONG}}]},
    {"choices": [{"message": {"content": TOO_LONG}}], "base_resp": {"status_code": 0, "status_msg": ""}},
    {"type": "message", "role": "assistant", "content": [{"type": "text", "text": TOO_LONG}]},
    {"model": "m", "message": {"role": "assistant", "content": TOO_LONG}, "done": True, "status": 200},
    {"candidates": [{"content": {"parts": [{"text": TOO_LONG}]}}]},
    {"object": "response", "status": "completed", "error": None, "instructions": TOO_LONG, "output": []},
    {"object": "list", "data": [{"id": "m", "description": TOO_LONG}]},
    {"success": True, "code": 0, "message": "ok", "data": {"answer": TOO_LONG}},
    {"code": 429, "message": "Too many tokens per minute, the limit is 8000."},
    {"error_code": 18, "error_msg": "Open api qps request limit reached"},
]


@pytest.mark.parametrize("value", ANSWERS, ids=json.dumps)
def test_an_answer_that_speaks_of_it_is_none(value: object) -> None:
    body = json.dumps(value).encode()
    assert recognise(200, body) is None
    assert recognise(200, b"data: " + body + b"\n\n") is None


ECHO = {"messages": [{"role": "x", "content": QUOTE}]}
OF_GATEWAYS: list[tuple[int, str]] = [
    (413, "<html><head><title>413 Request Entity Too Large</title></head><center>nginx/1.25.3</center></html>"),
    (413, "<html><body>Request context too large for the buffer, see client_max_body_size</body></html>"),
    (413, "Payload Too Large"),
    (400, "<html><head><title>400 Request Header Or Cookie Too Large</title></head></html>"),
    (500, json.dumps({"error": {"code": "max_retries_exceeded", "message": "The upstream exceeded its retries"}})),
    (422, json.dumps({"detail": "unknown role", "body": json.dumps(ECHO)})),
    (400, json.dumps({"error": f"Error code: 400 - {{'error': {{'message': 'unknown role'}}, 'input': {ECHO!r}}}"})),
    (400, json.dumps({"error": {"message": "Unknown field."}, "text": QUOTE, "info": QUOTE, "hint": QUOTE})),
]


@pytest.mark.parametrize(("status", "body"), OF_GATEWAYS)
def test_other_errors_of_gateways(status: int, body: str) -> None:
    assert recognise(status, body.encode()) is None


ABOUT_SOMETHING_ELSE: list[tuple[int, str]] = [
    (400, "max_tokens (32000) exceeds the model's maximum of 16384 output tokens"),
    (
        413,
        (
            "Request too large for model `llama-3.1-8b-instant` in organization `org_01` service tier "
            "`on_demand` on tokens per minute (TPM): Limit 6000, Requested 7219, please reduce your message size "
            "and try again. Need more tokens? Upgrade to Dev Tier today"
        ),
    ),
    (400, "A maximum of 100 PDF pages may be provided."),
    (413, "request body exceeds 10485760 bytes"),
    (429, "Token usage limit reached for your plan"),
    (400, "temperature must be less than 2"),
    (503, "Model is overloaded with other requests"),
    (400, "Missing required parameter: 'messages'"),
    (400, "Input should be less than or equal to 8192"),
    (400, "The maximum number of tokens to generate is 8192, you asked for 16384"),
    (400, "Invalid value for max_tokens: 40000 is greater than the context length of 32768"),
    (400, "This model does not support tools"),
    (404, "model context-32k not found"),
    (431, "Request Header Fields Too Large"),
    (401, "Your API token has expired; token length must be at least 32"),
    (429, "Request exceeds the tokens-per-minute limit: 40000"),
    (400, "Too many parameters: maximum 32767"),
    (400, "user field too long: maximum 256"),
    (400, "tool_choice not supported with context caching"),
    (400, "The prompt contains 3 images, but the model supports at most 1"),
    (422, "Input validation error: `truncate` must be strictly positive and less than 1024. Given: 2000"),
    (400, "The requested number of output tokens (9000) exceeds the model limit (8192)"),
    (500, "thread context too large: stack overflow"),
    (413, "请求体过大，超过 32MB 限制"),
    (429, "분당 토큰 한도를 초과했습니다"),
]


@pytest.mark.parametrize(("status", "message"), ABOUT_SOMETHING_ELSE)
def test_wordings_of_other_errors(status: int, message: str) -> None:
    assert recognise(status, wire(message=message)) is None


def test_general_words_alone_are_read_as_the_table_is() -> None:
    """Without rows and codes, the general reader recognizes most sentences with the same limits."""
    found = [(recognise(400, wire(message=message), rows=(), codes=()), expected) for message, expected in SENTENCES]
    read = [(mine, expected) for mine, expected in found if mine is not None]
    assert len(read) >= 0.7 * len(found)
    assert all(mine.limit in (None, expected.limit) for mine, expected in read)


def test_a_code_in_a_header_may_veto() -> None:
    body = json.dumps({"message": "The prompt exceeds the context window of 8192 tokens."}).encode()
    assert recognise(400, body, [("x-amzn-errortype", "ValidationException:http://internal/")]) is not None
    assert recognise(400, body, [("x-amzn-errortype", "ThrottlingException:http://internal/")]) is None


MEGABYTE = 1_000_000
HOSTILE = {
    "nested": b'{"error":' * 100_000,
    "brackets": b"[" * MEGABYTE,
    "escapes": wire(message="\\" * MEGABYTE),
    "digits": wire(message="1" * MEGABYTE),
    "spaces": wire(message=" " * MEGABYTE),
    "lines": wire(message="tokens\n" * (MEGABYTE // 7)),
    "almost": wire(message="your messages resulted in " * (MEGABYTE // 26)),
    "objects": b"{ " * (MEGABYTE // 2),
    "half a sentence": wire(message="maximum context length of " * (MEGABYTE // 26)),
    "many events": b'data: {"error":{"message":"no"}}\n\n' * 30_000,
    "numbers": wire(message="8192 9000 " * 99_000),
    "groups": wire(message="1" + ",000" * 240_000),
    "words of limits": wire(message="max input " * 99_000),
    "faults in faults": json.dumps(
        {"detail": [{"msg": "is 9000, 8000 " * 500, "error": {"message": "is 9000, 8000 " * 500}}] * 60}
    ).encode(),
    "reprs": wire(message="{'a': {'b': " * 90_000),
    "a repr of nothing": wire(message="{'a': " + "-" * 8_000 + "1}" + "{'a': [" * 9_000),
    "codes": wire(message="no", code="aB-" * 300_000),
    "east asian": wire(message="输入1" * 200_000),
    "payloads": wire(message="payload too large " * 55_000),
    "exceptions": json.dumps({f"{number}Exception": {"message": "no"} for number in range(40_000)}).encode(),
    "choices": json.dumps({"choices": [{"error": {"message": "no " * 900}}] * 300}).encode(),
}


@pytest.mark.long
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("status", [200, 400])
def test_a_large_body_takes_milliseconds(status: int, body: bytes) -> None:
    def once() -> float:
        start = time.process_time()
        assert recognise(status, body) is None
        return time.process_time() - start

    # The slowest takes 100 ms of CPU. A quadratic search of a megabyte takes minutes.
    assert once() < 0.5 or once() < 0.5


def test_catalogue() -> None:
    if not CATALOGUE.exists():
        pytest.skip("the catalogue of real errors is not here")
    answers = lines(CATALOGUE)
    whole = score("ours", answers, ours)
    assert whole.recall == 1
    assert (whole.alarms, whole.trapped) == ([], [])
    for figure in ("limit", "scope", "counted", "output", "remedy"):
        assert (whole.right[figure].value or 0) >= 0.99, (figure, whole.wrong[figure])
    unknown = score("left out", answers, leaving_out)
    assert unknown.recall >= 0.97, unknown.missed
    assert (unknown.alarms, unknown.trapped) == ([], [])
    assert (unknown.right["limit"].value or 0) >= 0.98, unknown.wrong["limit"]
    for api in APIS:
        of_api = score(api, in_forms_of(api, answers), ours)
        assert of_api.recall >= 0.98, of_api.missed
        assert (of_api.alarms, of_api.trapped) == ([], [])


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("max_total_tokens 9000 must not exceed max_seq_len 8192", True),
        ("标题的长度超过限制 512，请缩短输入", False),
        ("输入长度超过最大长度限制 8192", True),
    ],
)
def test_names_of_parameters_and_of_other_fields(message: str, found: bool) -> None:
    assert (recognise(400, wire(message=message)) is not None) is found
