"""Count the tokens of chat messages and requests.

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

import math
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

import tiktoken

from proxy.dialects.chat.format import ChatFormat
from proxy.limits.profiles.profile import Profile
from proxy.tokens import tools
from proxy.tokens.encodings import check, encoding, loaded
from proxy.tokens.media import MEDIA, SPOKEN_ANSWER, Media
from proxy.tokens.text import count, dump, escaped

MESSAGE = 3
NAME = 1
REPLY = 3
CALL = 3
# OpenAI wraps several calls in one message into another call.
SEVERAL_CALLS = 19
EACH_OF_SEVERAL = 3
# A result's header replaces part of the message's. It has the name of the tool even if the message doesn't, and names
# have about four tokens.
RESULT = -2
UNNAMED_RESULT = 5

ESCAPED_BYTE = 3
"""The most tokens per byte of an escaped non-ASCII character: \\u00e9 has six for two bytes."""

_RESULT_ROLES = ("tool", "function")
# Fields that don't reach the model, or that the frame already counts (ids).
_SILENT = frozenset({"tool_call_id", "id", "index", "cache_control", "annotations", "type"})


def key_of(profile: Profile) -> Hashable:
    """Return the parts of a profile that decide how to count."""
    return (profile.tokenizer, profile.token_ratio, profile.images, profile.tools, profile.escapes)


class Counter:
    """Counts tokens as one model's provider does.

    The tokens of a request are ``overhead(body)`` plus ``message(m)`` for each of its messages. No method raises
    for unusual input: a body is any JSON. The first count loads the encoding (0.2 to 0.4 s). Thread-safe.

    Raises ``ConfigurationError`` if the profile names an encoding that isn't installed, or an unknown rule for images.
    """

    def __init__(self, profile: Profile) -> None:
        if not loaded(profile.tokenizer):
            check(profile.tokenizer)
        self.profile = profile
        self._media = Media(profile.images)
        self.format = ChatFormat(self.message, self.text, self.one_of_several)

    @property
    def key(self) -> Hashable:
        """Return the key. Counters with the same key count alike."""
        return key_of(self.profile)

    @property
    def ready(self) -> bool:
        """Return whether the encoding is loaded, so that a count starts immediately."""
        return loaded(self.profile.tokenizer)

    @property
    def _encoding(self) -> tiktoken.Encoding:
        return encoding(self.profile.tokenizer)

    def text(self, text: str) -> int:
        """Return the tokens of text without a frame."""
        return self._scaled(count(self._encoding, text))

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
            elif field not in _SILENT and value is not None:
                tokens += _FIELDS.get(field, Counter._field)(self, value)
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
            + self._choice(body.get("tool_choice"), tools.CHOICE_TOOL)
            + self._choice(body.get("function_call"), tools.CHOICE_FUNCTION)
            + self._response_format(body.get("response_format"))
        )

    def _scaled(self, tokens: int) -> int:
        # Subtract a billionth so that 1.1 times 10 is 11 and not 12.
        return max(0, math.ceil(tokens * self.profile.token_ratio - 1e-9))

    def _count(self, value: object) -> int:
        return count(self._encoding, dump(value))

    def _field(self, value: object) -> int:
        return self._count(value)

    def _name(self, value: object) -> int:
        return self._count(value) + NAME if value else 0

    def _spoken(self, value: object) -> int:
        return SPOKEN_ANSWER if isinstance(value, Mapping) else self._count(value)

    def _content(self, content: object, *, parallel: bool = False) -> tuple[int, int]:
        """Return the tokens of the content's text, and those of its images, audio, and files."""
        if content is None:
            return 0, 0
        tokens = media = 0
        counts: dict[str, int] = {}
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in MEDIA and isinstance(part, Mapping):
                media += self._media.tokens(kind, part, self.text)
                continue
            text = _part_text(part)
            if (found := counts.get(text)) is None:
                # An attack may repeat one short part very often.
                found = counts[text] = count(self._encoding, escaped(text) if parallel else text)
            tokens += found
        return tokens, media

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

    def _tools(self, body: Mapping[str, Any]) -> int:
        functions, others = tools.functions(body)
        tokens = sum(self._count(other) for other in others)
        if self.profile.tools != "typescript":
            tokens += sum(self._count(function) + CALL for function in functions)
            return tokens + tools.PROMPT[self.profile.tools] if functions or others else 0
        if functions:
            tokens += self._count(tools.typescript(functions)) + tools.DECLARATIONS
            tokens += self._shared_system(body.get("messages"))
        return tokens

    def _shared_system(self, messages: object) -> int:
        """Return the tokens to add because the first system message includes the functions, after a line break."""
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
                content = message.get("content")
                end = content[-64:] if isinstance(content, str) else ""
                return tools.SHARED_SYSTEM + self._count(end + "\n") - self._count(end)
        return 0

    def _choice(self, choice: object, named: int) -> int:
        if choice is None or choice == "auto":
            return 0
        if isinstance(choice, Mapping):
            function = choice.get("function", choice)
            name = function.get("name") if isinstance(function, Mapping) else None
            return named + self._count(name if isinstance(name, str) else choice)
        return tools.CHOICE_NONE if choice == "none" else named

    def _response_format(self, wanted: object) -> int:
        if not isinstance(wanted, Mapping) or wanted.get("type") in ("text", "json_object"):
            return 0
        schema = wanted.get("json_schema")
        return tools.RESPONSE_FORMAT + self._count(schema if isinstance(schema, Mapping) else wanted)


# The methods that count a message's fields. Other fields count as text or JSON.
_FIELDS: Mapping[str, Callable[[Counter, object], int]] = {
    "name": Counter._name,
    "audio": Counter._spoken,
    "tool_calls": Counter._tool_calls,
    "function_call": Counter._call,
}

_TEXT_FIELDS = ("text", "refusal", "input_text", "output_text", "thinking", "content")


def _part_text(part: object) -> str:
    """Return the text of a content part, or its JSON if its form is unknown."""
    if isinstance(part, Mapping):
        texts = [part[field] for field in _TEXT_FIELDS if isinstance(part.get(field), str)]
        known = part.keys() <= _KNOWN_PART
        if len(texts) == 1 and known:
            return str(texts[0])
    return dump(part)


_KNOWN_PART: Set[str] = {"type", "cache_control", *_TEXT_FIELDS}
