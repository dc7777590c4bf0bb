"""Keep in the archive how compaction changed a request, and read it again.

The archive already has the removed messages and the originals of shortened ones. This adds the new messages, once each,
and a list of parts by request. Messages that didn't change aren't stored: the client has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import structlog

from proxy.compaction.render import OutgoingMessage, RenderedConversation
from proxy.pipeline.job import CompactionJob, archive_id
from proxy.store.archive import Archive, Removed
from proxy.telemetry.metrics import STORE_UNREADABLE
from proxy.telemetry.record import RequestRecord

log = structlog.get_logger(__name__)


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of the prompt that was sent.

    Without ``new`` it's the received messages from ``start`` to ``end``, unchanged. ``new`` is the archive id of a
    message in place of message ``start``, or of a summary if ``start`` and ``end`` are equal.
    """

    start: int
    end: int
    new: str | None = None


class Changes(msgspec.Struct, frozen=True):
    """How a request was changed. Positions are those of the received messages, ``count`` in all.

    The messages from ``head`` to ``cut`` were replaced by a summary and are archived under ``removed``. ``shortened``
    has the archive ids of other replaced messages, by position.
    """

    count: int
    head: int
    cut: int
    removed: str | None
    parts: list[Part]
    shortened: dict[int, str]


class Changed(msgspec.Struct, frozen=True):
    """One change: the messages before and after it, as the client's and the proxy's JSON.

    ``position`` is that of the first received message. ``complete`` is false if some messages are missing from the
    archive. ``summary`` is true for the summary message.
    """

    position: int
    before: list[bytes]
    after: list[bytes]
    complete: bool
    summary: bool


class Unchanged(msgspec.Struct, frozen=True):
    """Messages that were sent unchanged."""

    position: int
    count: int


def changes_key(request: str, attempt: int) -> str:
    """Return the archive id of the changes that an attempt made to a request."""
    return f"{request}-{attempt}"


def removed_by(work: CompactionJob, rendered: RenderedConversation) -> list[Removed]:
    """Return the archive entries that describe a compaction: the new messages, and the list of parts."""
    case, places = work.case, {id(turn): index for index, turn in enumerate(work.turns)}
    new: dict[str, Removed] = {}
    shortened: dict[int, str] = {}
    parts = [_part(piece, places, work.head, new, shortened) for piece in rendered.pieces]
    cut = work.head + work.plan.cut
    chain = archive_id(work.checkpoints(work.plan.checkpoints)[-1]) if work.plan.cut else None
    changes = Changes(len(work.turns), work.head, cut, chain, _joined(parts), shortened)
    key = changes_key(case.request, case.attempt)
    return [*new.values(), Removed(key, (msgspec.msgpack.encode(changes),))]


def _part(
    piece: OutgoingMessage, places: dict[int, int], head: int, new: dict[str, Removed], shortened: dict[int, str]
) -> Part:
    place = None if piece.turn is None else places.get(id(piece.turn))
    if piece.turn is not None and place is not None and not piece.changed:
        return Part(place, place + 1)
    key = hashlib.sha256(b"sent" + piece.raw).hexdigest()[:20]
    new[key] = Removed(key, (piece.raw,))
    if piece.turn is None or place is None:
        return Part(head, head, key)
    shortened[place] = piece.turn.facts.id
    return Part(place, place + 1, key)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighboring unchanged messages as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.new is part.new is None and last.end == part.start:
            joined[-1] = Part(last.start, part.end)
        else:
            joined.append(part)
    return joined


async def read_changes(archive: Archive, record: RequestRecord) -> list[Changed | Unchanged] | None:
    """Return how a request was changed, in the order of the sent prompt; ``None`` if the archive doesn't have it.

    Raises ``StoreFailed``.
    """
    tenant = record.tenant
    for attempt in range(record.retries, -1, -1):  # a repeated attempt has no changes of its own
        if (found := await archive.fetch(tenant, changes_key(record.id, attempt))) is not None:
            break
    else:
        return None
    try:
        changes = msgspec.msgpack.decode(found.messages[0], type=Changes)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        STORE_UNREADABLE.inc()
        log.warning("archive.entry_unreadable", reason=type(error).__name__, record=record.id)
        return None
    shown: list[Changed | Unchanged] = []
    for part in changes.parts:
        if part.new is None:
            shown.append(Unchanged(part.start, part.end - part.start))
            continue
        summary = part.start == part.end
        key = changes.removed if summary else changes.shortened.get(part.start)
        before = None if key is None else await archive.fetch(tenant, key)
        after = await archive.fetch(tenant, part.new)
        complete = before is not None and before.complete and after is not None
        shown.append(
            Changed(
                part.start,
                [] if before is None else before.messages,
                [] if after is None else after.messages,
                complete,
                summary,
            )
        )
    return shown
