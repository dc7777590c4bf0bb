"""Count the tokens of chat messages and requests, and judge what upstreams count.

The frame of a message (3 tokens, 1 more for a name, 3 to prime the reply) is OpenAI's own, from the cookbook "How to
count tokens with tiktoken". OpenAI publishes no figures for tool calls and results. The figures below are fitted to
usage that OpenAI reported:

- one call and its result: github.com/forestwanglin/openai-java issue 5 (35 tokens, gpt-4) and
  github.com/hmarr/openai-chat-tokens (the older ``function_call`` and role ``function``), met exactly
- one, two and three calls in one message: community.openai.com topic 538914 (40, 89 and 114 tokens, gpt-3.5-turbo),
  the first over by two, the others met

Unknown values count as their JSON, which is rather too high than too low.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.chat.units import ChatUnits
from proxy.dialects.counting import CALL, Counter, FieldEvidence, known_only, objects_in
from proxy.dialects.parts import UNCOUNTED
from proxy.limits.profiles import Profile
from proxy.tokens import tools
from proxy.tokens.media import SPOKEN_ANSWER

MESSAGE = 3
NAME = 1
REPLY = 3
# OpenAI wraps several calls in one message into another call.
SEVERAL_CALLS = 19
EACH_OF_SEVERAL = 3
# A result's header replaces part of the message's. It has the name of the tool even if the message doesn't, and names
# have about four tokens.
RESULT = -2
UNNAMED_RESULT = 5

ESCAPED_BYTE = 3  # the most tokens per byte of an escaped non-ASCII character: \u00e9 has six for two bytes

_RESULT_ROLES = ("tool", "function")


class ChatCounter(Counter):
    """Counts the tokens of chat messages as one model's provider does.

    The tokens of a request are ``overhead(body)`` plus ``message(m)`` for each of its messages.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.format = ChatUnits(self.message, self.text, self.one_of_several)

    def message(self, message: Mapping[str, Any], *, parallel: bool = False) -> int:
        """Return the tokens of one message with its frame.

        ``parallel`` is for the result of one of several calls in one message. OpenAI puts these results into the prompt
        as JSON in ASCII, in which a Korean or Chinese character takes four or five tokens
        (community.openai.com topic 1375117: 252 tokens of text became 1,200).
        """
        if not isinstance(message, Mapping):
            return self._scaled(MESSAGE + self._count(message))
        tokens, media = MESSAGE, 0
        for field, value in message.items():
            if field == "content":
                content, inside = self._content(value, parallel=parallel)
                tokens, media = tokens + content, media + inside
            elif field not in UNCOUNTED and value is not None:
                text, inside = (_FIELDS[field](self, value), 0) if field in _FIELDS else self._value(value)
                tokens, media = tokens + text, media + inside
        if message.get("role") in _RESULT_ROLES:
            tokens += RESULT if message.get("name") else RESULT + UNNAMED_RESULT
        return self._scaled(tokens) + media

    def one_of_several(self, message: Mapping[str, Any]) -> int:
        """Return the tokens of the result of one of several calls in one message."""
        return self.message(message, parallel=self.profile.escapes)

    def at_most(self, raw: bytes) -> float:
        """Return an upper bound for a body's tokens: one per byte, three per byte of an escaped character.

        This doesn't tokenize.
        """
        tokens = len(raw) * self.profile.token_ratio
        if self.profile.escapes and not raw.isascii() and b"tool_call_id" in raw:
            tokens *= ESCAPED_BYTE
        return tokens

    def overhead(self, body: Mapping[str, Any]) -> int:
        """Return a request's tokens without its messages: tools, response format, tool choice, the reply's start.

        If ``body`` has its ``messages`` as mappings, tools share their system message. Otherwise the overhead of a
        request with tools and a system message is four tokens higher.
        """
        return self._scaled(
            REPLY
            + self._tools(body)
            + self._shared_system(body)
            + self._choice(body.get("tool_choice"), tools.CHOICE_TOOL)
            + self._choice(body.get("function_call"), tools.CHOICE_FUNCTION)
            + self._response_format(body.get("response_format"))
        )

    def _name(self, value: object) -> int:
        return self._count(value) + NAME if value else 0

    def _spoken(self, value: object) -> int:
        return SPOKEN_ANSWER if isinstance(value, Mapping) else self._count(value)

    def _tool_calls(self, calls: object) -> int:
        if not isinstance(calls, list):
            return self._count(calls)
        tokens = SEVERAL_CALLS + EACH_OF_SEVERAL * len(calls) if len(calls) > 1 else 0
        for call in calls:
            function = call.get("function", call.get("custom")) if isinstance(call, Mapping) else None
            tokens += self._call(function) if isinstance(function, Mapping) else CALL + self._count(call)
        return tokens

    def _call(self, function: object) -> int:
        if not isinstance(function, Mapping):
            return self._count(function)
        return CALL + sum(self._count(value) for value in function.values() if value is not None)

    def _shared_system(self, body: Mapping[str, Any]) -> int:
        """Return the tokens to add because the first system message includes the functions, after a line break."""
        messages = body.get("messages")
        if self.profile.tools != "typescript" or not messages or not tools.functions(body)[0]:
            return 0
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
                content = message.get("content")
                end = content[-64:] if isinstance(content, str) else ""
                return tools.SHARED_SYSTEM + self._count(end + "\n") - self._count(end)
        return 0


# The methods that count a message's fields. Other fields count as text or JSON.
_FIELDS: Mapping[str, Callable[[ChatCounter, object], int]] = {
    "name": ChatCounter._name,
    "audio": ChatCounter._spoken,
    "tool_calls": ChatCounter._tool_calls,
    "function_call": ChatCounter._call,
}


_MESSAGE = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "id", "cache_control", "annotations"}
)

_PART = frozenset({"type", "text", "cache_control"})
_TEXT = b'"text"'

# Chat templates and gateways drop parts of a history: the reasoning of earlier turns (Qwen3, DeepSeek-R1), tools and
# their results (templates without them), fields that they don't support, images. A reported size without such a part
# isn't a sign that a prompt was cut.
_KEPT_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL = re.compile(rb'"(?:tool_call_id|tool_calls|function_call|tool_use|tool_result)"')
_THOUGHTS_END = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|(?:end_of_thought|channel)\|>")


class ChatEvidence(FieldEvidence):
    """See ``dialects.counting.Evidence``."""

    KNOWN = frozenset(
        {
            *("model", "messages", "tools", "functions", "tool_choice", "function_call", "response_format"),
            *("stream", "stream_options", "n", "stop", "seed", "user", "metadata", "store", "service_tier"),
            *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
            *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
            *("reasoning_effort", "verbosity"),
        }
    )

    FORMAT = "response_format"

    def has_plain_units(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        messages = objects_in(fields["messages"])
        return all(known_only(message, _MESSAGE) and _plain(message) for message in messages)

    def has_calls(self, unit: bytes) -> bool:
        return _CALL.search(unit) is not None

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        message = msgspec.json.decode(unit)
        if not isinstance(message, Mapping):
            return ""
        role = message.get("role")
        if role not in _KEPT_ROLES and not (tools and role in _TOOL_ROLES):
            return ""
        text = _text(message.get("content"))
        return _THOUGHTS_END.split(text)[-1] if role == "assistant" else text


def _plain(message: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether the content is text only."""
    content = bytes(message.get("content", b""))
    if not content.startswith(b"["):
        return not content.startswith(b"{")
    return all(known_only(part, _PART) and bytes(part.get("type", _TEXT)) == _TEXT for part in objects_in(content))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return ""
    parts = (part for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS)
    return "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
