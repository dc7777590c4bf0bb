"""Read, count, and rewrite chat messages for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from proxy.compaction.format import Binding, ForeignSummary, Format, Rewrite, TextCounter
from proxy.compaction.render import OutgoingMessage
from proxy.compaction.turn import Facts, Turn
from proxy.dialects.chat import message as chat
from proxy.dialects.chat.alternation import alternating
from proxy.dialects.chat.repair import repaired
from proxy.dialects.parts import is_media_part, labels_of, parts_of, text_of, text_without_media, without_media
from proxy.dialects.repair import needs_repair
from proxy.dialects.unit_json import Message, decode, digest, encode, replace_field
from proxy.tokens.media import MEDIA_LABELS

MessageCounter = Callable[[Message], int]
"""Count the tokens of a whole message, including its framing."""


class ChatFormat(Format):
    """The format of chat messages, with the tokenizer of one model. See ``compaction.format.Format``.

    ``parallel`` counts the result of one of several calls, if that differs from ``message``.
    """

    def __init__(self, message: MessageCounter, text: TextCounter, parallel: MessageCounter | None = None) -> None:
        self._message = message
        self._parallel = parallel or message
        self.text_tokens = text

    @property
    def binds_reasoning(self) -> Binding:
        return "never"

    def without_reasoning(self, raw: bytes) -> bytes:
        return raw

    def read(self, raw: bytes) -> Facts:
        message = decode(raw)
        role = chat.role_of(message)
        kind = chat.KINDS.get(role, "")
        facts = Facts(
            kind=kind,
            role=role,
            tokens=self._message(message),
            digest=digest(message),
            calls=chat.calls_of(message),
            answers=chat.answered_call(message, role),
            media=any(map(is_media_part, parts_of(message))),
            foreign=kind == "user" and chat.foreign_summary(message) is not None,
            empty=kind == "assistant" and chat.is_empty(message),
        )
        if facts.media:
            facts.apart = max(0, facts.tokens - self._message(without_media(message)))
        if kind == "result":
            text = text_of(message)
            facts.length = len(text)
            facts.wide = not text.isascii()
            facts.said = chat.content_digest(message)
        return facts

    def tokens(self, raw: bytes, facts: Facts | None = None) -> int:
        return self._counter(facts)(decode(raw))

    def frame_tokens(self, raw: bytes, facts: Facts) -> int:
        return self._counter(facts)(without_media(decode(chat.replace_text(raw, ""))))

    def inner_tokens(self, facts: Facts) -> TextCounter:
        count = self._counter(facts)
        bare = count({"content": ""})
        return lambda text: count({"content": text}) - bare

    def text(self, raw: bytes) -> str:
        return text_of(decode(raw))

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        return chat.arguments_of(decode(raw))

    def replaceable_text(self, raw: bytes) -> str | None:
        return chat.replaceable_text(decode(raw))

    def with_text(self, raw: bytes, text: str) -> bytes:
        return chat.replace_text(raw, text)

    def with_result(self, raw: bytes, text: str) -> bytes:
        listed = isinstance(decode(raw).get("content"), list)
        return replace_field(raw, "content", [{"type": "text", "text": text}] if listed else text)

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        return chat.replace_arguments(raw, rewrite)

    def has_media(self, raw: bytes) -> bool:
        return any(map(is_media_part, parts_of(decode(raw))))

    def without_media(self, raw: bytes) -> bytes:
        return encode(without_media(decode(raw)))

    def with_labels(self, raw: bytes, label: Callable[[str], str]) -> bytes:
        return replace_field(raw, "content", [_labeled(part, label) for part in parts_of(decode(raw))])

    def user_text(self, raw: bytes) -> list[tuple[str, str]]:
        message = decode(raw)
        foreign = chat.foreign_summary(message)
        if foreign is not None:
            return [(text, "") for text in foreign.user_text]
        return [(text_without_media(message), labels_of(message))]

    def foreign_summary(self, raw: bytes) -> ForeignSummary | None:
        return chat.foreign_summary(decode(raw))

    def summary(self, role: str, text: str) -> bytes:
        return encode({"role": role, "content": text})

    def needs_repair(self, messages: Sequence[Facts]) -> bool:
        return needs_repair(messages)

    def repaired(self, turns: Sequence[Turn]) -> list[Turn]:
        return repaired(turns, self)

    def alternating(self, pieces: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        return alternating(pieces, self)

    def _counter(self, facts: Facts | None) -> MessageCounter:
        return self._parallel if facts is not None and facts.parallel else self._message


def _labeled(part: Any, label: Callable[[str], str]) -> Any:
    """Replace a media part with a text part. Keep its ``cache_control``."""
    if not is_media_part(part):
        return part
    marks = {key: part[key] for key in ("cache_control",) if key in part}
    return {"type": "text", "text": label(MEDIA_LABELS[part["type"]]), **marks}
