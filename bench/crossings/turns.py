"""Send the turns of conversations, and find the crossings among them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.client import Broken, read_response, request, verdicts, whole
from bench.crossings.conversations import Growing
from bench.crossings.upstream import SUMMARY_NUMBER

ARRIVING = 30.0
"""Seconds, before division by the speed, over which the conversations begin.

The proxy counts a whole history for the first turn of each.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn.

    ``latency`` is in seconds. ``verdict`` and ``origin`` are ``x-compaction`` and ``x-compaction-summary``. ``summary``
    is the number of the model's summary that the upstream received, or empty.
    """

    latency: float
    verdict: str
    origin: str
    summary: bytes


@dataclass(frozen=True, slots=True)
class Crossing:
    """A turn whose prompt has another summary than the turn before.

    ``wait`` is in seconds, beyond the median of turns that aren't compacted. ``origin`` is ``x-compaction-summary``.
    """

    wait: float
    origin: str


async def converse(port: int, growing: Growing, speed: float, delay: float) -> list[Turn]:
    """Send a conversation's turns, ``speed`` times as fast as people. Wait ``delay`` seconds before the first one.

    Raises ``Broken`` for an unexpected response.
    """
    await asyncio.sleep(delay)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turns = []
    for _ in range(growing.turns):
        sent = request(growing.body)
        start = time.perf_counter()
        writer.write(sent)
        turns.append(_turn(await read_response(reader), start))
        await asyncio.sleep(growing.pause() / speed)
        growing.grow()
    writer.close()
    return turns


async def converse_all(
    ports: Sequence[int], conversations: Sequence[Sequence[Growing]], speed: float
) -> list[list[list[Turn]]]:
    """Run all conversations at the same time. Return their turns by port and conversation."""
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
    """Return the median latency in seconds of turns that aren't compacted."""
    return median(turn.latency for turns in conversations for turn in turns if turn.verdict == "none")


def crossings(conversations: Sequence[Sequence[Turn]]) -> list[Crossing]:
    """Return all crossings."""
    base = usual(conversations)
    return [
        Crossing(max(0.0, turn.latency - base), turn.origin)
        for turns in conversations
        for before, turn in pairwise(turns)
        if _crosses(before, turn)
    ]


def others(conversations: Sequence[Sequence[Turn]]) -> list[float]:
    """Return the waits in seconds of all other turns, except the first of each conversation."""
    base = usual(conversations)
    return [
        max(0.0, turn.latency - base)
        for turns in conversations
        for before, turn in pairwise(turns)
        if not _crosses(before, turn)
    ]


def _crosses(before: Turn, turn: Turn) -> bool:
    """Return whether a turn has a summary that the one before didn't have."""
    return bool(_replacement(turn)) and _replacement(turn) != _replacement(before)


def _replacement(turn: Turn) -> bytes:
    """Return an id of the text that replaces older messages in the prompt, or nothing."""
    return turn.summary or turn.origin.encode()


def _turn(answer: bytes, start: float) -> Turn:
    latency = time.perf_counter() - start
    whole(answer)
    verdict, origin = verdicts(answer)
    read = SUMMARY_NUMBER.search(answer)
    if verdict not in ("none", "compacted") or (origin in ("stored", "made")) != (read is not None):
        raise Broken(f"the proxy reported {verdict} {origin}, and the upstream received {read and read[0]!r}")
    return Turn(latency, verdict, origin, read[1] if read else b"")
