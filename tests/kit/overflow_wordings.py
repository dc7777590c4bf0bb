"""The stand-in's refusals in the words of other servers: an ASGI layer around it rewrites each one."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.kit.upstream import event


@dataclass(frozen=True)
class Refused:
    """The numbers of a rejection in tokens: the prompt, the window, and the requested output."""

    counted: int
    limit: int
    output: int


@dataclass(frozen=True)
class Wording:
    """How a server says that a prompt is too long: its status, and its body as JSON or as the text of a stream."""

    status: int
    body: Callable[[Refused], Any]
    only_streams: bool = False
    """Whether only streamed requests are refused in these words; others keep the stand-in's own."""
    encoding: str = ""
    """The content encoding that it is sent with."""


def _openai(refused: Refused) -> Any:
    said = f"your messages resulted in {refused.counted} tokens. Please reduce the length of the messages."
    if refused.counted <= refused.limit:
        said = (
            f"you requested {refused.counted + refused.output} tokens ({refused.counted} in the messages, "
            f"{refused.output} in the completion). Please reduce the length of the messages or completion."
        )
    message = f"This model's maximum context length is {refused.limit} tokens. However, {said}"
    return _error(message, "invalid_request_error", "messages", "context_length_exceeded")


def _azure(refused: Refused) -> Any:
    message = (
        f"Input tokens exceed the configured limit of {refused.limit} tokens. Your messages resulted in "
        f"{refused.counted} tokens. Please reduce the length of the messages."
    )
    return _error(message, "invalid_request_error", "messages", "context_length_exceeded")


def _anthropic(refused: Refused) -> Any:
    message = f"prompt is too long: {refused.counted} tokens > {refused.limit} maximum"
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def _gemini(refused: Refused) -> Any:
    message = (
        f"The input token count ({refused.counted}) exceeds the maximum number of tokens allowed ({refused.limit})."
    )
    return [{"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}]


def _vllm(refused: Refused) -> Any:
    """vLLM stops counting at the limit, and says how much it has seen by then."""
    seen = refused.limit + 1
    message = (
        f"This model's maximum context length is {refused.limit} tokens. However, you requested {refused.output} "
        f"output tokens and your prompt contains at least {seen} input tokens, for a total of at least "
        f"{seen + refused.output} tokens. Please reduce the length of the input prompt or the number of requested "
        f"output tokens. (parameter=input_tokens, value={seen})"
    )
    return _error(message, "BadRequestError", "input_tokens", 400)


def _llama_cpp(refused: Refused) -> Any:
    message = (
        f"request ({refused.counted} tokens) exceeds the available context size ({refused.limit} tokens), try "
        "increasing it"
    )
    numbers = {"n_prompt_tokens": refused.counted, "n_ctx": refused.limit}
    return {"error": {"code": 400, "message": message, "type": "exceed_context_size_error", **numbers}}


def _llama_cpp_old(refused: Refused) -> Any:
    message = "the request exceeds the available context size. try increasing the context size or enable context shift"
    return {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}


def _openrouter(refused: Refused) -> Any:
    message = (
        f"This endpoint's maximum context length is {refused.limit} tokens. However, you requested about "
        f"{refused.counted + refused.output} tokens ({refused.counted} of text input, {refused.output} in the output). "
        'Please reduce the length of either one, or use the "middle-out" transform to compress your prompt '
        "automatically."
    )
    return {"error": {"message": message, "code": 400}}


def _openrouter_raw(refused: Refused) -> Any:
    metadata = {"raw": json.dumps(_anthropic(refused)), "provider_name": "Anthropic"}
    return {"error": {"message": "Provider returned error", "code": 400, "metadata": metadata}, "user_id": "user_1"}


def _openrouter_events(refused: Refused) -> str:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "error"}
    chunk = {"id": "gen-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    said = event({**chunk, **_openrouter(refused)}).decode()
    return f": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n{said}"


def _error(message: str, kind: str, param: str, code: str | int) -> Any:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


WORDINGS = {
    "openai": Wording(400, _openai),
    "azure": Wording(400, _azure),
    "anthropic": Wording(400, _anthropic),
    "gemini": Wording(400, _gemini),
    "vllm": Wording(400, _vllm),
    "llama.cpp": Wording(400, _llama_cpp),
    "llama.cpp events": Wording(200, lambda refused: event(_llama_cpp(refused)).decode(), only_streams=True),
    "llama.cpp without figures": Wording(400, _llama_cpp_old),
    "openrouter": Wording(400, _openrouter),
    "openrouter raw": Wording(400, _openrouter_raw),
    "openrouter 200": Wording(200, _openrouter),
    "openrouter events": Wording(200, _openrouter_events, only_streams=True),
}


_PIECE = 10_000
_LIMIT = re.compile(r"maximum context length is (\d+) tokens")
_PARTS = re.compile(r"(\d+) in the (messages|functions|completion)")
_TOTAL = re.compile(r"resulted in (\d+) tokens")


class Worded:
    """The application with its refusals reworded."""

    def __init__(self, app: ASGIApp, wording: Wording) -> None:
        self._app = app
        self._wording = wording

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        held: list[Message] = []

        async def reading() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message

        async def rewording(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 400:
                held.append(message)
            elif held:
                await self._refuse(held.pop(), message, body, send)
            else:
                await send(message)

        await self._app(scope, reading, rewording)

    async def _refuse(self, start: Message, message: Message, request: bytes, send: Send) -> None:
        refused = _read(json.loads(message["body"])["error"])
        streamed = bool(json.loads(request).get("stream"))
        if refused is None or (self._wording.only_streams and not streamed):
            await send(start)
            await send(message)
            return
        content = self._wording.body(refused)
        as_events = isinstance(content, str)
        raw = content.encode() if as_events else json.dumps(content).encode()
        kind = b"text/event-stream" if as_events else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(len(raw)).encode())]
        await send({"type": "http.response.start", "status": self._wording.status, "headers": headers})
        for start_of_piece in range(0, len(raw), _PIECE):
            piece = raw[start_of_piece : start_of_piece + _PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _read(error: Any) -> Refused | None:
    """Return the numbers in the stand-in's own rejection, or ``None`` for another error."""
    limit = _LIMIT.search(error["message"])
    if error.get("code") != "context_length_exceeded" or limit is None:
        return None
    parts = {name: int(size) for size, name in _PARTS.findall(error["message"])}
    output = parts.pop("completion", 0)
    total = _TOTAL.search(error["message"])
    return Refused(int(total[1]) if total else sum(parts.values()), int(limit[1]), output)


MEDIA_WORDINGS = (
    "too many {nouns}: {count} + 0 > {most}",
    "Too much media: {count} {nouns} > {most}",
    "request contains {count} {nouns}, exceeding the maximum of {most} allowed per request",
    "too many {nouns}: maximum allowed for model gpt-4.1 is {most}, got {count}",
    "too many {nouns}; at most {most} are allowed",
    "At most {most} {noun}(s) may be provided in one prompt.",
    "Too many {nouns} provided. This model supports up to {most} {nouns}",
    "You set {noun}={most} (or defaulted to 1) in `--limit-mm-per-prompt`, but passed {count} {noun} items.",
    "Maximum number of {nouns} exceeded: {count} > {most}",
    "Number of {nouns} ({count}) exceeds the limit of {most}",
    "You can only include {most} {nouns} per request",
    "Too many {nouns} in request: {count}. Limit: {most}.",
    "The maximum number of {nouns} you can have is {most}.",
    "{most} {nouns} allowed, but {count} provided",
    "Invalid 'messages': too many {nouns}. Maximum is {most}.",
    "Expected at most {most} {nouns}, received {count}",
    "Exceeded the {most} {noun} limit",
    "{noun} count {count} exceeds {most}",
    "You provided {count} {nouns} but the maximum is {most}",
    "A request can have up to {most} {nouns}; this one has {count}.",
)
"""How upstreams refuse more than ``most`` images or files. The last figure isn't always the limit."""

MEDIA_NEAR_MISSES = (
    "Invalid image in message 3",
    "Image 3 exceeds the maximum allowed size of 5 MB",
    "messages.0.content.1.image: At least one of the image dimensions exceed max allowed size: 8000 pixels",
    "image exceeds 5 MB maximum: 6291456 bytes > 5242880 bytes",
    "This model supports 0 images",
    "At most 0 image(s) may be provided in one prompt.",
    "Rate limit reached for images: 5 per minute",
    "Too many images: limit 10 images per minute",
    "This model does not support image input",
    "Only 4 image formats are supported: png, jpeg, gif, webp",
    "images with up to 4 channels are supported",
    "the requested image size exceeds the limit of this endpoint",
    "Image tokens exceed the maximum of 16",
    "Images must be at most 20 megapixels",
    "Could not process image 12",
    "Failed to decode images: 7 of at most 24",
    "max_tokens must be at most 16",
    "Too many messages: at most 16",
    "tools: at most 16 tools",
    "The maximum image size is 5.",
    "Maximum number of images exceeded",
)
"""Errors about images that fewer images don't mend, or that name no limit."""
