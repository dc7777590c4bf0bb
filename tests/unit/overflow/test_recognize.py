"""Recognize overflow errors, reject other errors, and stay fast."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from bench.overflow.lines import CATALOGUE, lines
from bench.overflow.scores import leaving_out, ours, score
from proxy.overflow import EchoedRequest, Overflow, recognise
from proxy.overflow.figures import Scope
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
        f"{WINDOW} 8192 tokens. However, you requested 9100 tokens (5100 in the messages, 1000 in the functions, and "
        "3000 in the completion). Please reduce the length.",
        Overflow("input_plus_output", 8192, "total", 6100, 3000, "either"),
    ),
    (
        f"{WINDOW} 32768 tokens. However, you requested 41648 tokens (37552 in the messages, 4096 in the completion).",
        Overflow("input", 32768, "total", 37552, 4096, "compact"),
    ),
    ("prompt is too long: 209353 tokens > 199999 maximum", too_long(199999, 209353)),
    (
        "input length and `max_tokens` exceed context limit: 80000 + 128000 > 200000, decrease it",
        Overflow("input_plus_output", 200000, "total", 80000, 128000, "lower_output"),
    ),
    (
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        too_long(1048576, 1200000, "input"),
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
    ("Requested tokens (817) exceed context window of 512", too_long(512, 817)),
    (
        "This endpoint's maximum context length is 131072 tokens. However, you requested about 150000 tokens (90000 of "
        'text input, 10000 of tool input, 50000 in the output). Use the "middle-out" transform.',
        Overflow("input_plus_output", 131072, "total", 100000, 50000, "either"),
    ),
    ("prompt is too long: 3000 tokens > 4096 maximum", too_long(4096)),  # a count under the limit isn't plausible
    ("prompt is too long: 30 tokens > 20 maximum", too_long(None, 30)),  # too small for a limit
    ("prompt is too long for this model's context window of 128k tokens", too_long()),
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
        "llama.cpp, numbers as fields",
        400,
        wire(code=400, message="?", type="exceed_context_size_error", n_prompt_tokens=17331, n_ctx=16384),
        too_long(16384, 17331),
    ),
    (
        "numbers in fields of their own",
        400,
        wire(message="context window exceeded", max_input_tokens=8192, prompt_tokens=9000),
        too_long(8192, 9000, "input"),
    ),
    (
        "llama.cpp, old stream",
        200,
        b'error: {"code":400,"message":"the request exceeds the available context size. try increasing it"}\n\n',
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
        "litellm as a hop, python's bytes",
        400,
        wire(message=f"litellm.BadRequestError: XException - b'{wire(message=TOO_LONG).decode()}'. Received Model=x"),
        READ,
    ),
    (
        "a client library's repr as a hop",
        502,
        wire(message=f"Error code: 400 - {{'error': {{'message': \"{QUOTE}\", 'code': 'context_length_exceeded'}}}}"),
        too_long(8192, 9031),
    ),
    ("read at its start", 400, wire(message=TOO_LONG)[:-1] + b',"echo":"' + b"x" * 4_000_000 + b'"}', READ),
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
    ("Context window exceeded: 140000 tokens provided, model allows 131072.", 131072, 140000),
    ("Input has 9001 tokens but the model's context is limited to 8192 tokens", 8192, 9001),
    ("total tokens (input + output) of 40000 exceed the context length 32768", 32768, None),
    ("Prompt length 10050 exceeds model context length 8192", 8192, 10050),
    ("Your request has 210000 input tokens, more than the 200000 that this model can handle.", 200000, 210000),
    ("Sequence length 33000 is longer than the maximum sequence length of 32768", 32768, 33000),
    (
        (
            "Token indices sequence length is longer than the specified maximum sequence length for this model "
            "(5000 > 4096)."
        ),
        4096,
        5000,
    ),
    ("The number of tokens in your prompt (9000) exceeds the max of 8192", 8192, 9000),
    ("request exceeds max context: got 70000 tokens, max 65536", 65536, 70000),
    ("Conversation too long for this model. Limit: 128000 tokens. Yours: 150000 tokens.", 128000, 150000),
    ("n_tokens (9000) > n_ctx (8192)", 8192, 9000),
    ("the prompt does not fit into the context window", None, None),
    ("Input too long for requested model", None, None),
    ("Input is too long for requested model.", None, None),
    (
        ("Error: token limit exceeded. This model supports up to 32000 tokens, but the messages contain 33412."),
        32000,
        33412,
    ),
    ("too many tokens in prompt: 131075 > 131072", 131072, 131075),
    ("Please shorten your prompt: the maximum is 16384 tokens", 16384, None),
    ("input_tokens (40000) + max_new_tokens (1000) must be <= 32768", 32768, 40000),
    ("The messages exceed the model's context window by 3021 tokens", None, None),
    ("context_window_overflow: messages total 220345 tokens; the limit is 200000", 200000, 220345),
    ("This request would use 300000 tokens. The maximum for this model is 262144 tokens.", 262144, 300000),
    ("Prompt tokens: 9000, max allowed: 8000", 8000, 9000),
    ("prompt_tokens=12000 exceeds max_input_tokens=8192", 8192, 12000),
    ("Your input of 1100000 tokens is larger than the maximum allowed input of 1048576 tokens", 1048576, 1100000),
    ("Text too long. The model can process a maximum of 4096 tokens, but 5000 were given", 4096, 5000),
    ("The input exceeds the maximum length of 30720 tokens.", 30720, None),
    ("max context length is 4096, but got 5123 tokens", 4096, 5123),
    ("inputs tokens + max_new_tokens must be <= 8192. Given: 8000 inputs tokens and 1000 max_new_tokens", 8192, 8000),
    ("Request contains 50000 tokens; supported context: 32768 tokens.", 32768, 50000),
    ("Total number of tokens 9000 exceeds the limit of 8192 for this model", 8192, 9000),
    ("Message too long: 12003 tokens (max 8192)", 8192, 12003),
    ("prompt has 5000 tokens > max_seq_len 4096", 4096, 5000),
    ("The history is too large: 9000/8192 tokens", 8192, 9000),
    ("context length of 8192 tokens exceeded", 8192, None),
    ("Sorry, the conversation has grown beyond this model's context window (200k tokens).", None, None),
    ("Cannot process prompt with 100352 tokens as the limit is 100000", 100000, 100352),
    ("Le prompt dépasse la longueur de contexte maximale: 9000 tokens (limite: 8192 tokens)", 8192, 9000),
    ("提示词长度超过模型上下文长度限制: 9000 > 8192", 8192, 9000),
    ("输入 tokens 数 140000 超过最大限制 131072", 131072, 140000),
    ("the request would exceed the model's max_position_embeddings (4096)", 4096, None),
    ("maximum input length is 8000 tokens, your input has 8350 tokens", 8000, 8350),
    ("Input validation error: inputs must have less than 4096 tokens. Given: 5000", 4096, 5000),
    (
        (
            "You passed 4097 input tokens and requested 100 output tokens. However, the model's context length "
            "is only 4096 tokens, resulting in a maximum input length of 3996 tokens. Please reduce the length "
            "of the input prompt. (parameter=input_tokens, value=4097)"
        ),
        4096,
        4097,
    ),
]


# Wordings of servers with later rows, and similar ones: message, limit, counted.
MORE_WORDINGS: list[tuple[str, int | None, int | None]] = [
    ("Number of input tokens must be no more than 8192, got 9300", 8192, 9300),  # YandexGPT
    ("folder_id=b1: text length is 412000, which is outside the range (0, 100000]", None, None),  # YandexGPT
    ("the max input characters is 24000", None, None),  # Qianfan
    ("input characters limit is 480000", None, None),  # Qianfan
    ("input token limit is 98304", 98304, None),  # Qianfan
    ("Prompt tokens too long", None, None),  # Qianfan, MindIE
    ("number of input tokens (150500) has exceeded max_prompt_tokens (131072) limit.", 131072, 150500),  # SiliconFlow
    ("Input too long. Recieved 5105 tokens, but the maximum input length is 4096 tokens.", 4096, 5105),  # Anyscale
    ("Number of prompt tokens: 9300 exceeds model max length: 8192", 8192, 9300),  # OpenVINO
    ("Prompt sequence length is greater than 32768, perhaps consider using `truncate_sequence`?", 32768, None),
    (
        "Reached context length of 4096 tokens with model (arch: x) that does not currently support mid-generation "
        "context overflow. Try reloading with a larger context length or shortening the prompt/chat.",
        4096,
        None,
    ),  # LM Studio
    ("Content contains 4300 tokens, which exceeds the maximum allowed context size of 4096.", 4096, 4300),  # Apple
    ("Provided 4,300 tokens, but the maximum allowed is 4,096.", 4096, 4300),  # Apple
    ("max tokens of 131072 exceeded", 131072, None),  # Snowflake
    ("The message you submitted was too long, please submit something shorter.", None, None),  # ChatGPT
    ("Malformed input request: expected maxLength: 50000, actual: 52000, please reformat", None, None),  # Bedrock
    ("rpc error: code = InvalidArgument desc = prompt token count (40100) cannot exceed 32768.", 32768, 40100),
    ("Combined prompt+completion length 9300 exceeds model max length 8192", 8192, None),  # vLLM
    ("The input(130100tokens) is longer than the model's context length (81920tokens)", 81920, 130100),  # SGLang
    ("You requested 4104tokens, the context window is 4096tokens", 4096, 4104),
    ("Text in request is too long. Used 33000 tokens, the token limit is 32768", 32768, 33000),
    ("Input exceeds the limit of 200.000 tokens: 214.310 tokens", 200000, 214310),
    ("Context length is 8\u202f192 tokens; the prompt has 9\u202f300 tokens, which exceeds it", 8192, 9300),
    ("Input validation error: prompt exceeds the context window", None, None),
    ("This model's maximum context length is 8192 tokens. See our documents.", 8192, None),
    ("max_model_len exceeded", None, None),
    ("Model context window is 128k tokens, you requested 256k tokens", None, None),
    ("The model requires a larger context", None, None),
    ("too many tokens in the prompt", None, None),
    ("上下文超出限制", None, None),
    ("超出最大上下文长度", None, None),
    ("请压缩上下文后重试", None, None),
    ("输入 token 超限", None, None),
    ("token数量超过上限。对话历史+问题的字数太多，需要精简输入", None, None),  # Spark
    ("当前输入tokens为40000，超过模型支持的最大长度32768", 32768, 40000),
    ("输入序列长度（9300）超过最大长度（8192）", 8192, 9300),  # MindIE
    ("コンテキスト長（8192）を超えています", 8192, None),
    ("컨텍스트 길이(8192 토큰)를 초과했습니다", 8192, None),
    ("Слишком много токенов в запросе: 33000 при лимите 32768", 32768, 33000),  # GigaChat
    ("Le nombre de tokens (9000) dépasse la limite du modèle (8192)", 8192, 9000),
]


PAIRS = [
    ("ctx overflow: need 9001 have 8192", 8_192, 9_001),
    ("Token limit exceeded: 33000 of 32768", 32_768, 33_000),
    ("Your messages use 130,000 of the 128,000 tokens available", 128_000, 130_000),
    ("Prompt tokens: 70000/65536", 65_536, 70_000),
    ("Too many tokens: 70000. Max: 65536.", 65_536, 70_000),
    ("Input tokens (5000) + max_tokens (4000) > context (8192)", 8_192, None),
    ("The request has 1,200,000 tokens which is greater than 1,048,576.", 1_048_576, 1_200_000),
    ("Failed: sequence of 2100 tokens cannot fit in model with max position embeddings 2048", 2_048, 2_100),
    ("Request rejected: 210000 input tokens, model takes 200000", 200_000, 210_000),
    ("Payload too large: the prompt has 140000 tokens, context is 128000", 128_000, 140_000),
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
    [TOO_LONG],
    INNER,
    {"err": TOO_LONG},
    {"errcode": 40_001, "errmsg": TOO_LONG},
    {"errors": [TOO_LONG]},
    {"errors": {"messages": [TOO_LONG]}},
    {"errors": [{"status": "400", "title": "Bad Request", "detail": TOO_LONG}]},
    {"errors": [{"message": "Bad", "extensions": {"exception": {"message": TOO_LONG}}}], "data": None},
    {"exception": f"ValueError: {TOO_LONG}"},
    {"fault": {"faultstring": TOO_LONG}},
    {"fault": {"code": 900_800, "message": "Bad", "description": TOO_LONG}},
    {"result": {"error": {"message": TOO_LONG}}},
    {"error": {"type": "validation", "issues": [{"message": TOO_LONG}]}},
    {"error": {"message": "Bad", "param_errors": {"messages": TOO_LONG}}},
    {"error": {"message": "Bad", "details": [{"fieldViolations": [{"field": "contents", "description": TOO_LONG}]}]}},
    {"error": "invalid_request", "error_description": TOO_LONG},
    {"detail": [{"loc": ["body", "messages"], "msg": TOO_LONG}]},
    {"detail": {"error": {"message": TOO_LONG}}},
    {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": TOO_LONG},
    {"title": "Not valid", "status": 400, "invalid-params": [{"name": "messages", "reason": TOO_LONG}]},
    {"status": {"code": 400, "message": TOO_LONG}},
    {"statusCode": 400, "message": [TOO_LONG], "error": "Bad Request"},
    {"__type": "ValidationException", "Message": TOO_LONG},
    {"error": {"message": "Provider returned error", "metadata": {"raw": json.dumps({"detail": TOO_LONG})}}},
    {"error": {"message": "failed", "original_error": TOO_LONG}},
    {"error": {"message": "failed", "provider_error": {"error": {"message": TOO_LONG}}}},
    {"name": "APICallError", "statusCode": 400, "responseBody": INNER},
    {"error": "upstream", "body": INNER},
    {"error": f"Error code: 400 - {{'error': {{'message': '{TOO_LONG}', 'type': 'x', 'code': None}}}}"},
    {"message": f"Error code: 400 - {{'error': {{'message': \"It's this: {TOO_LONG}\", 'code': 400}}}} (x)"},
    {"choices": [{"finish_reason": "error", "error": {"code": 400, "message": TOO_LONG}, "message": {"content": ""}}]},
    {"error": {"code": "bad_request", "hint": TOO_LONG}},
    {"code": 4001, "info": TOO_LONG, "data": None},
    {"code": 4001, "data": TOO_LONG},
    {"allow_retry": False, "text": TOO_LONG},
    {"errors": [], "messages": [TOO_LONG]},
    {"validationException": {"message": TOO_LONG}},
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
    {"Response": {"Error": {"Code": "InvalidParameterValue", "Message": TOO_LONG}, "RequestId": "r"}},
    {"ResponseMetadata": {"RequestId": "r", "Error": {"Code": "x", "Message": TOO_LONG}}},
    {"header": {"code": 10_907, "message": TOO_LONG, "sid": "s"}},
    {"error_code": 336_103, "error_msg": TOO_LONG, "id": "as"},
    {"errorMessage": TOO_LONG, "errorType": "ValueError", "stackTrace": []},
    {"success": False, "errors": [{"code": 5021, "message": TOO_LONG}], "messages": [], "result": {}},
    {"success": False, "msg": TOO_LONG},
    {"detail": [{"loc": ["body"], "msg": TOO_LONG, "type": "value_error"}]},
    {"detail": TOO_LONG},
    {"statusCode": 400, "body": INNER},
    {"choices": [], "code": 400, "message": TOO_LONG},
    {"choices": [{"message": {"content": ""}, "finish_reason": "error", "error": {"code": 400, "message": TOO_LONG}}]},
    {"object": "error", "message": TOO_LONG},
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
    (413, "<html><head><title>413 Payload Too Large</title></head><body><center>cloudflare</center></body></html>"),
    (413, "<html><body>Request context too large for the buffer, see client_max_body_size</body></html>"),
    (413, "<h2>HTTP Error 413.1</h2>Request filtering denied a request that exceeds the request content length."),
    (413, "Payload Too Large"),
    (413, "http: request body too large"),
    (413, "Failed to buffer the request body: length limit exceeded"),
    (413, json.dumps({"detail": "Content too large"})),
    (414, "<h1>URI Too Long</h1>"),
    (400, "<html><head><title>400 Request Header Or Cookie Too Large</title></head></html>"),
    (502, "<html>502 Bad Gateway: upstream sent too big header while reading response header</html>"),
    (500, json.dumps({"error": {"code": "max_retries_exceeded", "message": "The upstream exceeded its retries"}})),
    (422, json.dumps({"detail": "unknown role", "body": json.dumps(ECHO)})),
    (422, json.dumps({"detail": [{"msg": "Input should be 'user'", "input": ECHO}], "body": ECHO})),
    (400, json.dumps({"error": {"message": "unknown role", "data": ECHO}})),
    (400, json.dumps({"error": f"Error code: 400 - {{'error': {{'message': 'unknown role'}}, 'input': {ECHO!r}}}"})),
    (400, json.dumps({"error": {"message": "请求过于频繁，每分钟 token 数超过限制"}})),
    (400, json.dumps({"error": {"message": "您的 token 余额不足，输入超过限制"}})),
    (400, json.dumps({"error": {"message": "输入的图片数量超过限制"}})),
    (400, json.dumps({"error": {"message": "Unknown field."}, "text": QUOTE, "info": QUOTE, "hint": QUOTE})),
    (400, json.dumps({"message": "Unknown role.", "data": QUOTE, "messages": [QUOTE]})),
    (400, json.dumps({"detail": "no", "choices": [{"message": {"role": "assistant", "content": QUOTE}}]})),
    (400, json.dumps({"messages": [{"role": "user", "content": QUOTE}]})),
]


@pytest.mark.parametrize(("status", "body"), OF_GATEWAYS)
def test_other_errors_of_gateways(status: int, body: str) -> None:
    assert recognise(status, body.encode()) is None


ABOUT_SOMETHING_ELSE: list[tuple[int, str]] = [
    (400, "max_tokens (32000) exceeds the model's maximum of 16384 output tokens"),
    (400, "The requested max_tokens 100000 is larger than the context window 32768"),
    (400, "max_completion_tokens must be less than or equal to 65536"),
    (
        429,
        (
            "Request too large for model `llama-3.3-70b` in organization `org_x` service tier `on_demand` on "
            "tokens per minute (TPM): Limit 12000, Requested 23014, please reduce your message size and try again."
        ),
    ),
    (
        413,
        (
            "Request too large for model `llama-3.1-8b-instant` in organization `org_01` service tier "
            "`on_demand` on tokens per minute (TPM): Limit 6000, Requested 7219, please reduce your message size "
            "and try again. Need more tokens? Upgrade to Dev Tier today"
        ),
    ),
    (400, "Too many messages: 2301 exceeds the maximum of 2048"),
    (400, "You have exceeded the maximum number of tools: 128"),
    (400, "messages: at most 100 images are allowed in a request"),
    (400, "prompt: too many images and documents: 120 + 3 > 100"),
    (400, "A maximum of 100 PDF pages may be provided."),
    (400, "Function name too long: maximum length is 64"),
    (400, "tools.0.function.description: string too long. maximum length 1024"),
    (400, "stop: maximum number of stop sequences is 4"),
    (413, "Payload Too Large"),
    (413, "request body exceeds 10485760 bytes"),
    (413, "Request size exceeds the limit of 20 MB"),
    (400, "image exceeds 5 MB maximum: 7340032 bytes > 5242880 bytes"),
    (429, "You have exceeded your monthly token limit of 1000000 tokens"),
    (429, "Token usage limit reached for your plan"),
    (403, "token limit for this key exceeded"),
    (400, "The total size of the attachments exceeds the maximum of 30000000 bytes"),
    (400, "temperature must be less than 2"),
    (400, "top_logprobs exceeds maximum 20"),
    (400, "Invalid request: n must be at most 8"),
    (500, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    (500, "out of memory: KV cache allocation of 8192 MB failed"),
    (503, "Model is overloaded with other requests"),
    (503, "Maximum number of concurrent requests reached (100)"),
    (400, "metadata values must be at most 512 characters"),
    (400, "The audio file is too long. Maximum duration is 1500 seconds"),
    (400, "Tool call arguments too large: exceeds limit of 100000 characters"),
    (400, "Missing required parameter: 'messages'"),
    (400, 'messages: roles must alternate between "user" and "assistant"'),
    (400, "budget_tokens must be less than max_tokens"),
    (400, "messages.1.content: Input should be a valid list"),
    (400, "Input should be less than or equal to 8192"),
    (400, "max_tokens: Input should be greater than or equal to 1"),
    (400, "cache_control blocks: A maximum of 4 blocks with cache_control may be provided. Found 5."),
    (400, "The maximum number of tokens to generate is 8192, you asked for 16384"),
    (400, "max_new_tokens exceeds limit 4096"),
    (400, "Expected maximum output tokens 8192, received 20000"),
    (400, "`max_tokens` too large: 200000. Model context window is 131072"),
    (400, "Invalid value for max_tokens: 40000 is greater than the context length of 32768"),
    (429, "Too many requests. Limit is 60 requests per minute."),
    (429, "Quota exceeded for quota metric 'Generate Content API requests per minute'"),
    (
        429,
        (
            "You exceeded your current quota: "
            "generativelanguage.googleapis.com/generate_content_free_tier_input_token_count, limit: 125000"
        ),
    ),
    (429, "Too many tokens per day, please wait before trying again."),
    (400, "This model does not support tools"),
    (400, "Input content contains sensitive information"),
    (400, "json_schema nesting depth exceeds maximum of 5"),
    (404, "model context-32k not found"),
    (400, "The model is not available in your region"),
    (500, "Internal error: sequence 4097 exceeded retries"),
    (500, "Error: Maximum call stack size exceeded"),
    (400, "header value too long: maximum 8192"),
    (431, "Request Header Fields Too Large"),
    (400, "Session limit exceeded: maximum 1000 active conversations"),
    (400, "You have reached the maximum number of messages in this conversation"),
    (400, "The embedding input must have at most 2048 items"),
    (400, "Invalid token: exceeds allowed lifetime"),
    (401, "Your API token has expired; token length must be at least 32"),
    (400, "JWT token too long"),
    (400, "user message must not be empty; the input is too short"),
    (400, "thinking.budget_tokens: 65536 exceeds the maximum allowed 32000 tokens"),
    (400, "Video exceeds the maximum of 768 frames"),
    (429, "Request exceeds the tokens-per-minute limit: 40000"),
    (400, "The input image has 9000 tokens, which exceeds the maximum image size"),
    (500, "request timed out: the prompt took too long to process"),
    (504, "the upstream took too long"),
    (400, "logit_bias has more than 1024 entries"),
    (400, "Too many parameters: maximum 32767"),
    (400, "System prompt is required"),
    (502, "context canceled"),
    (500, "context deadline exceeded while awaiting headers"),
    (400, "Batch size exceeds limit: 96"),
    (400, "user field too long: maximum 256"),
    (400, "The completion exceeded the maximum output length of 8192 tokens"),
    (400, "Your account has insufficient tokens to process this prompt. Required 12000, remaining 4000"),
    (400, "Not enough tokens left: this request requires 5000 tokens but your balance is 1200"),
    (529, "Overloaded"),
    (400, "tool_choice not supported with context caching"),
    (400, "Cached content is too small. total_token_count=1024, min_total_token_count=4096"),
    (400, "Cannot cache: prompt must have more than 1024 tokens"),
    (400, "The prompt contains 3 images, but the model supports at most 1"),
    (400, "max_prompt_tokens must be greater than 256"),
    (400, "context_length must be between 512 and 131072"),
    (422, "Input validation error: `max_new_tokens` must be <= 512. Given: 600"),
    (422, "Input validation error: `truncate` must be strictly positive and less than 1024. Given: 2000"),
    (400, "`max_tokens` must be at most `16384`: the maximum for it is less than the `context_window` of this model"),
    (400, "Malformed input request: #/textToImageParams/text: expected maxLength: 512, actual: 560"),
    (400, "Requested 310000 tokens, max 300000 tokens per minute"),
    (400, "Exceeding the limiting length: [max_tokens should be less or equal to 131072]"),
    (400, "The requested number of output tokens (9000) exceeds the model limit (8192)"),
    (400, "The response exceeded the maximum number of tokens and was cut"),
    (400, "user_id is too long: maximum length is 64"),
    (400, "The prompt_cache_key exceeds the maximum length of 64 characters"),
    (400, "Text exceeds the token limit of your plan."),
    (500, "thread context too large: stack overflow"),
    (500, "grpc: received message larger than max (5242880 vs. 4194304)"),
    (400, "输出长度超限，请降低 max_tokens"),
    (400, "max_tokens超过最大值8192"),
    (400, "已达到最大令牌数量限制 (1000)"),
    (413, "请求体过大，超过 32MB 限制"),
    (400, "消息数量超过限制"),
    (400, "文件内容超过大小限制"),
    (429, "本月tokens使用量超过套餐上限"),
    (429, "Превышен лимит токенов в минуту"),
    (429, "분당 토큰 한도를 초과했습니다"),
    (429, "1分あたりのトークン数が上限を超えました"),
    (400, "Image URL in message is too long: 3000 characters exceeds the maximum of 2048"),
    (400, "Too many tools: 130 of 128"),
    (429, "Too many tokens, please wait before trying again."),
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


def test_where_waiting_is_asked_for_only_a_context_window_counts() -> None:
    message = "Request has 70000 tokens, more than the maximum of 65536."
    assert recognise(400, wire(message=message)) is not None
    assert recognise(429, wire(message=message)) is None
    assert recognise(400, wire(message=message), [("retry-after", "3")]) is None
    assert recognise(429, wire(message=QUOTE)) is not None


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
    "numbers": wire(message="8192 9000 " * 99_000),
    "sums": wire(message="1+1+" * 240_000),
    "groups": wire(message="1" + ",000" * 240_000),
    "comparisons": wire(message="> 9000 " * 140_000),
    "words of limits": wire(message="max input " * 99_000),
    "faults in faults": json.dumps(
        {"detail": [{"msg": "is 9000, 8000 " * 500, "error": {"message": "is 9000, 8000 " * 500}}] * 60}
    ).encode(),
    "echo": wire(message="no", echo=[{"message": QUOTE}] * 9_000),
    "reprs": wire(message="{'a': {'b': " * 90_000),
    "styles": b"<" + b"<style>" * 140_000,
    "a repr of nothing": wire(message="{'a': " + "-" * 8_000 + "1}" + "{'a': [" * 9_000),
    "codes": wire(message="no", code="aB-" * 300_000),
    "codes without end": wire(message="no", code="input_" * 160_000),
    "east asian": wire(message="输入1" * 200_000),
    "dots": wire(message="1.000" * 190_000),
    "payloads": wire(message="payload too large " * 55_000),
    "exceptions": json.dumps({f"{number}Exception": {"message": "no"} for number in range(40_000)}).encode(),
    "hints": json.dumps({"error": {"messages": ["no " * 50] * 6_000, "hint": "is 9000, " * 9_000}}).encode(),
    "choices": json.dumps({"choices": [{"error": {"message": "no " * 900}}] * 300}).encode(),
    "a long event": b"event: error\ndata: " + wire(message="no", echo=[{"message": QUOTE}] * 9_000) + b"\n\n",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("status", [200, 400])
def test_a_large_body_takes_milliseconds(status: int, body: bytes) -> None:
    def once() -> float:
        start = time.process_time()
        assert recognise(status, body) is None
        return time.process_time() - start

    # The slowest takes 100 ms of CPU. A quadratic search of a megabyte takes minutes.
    assert min(once() for _ in range(2)) < 0.5


def test_catalogue() -> None:
    if not CATALOGUE.exists():
        pytest.skip("the catalogue of real errors is not here")
    answers = lines(CATALOGUE)
    whole = score("ours", answers, ours)
    assert whole.recall == 1
    assert (whole.alarms, whole.trapped) == ([], [])
    for figure in ("limit", "scope", "counted", "output", "remedy"):
        assert (whole.share(figure) or 0) >= 0.99, (figure, whole.wrong[figure])
    unknown = score("left out", answers, leaving_out)
    assert unknown.recall >= 0.97, unknown.missed
    assert (unknown.alarms, unknown.trapped) == ([], [])
    assert (unknown.share("limit") or 0) >= 0.98, unknown.wrong["limit"]
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


# Wordings that the general rules once misread, with their sources: limit and size, or ``None`` for another problem.
COLLECTED: list[tuple[str, tuple[int | None, int | None] | None]] = [
    # SambaNova, github.com/cline/cline/issues/294
    (
        "Requested generation length 1 is not possible! The provided prompt is 4309 tokens long, so generating 1 "
        "tokens requires a sequence length of 4310, but the maximum supported sequence length is just 4096!",
        (4096, None),
    ),
    # github.com/lm-sys/FastChat
    (
        "This model's maximum generated tokens include context are 8192, However, your context resulted in 9100 tokens",
        (8192, 9100),
    ),
    # github.com/alibaba/rtp-llm
    ("model max tokens is 32768, request length is 40100, max_new_tokens is -7332", (32768, 40100)),
    # TabbyAPI, github.com/SillyTavern/SillyTavern/issues/3543
    ("Request length 71599 + 2048 is greater than max_seq_len 65536", (65536, 71599)),
    # github.com/ModelTC/lightllm
    ("the input prompt token len 9000 + max_new_tokens 1024 > 8192", (8192, 9000)),
    # github.com/ranxianglei/billion-context/issues/969
    ("context ~19344 tokens exceeds the model window 18320 (model=main), with 1 compressible range", (18320, 19344)),
    ("input is larger than the context", (None, None)),
    # github.com/triton-inference-server/tensorrtllm_backend/issues/565
    (
        "Encountered an error when fetching new request: Prompt length (20000) exceeds maximum input length (8192)",
        (8192, 20000),
    ),
    # github.com/ModelTC/lightllm, github.com/xorbitsai/inference, github.com/openclaw/openclaw, and Aphrodite
    ("stop token length too long.", None),
    ("Max tokens exceeds model's max length", None),
    ("Model context window too small (minimum is 128k tokens)", None),
    (
        "The decoder prompt contains a(n) image item with 20000 embedding tokens, which exceeds the pre-allocated "
        "encoder cache size 8192. Please reduce the input size or increase the encoder cache size.",
        None,
    ),
]


@pytest.mark.parametrize(("message", "figures"), COLLECTED)
def test_wordings_that_were_misread(message: str, figures: tuple[int | None, int | None] | None) -> None:
    read = recognise(400, wire(message=message))
    assert (read and (read.limit, read.counted)) == figures


@pytest.mark.parametrize("status", [400, 403, 429])
@pytest.mark.parametrize(
    "message",
    [
        "The long context beta is not yet available for this subscription.",
        "Extra usage is required for long context requests.",
        "Long context isn't available for your plan. Upgrade to use prompts over 200K tokens.",
        "This organization isn't eligible for 1M context. Contact sales to have it enabled.",
    ],
)
def test_a_plan_without_long_prompts_shows_their_limit(message: str, status: int) -> None:
    body = json.dumps({"type": "error", "error": {"type": "rate_limit_error", "message": message}}).encode()
    told = recognise(status, body, request=EchoedRequest(b'{"messages": "' + b"x " * 400_000 + b'"}'))
    assert told == Overflow("input", 200_000, "input", None, None, "compact", gate=True)
    assert recognise(status, body, request=EchoedRequest(b"{}")) is None
