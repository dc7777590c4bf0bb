"""Taking the turns, and what they say."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.client import Broken, request, verdicts, whole
from bench.crossings.conversations import Growing
from bench.crossings.upstream import SUMMARY_NUMBER

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


ARRIVING = 30.0
"""Seconds at a human pace over which conversations begin: for the first turn of each a whole history is counted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: its latency in seconds, what the proxy says it did (``x-compaction`` and ``x-compaction-summary``), and
    the number of the summary that reached the upstream, empty where none of a model's did."""

    latency: float
    verdict: str
    origin: str
    summary: bytes


@dataclass(frozen=True, slots=True)
class Crossing:
    """A turn from which on another summary stands in the prompt. ``wait`` is in seconds, beyond what a turn takes that
    needs nothing; ``origin`` is what ``x-compaction-summary`` says."""

    wait: float
    origin: str


async def converse(port: int, growing: Growing, speed: float, delay: float) -> list[Turn]:
    """Take a conversation's turns, ``speed`` times as fast as people would; the first one after ``delay`` seconds.

    Raises ``Broken`` if an answer is not what it has to be.
    """
    await asyncio.sleep(delay)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turns = []
    for _ in range(growing.turns):
        sent = request(growing.body)
        start = time.perf_counter()
        writer.write(sent)
        turns.append(_turn(await _answer(reader), start))
        await asyncio.sleep(growing.pause() / speed)
        growing.grow()
    writer.close()
    return turns


async def everybody(
    ports: Sequence[int], conversations: Sequence[Sequence[Growing]], speed: float
) -> list[list[list[Turn]]]:
    """The turns of all conversations, by port and conversation."""
    rng = random.Random(1)
    taken = []
    async with asyncio.TaskGroup() as group:
        for port, some in zip(ports, conversations, strict=True):
            delays = [rng.uniform(0, ARRIVING / speed) for _ in some]
            taken.append(
                [
                    group.create_task(converse(port, growing, speed, delay))
                    for growing, delay in zip(some, delays, strict=True)
                ]
            )
    return [[task.result() for task in tasks] for tasks in taken]


def usual(conversations: Sequence[Sequence[Turn]]) -> float:
    """Seconds that a turn takes that needs nothing: the median."""
    return median(turn.latency for turns in conversations for turn in turns if turn.verdict == "none")


def crossings(conversations: Sequence[Sequence[Turn]]) -> list[Crossing]:
    """All turns from which on another summary stands in the prompt."""
    base = usual(conversations)
    return [
        Crossing(max(0.0, turn.latency - base), turn.origin)
        for turns in conversations
        for before, turn in pairwise(turns)
        if _standing(turn) and _standing(turn) != _standing(before)
    ]


def others(conversations: Sequence[Sequence[Turn]]) -> list[float]:
    """What every other turn took longer than one that needs nothing, in seconds; conversations' first turns left
    out."""
    base = usual(conversations)
    return [
        max(0.0, turn.latency - base)
        for turns in conversations
        for before, turn in pairwise(turns)
        if not _standing(turn) or _standing(turn) == _standing(before)
    ]


def _standing(turn: Turn) -> bytes:
    """What stands in the prompt in place of older turns."""
    return turn.summary or turn.origin.encode()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    if length is None:
        raise Broken(f"an answer without a length begins {head[:300]!r}")
    return head + await reader.readexactly(int(length[1]))


def _turn(answer: bytes, start: float) -> Turn:
    latency = time.perf_counter() - start
    whole(answer)
    verdict, origin = verdicts(answer)
    read = SUMMARY_NUMBER.search(answer)
    if verdict not in ("none", "compacted") or (origin in ("stored", "made")) != (read is not None):
        raise Broken(f"the proxy says {verdict} {origin}, and the upstream read {read and read[0]!r}")
    return Turn(latency, verdict, origin, read[1] if read else b"")
