"""Count the tokens of a request for the stand-in upstream.

This module shares no code with ``proxy.tokens`` on purpose. A mistake in the proxy's counting then shows up as a
refused request.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

ENCODING = "o200k_base"
# File name of the encoding in tiktoken's cache: the SHA-1 of its download URL.
ENCODING_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"

# OpenAI's cookbook, "How to count tokens with tiktoken": three tokens per message, one more for a name, and three that
# prime every answer.
PER_MESSAGE = 3
PER_NAME = 1
PRIMING = 3
# Assumption: a tool call costs as many tokens as a message frame. The cookbook doesn't cover calls.
PER_TOOL_CALL = 3

# Flat figures for other parts: an image of 1024 x 1024 in high detail (OpenAI's vision guide), half a minute of audio
# at ten tokens a second, and one or two pages of a document.
MEDIA_TOKENS = {"image_url": 765, "input_audio": 300, "file": 1500}
LOW_DETAIL_IMAGE = 85


@dataclass(frozen=True, slots=True)
class Tokens:
    """The size of a request in tokens: its messages, and its functions and schemas."""

    messages: int
    functions: int

    @property
    def total(self) -> int:
        return self.messages + self.functions


class RequestCounter:
    """Count requests, and cache the size of each message by its digest.

    Accepts only bodies without ``validity.faults``.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def request(self, body: Mapping[str, Any]) -> Tokens:
        """Return the size of a whole request body."""
        messages = PRIMING + sum(self.message(message) for message in body["messages"])
        return Tokens(messages, sum(self._remembered(part, _json_tokens) for part in _declarations(body)))

    def message(self, message: Mapping[str, Any]) -> int:
        """Return the size of one message, including its frame."""
        return self._remembered(message, _message_tokens)

    def _remembered(self, value: Any, count: Callable[[Any], int]) -> int:
        digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = count(value)
        return known


@functools.cache
def encoding() -> tiktoken.Encoding:
    """Return the ``o200k_base`` encoding, from the file in LiteLLM's package.

    Raises ``FileNotFoundError`` if it is missing, because tiktoken would download it.
    """
    spec = importlib.util.find_spec("litellm")  # finds the folder without importing the package
    if spec is None or spec.origin is None:
        raise FileNotFoundError("The package litellm, which carries the tokenizers, is not installed.")
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    if not (folder / ENCODING_FILE).is_file():
        raise FileNotFoundError(f"This version of litellm carries no {ENCODING} tokenizer.")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return tiktoken.get_encoding(ENCODING)


def text_tokens(text: str) -> int:
    """Return the size of a text."""
    return len(encoding().encode(text, disallowed_special=()))


def first_tokens(text: str, limit: int) -> str:
    """Return the first ``limit`` tokens of a text."""
    tokens = encoding().encode(text, disallowed_special=())
    if len(tokens) <= limit:
        return text
    # The cut can split a character.
    return encoding().decode(tokens[:limit], errors="ignore")


def _message_tokens(message: Mapping[str, Any]) -> int:
    named = PER_NAME if message.get("name") else 0
    return PER_MESSAGE + named + sum(map(_part_tokens, _parts(message)))


def _parts(message: Mapping[str, Any]) -> Iterator[str | Mapping[str, Any]]:
    """Yield everything in a message that costs tokens: texts and other parts."""
    yield message["role"]
    yield message.get("name") or ""
    content = message.get("content") or ""
    yield from [content] if isinstance(content, str) else content
    yield message.get("refusal") or ""
    if message["role"] == "assistant":
        calls = [call[call["type"]] for call in message.get("tool_calls") or []]
        calls += filter(None, [message.get("function_call")])
        for call in calls:
            yield {"type": "call", "text": call["name"] + (call.get("arguments") or call.get("input") or "")}


def _part_tokens(part: str | Mapping[str, Any]) -> int:
    if isinstance(part, str):
        return text_tokens(part)
    kind = part["type"]
    if kind in MEDIA_TOKENS:
        low = kind == "image_url" and part["image_url"].get("detail") == "low"
        return LOW_DETAIL_IMAGE if low else MEDIA_TOKENS[kind]
    frame = PER_TOOL_CALL if kind == "call" else 0
    return frame + text_tokens(part.get("text") or part.get("refusal") or "")


def _declarations(body: Mapping[str, Any]) -> Iterator[Any]:
    yield from filter(None, (body.get("tools"), body.get("functions")))
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and "json_schema" in response_format:
        yield response_format["json_schema"]


def _json_tokens(value: Any) -> int:
    return text_tokens(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
