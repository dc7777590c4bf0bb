"""Whether an upstream's answer says that the prompt was too long, and what it says about sizes.

    answer → envelope.faults     which errors are in it: codes, numbers, sentences
           → vetoes.vetoed       those that are about something else
           → patterns.ROWS       sentences → kind, limit, size
           → recognise           the reading that knows most

Codes decide first, words second. A silent overflow (an answer cut off at the window's end, with
``finish_reason: model_context_window_exceeded`` or the like) is no error and is not recognised here.
"""

from __future__ import annotations

from proxy.upstream.overflow.envelope import Fault, faults
from proxy.upstream.overflow.patterns import CODES, read
from proxy.upstream.overflow.reading import Overflow, Reading
from proxy.upstream.overflow.vetoes import NEVER_STATUS, vetoed

__all__ = ["Overflow", "recognise"]


def recognise(status: int, body: bytes) -> Overflow | None:
    """Read an error answer, or the first events of a stream (status 200); ``None`` if it is not an overflow.

    ``body`` is decompressed. Only error fields are read, never what a provider echoes. Rate limits, quotas, byte
    limits, limits on output alone, on images and on other fields are not overflows.
    """
    if status in NEVER_STATUS:
        return None
    readings = [reading for fault in faults(status, body) for reading in _read(fault)]
    if not readings:
        return None
    return max(readings, key=lambda reading: reading.known).judge()


def _read(fault: Fault) -> list[Reading]:
    if vetoed(fault.codes, ()):
        return []
    by_code = not fault.codes.isdisjoint(CODES)
    readings = [reading for text in fault.texts if not vetoed((), (text,)) and (reading := read(text))]
    if by_code:
        readings.append(Reading(limit=fault.numbers.get("n_ctx"), counted=fault.numbers.get("n_prompt_tokens")))
    return readings
