"""A stand-in for Anthropic's ``/v1/messages`` that binds thinking to the prompt before it, and enforces a window.

It plays the agent of ``agent_script``. Chat completions, for example for summaries, go to ``StandIn``.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tests.kit.agent_script import Received, Record, Script, Step, step
from tests.kit.anthropic_server import event
from tests.kit.message_checks import (
    THINKING,
    Block,
    Message,
    Refused,
    blocks_of,
    check_breakpoints,
    check_manual_thinking,
    check_results,
    check_shape,
    merged,
    size_of,
    text_of,
)
from tests.kit.upstream import StandIn, first_tokens, is_summary_request, summarise, text_tokens

Check = Literal["error", "drop_block", "off"]

BINDING_BETA = "thinking-binding-controls-2026-08-01"
MISMATCH = (
    "messages.{0}.content.{1}: Invalid `signature` in `thinking` block. The block is bound to a different "
    'conversation. Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)


@dataclass(frozen=True, slots=True)
class Thought:
    """A thinking block that the server wrote, the digest of the prompt before it, and the signature before it."""

    text: str
    prompt: str
    previous: str | None


class StrictMessages(Record):
    """The stand-in.

    ``window`` limits the input in tokens, and with ``counts_output`` also the sum with ``max_tokens``. ``ratio`` is the
    server's tokens per token of ``o200k_base``. ``check`` decides about thinking behind a changed prompt: reject the
    request, drop the block and all later ones, or accept it. A client can request ``drop_block`` with the beta header.
    With ``alternate``, neighbors with the same role are an error. Otherwise they're merged, as Anthropic does.
    ``script`` decides the answers.
    """

    def __init__(
        self,
        window: int = 16_000,
        *,
        check: Check = "error",
        alternate: bool = False,
        ratio: float = 1.0,
        script: Script = step,
        counts_output: bool = False,
    ) -> None:
        super().__init__()
        self.window = window
        self.check = check
        self.alternate = alternate
        self.ratio = ratio
        self.counts_output = counts_output
        self._script = script
        self.chat = StandIn(window=window)
        self._thoughts: dict[str, Thought] = {}
        self._ids = itertools.count(1)
        self.app = Starlette(
            routes=[
                Route("/v1/messages", self._create, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
                Mount("/", self.chat.app),
            ]
        )

    async def _create(self, request: Request) -> Response:
        body = json.loads(await request.body())
        received = Received(request.url.path, dict(request.headers), body)
        received.summary = is_summary_request(body)
        self.requests.append(received)
        try:
            kept = self._admitted(received)
            received.tokens = size_of({**body, "messages": kept}, self.ratio)
            received.overflow = received.tokens > self.window
            if received.overflow:
                raise Refused(f"prompt is too long: {received.tokens} tokens > {self.window} maximum")
            received.overflow = self.counts_output and received.tokens + body["max_tokens"] > self.window
            if received.overflow:
                raise Refused(
                    f"input length and `max_tokens` exceed context limit: {received.tokens} + {body['max_tokens']} > "
                    f"{self.window}, decrease input length or `max_tokens` and try again"
                )
        except Refused as refused:
            received.fault = None if received.overflow else str(refused)
            received.status = refused.status
            return JSONResponse(refused.body, refused.status, refused.headers)
        received.status = 200
        answer = self._answer(received, kept)
        if body.get("stream"):
            return StreamingResponse(stream(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    async def _count(self, request: Request) -> Response:
        return JSONResponse({"input_tokens": size_of(json.loads(await request.body()), self.ratio)})

    def _admitted(self, received: Received) -> list[Message]:
        """Return the messages of a request, without dropped thinking. Raises ``Refused``."""
        headers, body = received.headers, received.body
        if "anthropic-version" not in headers:
            raise Refused("anthropic-version: header is required")
        if not ("x-api-key" in headers or headers.get("authorization", "").startswith("Bearer ")):
            raise Refused("x-api-key header is required", 401)
        check_shape(body, alternate=self.alternate)
        check_results(body["messages"])
        check_breakpoints(body)
        check_manual_thinking(body)
        return self._checked_thinking(received, merged(body["messages"]))

    def _check_of(self, received: Received) -> Check:
        """Return the check for a request. Raises ``Refused`` for a choice without its beta header."""
        binding = (received.body.get("thinking") or {}).get("block_binding")
        if binding is None:
            return self.check
        if BINDING_BETA not in received.headers.get("anthropic-beta", ""):
            raise Refused("thinking.block_binding: Extra inputs are not permitted")
        chosen: Check = binding["prefix_mismatch_behavior"]
        return chosen

    def _checked_thinking(self, received: Received, messages: Sequence[Message]) -> list[Message]:
        """Check the signatures. Return the messages without dropped blocks. Raises ``Refused``."""
        check = self._check_of(received)
        latest = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        previous: str | None = None
        dropping = False
        kept: list[Message] = []
        before = prompts(received.body, messages)
        for index, message in enumerate(messages):
            blocks = []
            for place, block in enumerate(message["content"]):
                if block["type"] not in THINKING:
                    blocks.append(block)
                    continue
                signature = block.get("signature") or block.get("data")
                thought = self._known(index, place, block, latest=index == latest)
                received.reasoning.append(signature)
                unbroken = previous is None or thought.previous == previous
                previous = signature
                if check == "off" or (not dropping and unbroken and thought.prompt == before[index]):
                    blocks.append(block)
                    continue
                if check == "error":
                    kind = "prefix" if unbroken else "sequence"
                    name = f"block=messages.{index}.content.{place};kind={kind}"
                    raise Refused(MISMATCH.format(index, place), headers={"anthropic-thinking-prefix-mismatch": name})
                dropping = True
                received.dropped.append(signature)
            kept.append({**message, "content": blocks})
        return kept

    def _known(self, index: int, place: int, block: Block, *, latest: bool) -> Thought:
        thought = self._thoughts.get(block.get("signature") or block.get("data") or "")
        name = f"messages.{index}.content.{place}"
        if thought is None:
            raise Refused(f"{name}: Invalid `signature` in `thinking` block")
        if block["type"] == "thinking" and block["thinking"] != thought.text:
            if latest:
                raise Refused(
                    f"{name}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
                    "modified. These blocks must remain as they were in the original response."
                )
            raise Refused(f"{name}: Invalid `signature` in `thinking` block")
        return thought

    def _answer(self, received: Received, kept: Sequence[Message]) -> dict[str, Any]:
        """Return the next message of the script."""
        if received.summary:
            made = Step(text=summarise(received.body).content or "Nothing.")
        else:
            # Claude Code puts a system message behind the user's.
            newest = blocks_of(next(m for m in reversed(received.body["messages"]) if m["role"] != "system"))
            results = [block["tool_use_id"] for block in newest if block["type"] == "tool_result"]
            texts = text_of(newest) or None
            made = self._script(texts, results[-1] if results else None)
        content, reason = self._content(received, made), "tool_use" if made.calls else "end_turn"
        room = self.window - received.tokens
        if made.tokens > room:
            short = first_tokens(made.text, max(room, 0))
            content = [{"type": "text", "text": short}] if short else []
            reason = "model_context_window_exceeded"
        last = min(received.tokens, sum(text_tokens(json.dumps(block)) for block in blocks_of(kept[-1])))
        answer = {
            "id": f"msg_{next(self._ids):024d}",
            "type": "message",
            "role": "assistant",
            "model": received.body["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {
                "input_tokens": last,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": received.tokens - last,
                "output_tokens": made.tokens,
            },
        }
        if received.dropped:
            reasons = [{"type": "thinking_dropped", "reason": "prefix_binding_mismatch"} for _ in received.dropped]
            answer["input_transformations"] = reasons
        return answer

    def _content(self, received: Received, made: Step) -> list[Block]:
        content: list[Block] = []
        if made.thinking and (received.body.get("thinking") or {}).get("type") in ("adaptive", "enabled"):
            prompt = prompts(received.body, merged(received.body["messages"]))[-1]
            previous = next((id_ for id_ in reversed(received.reasoning) if id_ not in received.dropped), None)
            signature = hashlib.sha512(f"{prompt} {previous} {next(self._ids)}".encode()).hexdigest() * 2
            self._thoughts[signature] = Thought(made.thinking, prompt, previous)
            content.append({"type": "thinking", "thinking": made.thinking, "signature": signature})
        if made.text:
            content.append({"type": "text", "text": made.text})
        calls = [{"id": call.id, "name": call.name, "input": json.loads(call.arguments)} for call in made.calls]
        return content + [{"type": "tool_use", **call} for call in calls]


def stream(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the events of an answer."""
    usage = answer["usage"]
    begun = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    yield event("message_start", message=begun)
    yield event("ping")
    for index, block in enumerate(answer["content"]):
        yield from _block_events(index, block)
    delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=delta, usage=usage)
    yield event("message_stop")


def _block_events(index: int, block: Block) -> Iterator[bytes]:
    match block["type"]:
        case "thinking":
            start = {**block, "thinking": "", "signature": ""}
            text, kind, name = block["thinking"], "thinking_delta", "thinking"
        case "text":
            start, text, kind, name = {**block, "text": ""}, block["text"], "text_delta", "text"
        case _:
            start, text = {**block, "input": {}}, json.dumps(block["input"])
            kind, name = "input_json_delta", "partial_json"
    yield event("content_block_start", index=index, content_block=start)
    middle = len(text) // 2
    for piece in (text[:middle], text[middle:]):
        yield event("content_block_delta", index=index, delta={"type": kind, name: piece})
    if block["type"] == "thinking":
        delta = {"type": "signature_delta", "signature": block["signature"]}
        yield event("content_block_delta", index=index, delta=delta)
    yield event("content_block_stop", index=index)


def prompts(body: Mapping[str, Any], messages: Sequence[Message]) -> list[str]:
    """Return the digest of the prompt before each message, and of the whole prompt.

    Thinking and breakpoints aren't part of it.
    """
    system = blocks_of({"content": body.get("system") or []})
    running = hashlib.sha256(_canonical([system, body.get("tools")]))
    digests = [running.hexdigest()]
    for message in messages:
        blocks = [block for block in message["content"] if block["type"] not in THINKING]
        running.update(_canonical([message["role"], blocks]))
        digests.append(running.hexdigest())
    return digests


def _canonical(value: Any) -> bytes:
    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(one) for one in part]
        if isinstance(part, dict):
            return {key: plain(one) for key, one in part.items() if key != "cache_control"}
        return part

    return json.dumps(plain(value), sort_keys=True).encode()
