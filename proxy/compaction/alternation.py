"""Messages for upstreams with a strict chat template: user and assistant speak in turn, the user first.

Mistral's, Gemma's and Llama 2's templates refuse a conversation where the same role speaks twice in a row, where the
assistant speaks first, or where a system message stands anywhere but at the start. Mistral's counts neither messages
with calls nor their results, so a user who speaks right after a result speaks twice in a row there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.compaction.message import (
    HEAD_ROLES,
    RESULT_ROLES,
    Message,
    MessageCounter,
    decode,
    encode,
    replace_field,
    text_of,
)
from proxy.compaction.parts import is_text_part
from proxy.compaction.render import OutgoingMessage

NOTE = "[system note] "
"""Stands before the text of a system message that became part of what the user says."""

OPENING = "(The beginning of this conversation is not shown.)"
"""What the user says where the assistant would speak first."""

NOTED = "(The results are noted.)"
"""What the assistant says between a tool's result and the user."""

_CALLS = ("tool_calls", "function_call")
# Two messages that both hold one of these can't be made one.
_SINGLE = (*_CALLS, "refusal", "audio")


def alternating(pieces: Sequence[OutgoingMessage], count: MessageCounter) -> list[OutgoingMessage]:
    """The same messages in a sequence that strict templates accept.

    - User messages in a row become one, and so do assistant messages as far as the first of calls: strings are joined
      by a blank line; where one has a list of parts, all become parts of one list. Of other fields the first one
      counts. Two refusals, or two audio answers, stay apart.
    - A system message inside the conversation becomes a note of the user's at its place, and so joins its neighbours.
      It does not move, for then the next request would not begin with the bytes of this one. One without text goes.
    - Between a result and the user the assistant says ``NOTED``. Where the assistant speaks first, the user says
      ``OPENING`` before.
    - The client's system messages at the start stay. A summary among them joins what stands beside it.

    What needs none of it comes back as the object it came in as; so do messages of unknown roles and contents. A joined
    piece has the newest of its messages' turns; pieces that are put in have none. Twice is as good as once. To be
    done last: the other steps make their forms of one turn's bytes, and would lose what was joined to it.
    """
    members = [_Member(piece, decode(piece.raw)) for piece in pieces]
    leading = next((i for i, member in enumerate(members) if member.role not in HEAD_ROLES), len(members))
    runs = _leading(members[:leading])
    body = _runs(note for member in members[leading:] if (note := _as_note(member)) is not None)
    if body and body[0].role in ("assistant", *RESULT_ROLES):
        runs.append(_said("user", OPENING))
    for place, run in enumerate(body):
        if run.role == "user" and place and body[place - 1].role in RESULT_ROLES:
            runs.append(_said("assistant", NOTED))
        runs.append(run)
    return [run.piece(count) for run in runs]


@dataclass(frozen=True, slots=True)
class _Member:
    """A message on its way. ``piece`` has no size yet where the message was made here."""

    piece: OutgoingMessage
    message: Message
    made: bool = False

    @property
    def role(self) -> str:
        role = self.message.get("role")
        return role if isinstance(role, str) else ""

    @property
    def readable(self) -> bool:
        """Whether its content is of a known kind."""
        return isinstance(self.message.get("content"), str | list | None)

    @property
    def single(self) -> set[str]:
        """What it holds that no message can hold twice."""
        return {key for key in _SINGLE if self.message.get(key)}


class _Run:
    """Messages that are sent as one."""

    def __init__(self, *members: _Member) -> None:
        self.members = list(members)
        self._held = {key for member in members for key in member.single}

    @property
    def role(self) -> str:
        return self.members[0].role

    def take(self, member: _Member) -> bool:
        """Whether a message can be made one with these; if so, it now is."""
        last = self.members[-1]
        if not (last.role == member.role in ("user", "assistant") and last.readable and member.readable):
            return False
        if member.role == "assistant":
            if not self._held.isdisjoint(_CALLS) or not self._held.isdisjoint(member.single):
                return False
            self._held |= member.single
        self.members.append(member)
        return True

    def piece(self, count: MessageCounter) -> OutgoingMessage:
        first = self.members[0]
        if len(self.members) == 1 and not first.made:
            return first.piece
        raw = first.piece.raw
        if len(self.members) > 1:
            raw = replace_field(raw, "content", _joined([member.message.get("content") for member in self.members]))
            for key, value in self._further_fields():
                raw = replace_field(raw, key, value)
        turns = [member.piece.turn for member in self.members if member.piece.turn is not None]
        return OutgoingMessage(raw, count(decode(raw)), turns[-1] if turns else None)

    def _further_fields(self) -> Iterator[tuple[str, object]]:
        """The fields that the first message does not have."""
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
    """System messages at the start. Templates take one; how many a client sends is between it and the upstream."""
    summary = next((i for i, member in enumerate(members) if member.piece.turn is None), len(members))
    start = max(summary - 1, 0)
    alone, together = members[:start], members[start:]
    if summary == len(members) or not all(member.readable for member in together):
        alone, together = members, []
    return [*(_Run(member) for member in alone), *([_Run(*together)] if together else [])]


def _as_note(member: _Member) -> _Member | None:
    """A system message as a note of the user's, ``None`` if it says nothing; any other message as it is."""
    if member.role not in HEAD_ROLES or not member.readable:
        return member
    content = member.message.get("content")
    if not text_of(member.message).strip():
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
    """Contents as one: strings by a blank line, a list of parts as soon as one is such a list."""
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
