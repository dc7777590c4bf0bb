"""Keep in the archive how compaction changed a request, and read it again.

The archive already has the removed messages and the originals of shortened ones. This adds the new messages, once each,
and a list of parts by request. Messages that didn't change aren't stored: the client has them.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import msgspec
import structlog

from proxy.compaction.render import RenderedConversation
from proxy.compaction.turn import Kind
from proxy.pipeline.job import CompactionJob, archive_id
from proxy.store.archive import Archive, Removed
from proxy.telemetry.metrics import STORE_UNREADABLE
from proxy.telemetry.record import RequestRecord

log = structlog.get_logger(__name__)


class SentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the prompt that was sent: received messages, or one new message."""

    start: int
    end: int  # equal to `start` for a summary
    new: str | None = None  # the archive id of a message in place of message `start`
    tokens: int | None = None  # the new one's


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request was changed. Positions are those of the received messages."""

    count: int  # of the received messages
    head: int
    cut: int  # a summary replaced the messages from `head` to here
    removed: str | None  # their archive id
    parts: list[SentPart]
    shortened: dict[int, str]  # the archive ids of other replaced messages, by position
    sizes: list[int] = []  # tokens of each received message
    kinds: str = ""  # the first letter of each message's `Kind`, or a space


def changes_key(request: str, attempt: int) -> str:
    """Return the archive id of the changes that an attempt made to a request."""
    return f"{request}-{attempt}"


def removed_by(job: CompactionJob, rendered: RenderedConversation) -> list[Removed]:
    """Return the archive entries that describe a compaction: the new messages, and the list of parts."""
    case, places = job.case, {id(turn): index for index, turn in enumerate(job.turns)}
    new: dict[str, Removed] = {}
    shortened: dict[int, str] = {}
    parts: list[SentPart] = []  # neighboring unchanged messages are one
    for piece in rendered.pieces:
        turn, place = piece.turn, None if piece.turn is None else places.get(id(piece.turn))
        if turn is not None and place is not None and not piece.changed:
            if parts and parts[-1].new is None and parts[-1].end == place:
                parts[-1] = SentPart(parts[-1].start, place + 1)
            else:
                parts.append(SentPart(place, place + 1))
            continue
        key = hashlib.sha256(b"sent" + piece.raw).hexdigest()[:20]
        new[key] = Removed(key, (piece.raw,))
        if turn is None or place is None:
            parts.append(SentPart(job.head, job.head, key, piece.tokens))
        else:
            shortened[place] = turn.facts.id
            parts.append(SentPart(place, place + 1, key, piece.tokens))
    cut = job.head + job.plan.cut
    chain = archive_id(job.checkpoints(job.plan.checkpoints)[-1]) if job.plan.cut else None
    sizes = [turn.facts.tokens for turn in job.turns]
    kinds = "".join([turn.facts.kind[:1] or " " for turn in job.turns])
    changes = Changes(len(job.turns), job.head, cut, chain, parts, shortened, sizes, kinds)
    key = changes_key(case.request, case.attempt)
    return [*new.values(), Removed(key, (msgspec.msgpack.encode(changes),))]


async def _changes(archive: Archive, record: RequestRecord) -> Changes | None:
    for attempt in range(record.retries, -1, -1):  # a repeated attempt has no changes of its own
        if (found := await archive.fetch(record.tenant, changes_key(record.id, attempt))) is not None:
            break
    else:
        return None
    try:
        return msgspec.msgpack.decode(found.messages[0], type=Changes)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        STORE_UNREADABLE.inc()
        log.warning("archive.entry_unreadable", reason=type(error).__name__, record=record.id)
        return None


Fate = Literal["kept", "shortened", "summarized", "left out", "added"]
"""``left out``: nothing of the message is in the prompt. ``added``: the proxy's own message."""


class Message(msgspec.Struct):
    """A message of a changed request. ``None``: unknown, not in the archive, or the proxy's own."""

    fate: Fate
    position: int | None = None  # that of the received message
    kind: str | None = None
    size: int | None = None  # tokens
    received: bytes | None = None
    sent_size: int | None = None  # tokens
    sent: bytes | None = None

    @property
    def number(self) -> str:
        """Return the position for people, from 1."""
        return "" if self.position is None else str(self.position + 1)


class ChangedPrompt(msgspec.Struct, frozen=True):
    """The messages of a changed request in their order, without the summary message."""

    messages: list[Message]
    summary: Message | None = None
    archived: str | None = None  # the archive id of the summarized messages


async def read_prompt(archive: Archive, record: RequestRecord) -> ChangedPrompt | None:
    """Return how a request was changed; ``None`` if the archive doesn't have it. Raises ``StoreFailed``."""
    changes = await _changes(archive, record)
    if changes is None:
        return None
    messages = [_received(changes, place) for place in range(changes.count)]
    if changes.removed is not None and (removed := await archive.fetch(record.tenant, changes.removed)) is not None:
        for message, raw in zip(messages[changes.cut - 1 :: -1], reversed(removed.messages), strict=False):
            message.received = raw  # the oldest may be missing
    own: list[Message] = []
    for part in changes.parts:
        if part.new is None:
            for message in messages[part.start : part.end]:
                message.fate = "kept"
            continue
        new = await archive.fetch(record.tenant, part.new)
        if part.start == part.end:
            own.append(message := Message("added"))
        else:
            message = messages[part.start]
            message.fate = "shortened"
            original = await archive.fetch(record.tenant, changes.shortened[part.start])
            message.received = original.messages[0] if original else message.received
        message.sent_size, message.sent = part.tokens, new.messages[0] if new else None
    summary = own.pop(0) if own and changes.removed is not None else None
    messages[changes.cut : changes.cut] = own
    return ChangedPrompt(messages, summary, changes.removed)


_KINDS = {kind[0]: kind for kind in get_args(Kind) if kind}


def _received(changes: Changes, place: int) -> Message:
    fate: Fate = "summarized" if changes.head <= place < changes.cut else "left out"
    size = changes.sizes[place] if changes.sizes else None
    return Message(fate, place, _KINDS.get(changes.kinds[place : place + 1]), size)
