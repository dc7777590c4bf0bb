"""Rewrite messages for upstreams with a strict chat template: user and assistant alternate, starting with the user.

The templates of Mistral, Gemma, and Llama 2 reject three kinds of conversations. Two messages in a row have the same
role, the assistant comes first, or a system message isn't at the start. Mistral's template skips messages with tool
calls and their results, so for it a user message right after a result follows another user message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.compaction.format import Format
from proxy.compaction.turn import OutgoingMessage
from proxy.dialects.parts import CHAT
from proxy.dialects.units import Message, content_text, decode, encode, is_text_part, replace_field

NOTE = "[system note] "  # prefix for the text of a system message that was moved into a user message

OPENING = "(The beginning of this conversation is not shown.)"
"""User message that is inserted if the assistant comes first."""

NOTED = "(The results are noted.)"  # assistant message that is inserted between a tool result and a user message

_HEAD = ("system", "developer")
_RESULTS = ("tool", "function")
_CALLS = ("tool_calls", "function_call")
# Two messages can't be merged if both have one of these.
_SINGLE = (*_CALLS, "refusal", "audio")


def alternating_messages(messages: Sequence[Message]) -> list[Message]:
    """Return chat messages, such as translated ones, in a sequence that strict templates accept."""
    pieces = [OutgoingMessage(encode(message), 0, None) for message in messages]
    return [decode(piece.raw) for piece in alternating(pieces, None)]


def alternating(pieces: Sequence[OutgoingMessage], format: Format | None) -> list[OutgoingMessage]:
    """Return the same messages in a sequence that strict templates accept.

    - Merge consecutive user messages, and consecutive assistant messages up to the first one with tool calls. Strings
      are joined by a blank line. If one message has a list of parts, all become parts of one list. For other fields,
      the first message that has the field wins. Two refusals or two audio answers aren't merged.
    - Convert a system message inside the conversation to a user message at the same position, which then merges with
      its neighbors. Moving it would change the start of the next request and break the prompt cache. A system message
      without text is dropped.
    - Insert the assistant message ``NOTED`` between a result and a user message. If the assistant comes first, insert
      the user message ``OPENING`` before it.
    - Keep the client's system messages at the start. A summary among them merges with its neighbors.

    Messages that need no change are returned as the same objects, and so are messages with unknown roles or contents.
    A merged message has the newest turn of its messages; inserted messages have none. The function is idempotent.
    Apply it last: the other steps rebuild a message from the bytes of one turn and would lose the merged text.
    Without a format, merged and inserted messages have 0 tokens.
    """
    members = [_Member(piece, decode(piece.raw)) for piece in pieces]
    leading = next((i for i, member in enumerate(members) if member.role not in _HEAD), len(members))
    runs = _leading(members[:leading])
    body = _runs(note for member in members[leading:] if (note := _as_note(member)) is not None)
    if body and body[0].role in ("assistant", *_RESULTS):
        runs.append(_said("user", OPENING))
    for place, run in enumerate(body):
        if run.role == "user" and place and body[place - 1].role in _RESULTS:
            runs.append(_said("assistant", NOTED))
        runs.append(run)
    return [run.piece(format) for run in runs]


@dataclass(frozen=True, slots=True)
class _Member:
    """A message to merge. If this module created the message, ``piece`` has no token count yet."""

    piece: OutgoingMessage
    message: Message
    made: bool = False

    @property
    def role(self) -> str:
        role = self.message.get("role")
        return role if isinstance(role, str) else ""

    @property
    def readable(self) -> bool:
        """Return whether the content has a known type."""
        return isinstance(self.message.get("content"), str | list | None)

    @property
    def single(self) -> set[str]:
        """Return the fields that a merged message can have only once."""
        return {key for key in _SINGLE if self.message.get(key)}


class _Run:
    """Messages that are merged into one."""

    def __init__(self, *members: _Member) -> None:
        self.members = list(members)
        self._held = {key for member in members for key in member.single}

    @property
    def role(self) -> str:
        return self.members[0].role

    def take(self, member: _Member) -> bool:
        """Merge a message if possible. Return whether it was merged."""
        last = self.members[-1]
        if not (last.role == member.role in ("user", "assistant") and last.readable and member.readable):
            return False
        if member.role == "assistant":
            if not self._held.isdisjoint(_CALLS) or not self._held.isdisjoint(member.single):
                return False
            self._held |= member.single
        self.members.append(member)
        return True

    def piece(self, format: Format | None) -> OutgoingMessage:
        first = self.members[0]
        if len(self.members) == 1 and not first.made:
            return first.piece
        raw = first.piece.raw
        if len(self.members) > 1:
            raw = replace_field(raw, "content", _joined([member.message.get("content") for member in self.members]))
            for key, value in self._further_fields():
                raw = replace_field(raw, key, value)
        turns = [member.piece.turn for member in self.members if member.piece.turn is not None]
        tokens = 0 if format is None else format.tokens(raw)
        return OutgoingMessage(raw, tokens, turns[-1] if turns else None)

    def _further_fields(self) -> Iterator[tuple[str, object]]:
        """Yield the fields that only later messages have."""
        have = {key for key, value in self.members[0].message.items() if value} | {"role", "content"}
        for member in self.members[1:]:
            for key, value in member.message.items():
                if value and key not in have:
                    have.add(key)
                    yield key, value


def _runs(members: Iterator[_Member]) -> list[_Run]:
    runs: list[_Run] = []
    for member in members:
        if not runs or not runs[-1].take(member):
            runs.append(_Run(member))
    return runs


def _leading(members: list[_Member]) -> list[_Run]:
    """Group the system messages at the start.

    Templates accept only one. The proxy merges its own summary into it but doesn't merge the client's messages.
    """
    summary = next((i for i, member in enumerate(members) if member.piece.turn is None), len(members))
    start = max(summary - 1, 0)
    alone, together = members[:start], members[start:]
    if summary == len(members) or not all(member.readable for member in together):
        alone, together = members, []
    return [*(_Run(member) for member in alone), *([_Run(*together)] if together else [])]


def _as_note(member: _Member) -> _Member | None:
    """Convert a system message to a user message; ``None`` if it has no text. Keep other messages."""
    if member.role not in _HEAD or not member.readable:
        return member
    content = member.message.get("content")
    if not content_text(content, CHAT).strip():
        return None
    if isinstance(content, list):
        first = next((i for i, part in enumerate(content) if is_text_part(part)), None)
        if first is None:
            noted: object = [{"type": "text", "text": NOTE.strip()}, *content]
        else:
            part = {**content[first], "text": NOTE + content[first]["text"]}
            noted = [*content[:first], part, *content[first + 1 :]]
    else:
        noted = f"{NOTE}{content}"
    message = {"role": "user", "content": noted}
    return _Member(OutgoingMessage(encode(message), 0, member.piece.turn), message, made=True)


def _said(role: str, text: str) -> _Run:
    message = {"role": role, "content": text}
    return _Run(_Member(OutgoingMessage(encode(message), 0, None), message, made=True))


def _joined(contents: Sequence[object]) -> object:
    """Join contents: strings with a blank line, or into one list of parts if any content is a list."""
    if any(isinstance(content, list) for content in contents):
        parts: list[object] = []
        for content in contents:
            if isinstance(content, list):
                parts += content
            elif isinstance(content, str) and content:
                parts.append({"type": "text", "text": content})
        return parts or ""
    texts = [content for content in contents if isinstance(content, str) and content]
    return "\n\n".join(texts) if texts else contents[0]
