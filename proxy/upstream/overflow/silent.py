"""Overflows without an error: an answer that came although the prompt did not fit, or ends because it did.

Some servers cut a prompt at its beginning and answer what is left of it (Ollama, KoboldCpp, text-generation-webui); the
usage then names fewer tokens than were sent. Others answer until the window is full and say so in the finish reason, or
write nothing at all, or send a stream that is over before it began (llama-cpp-python).

Here are functions of what is known of a finished answer. What they teach is at most what the answer itself shows: a
limit is the largest size that the upstream took, never a larger number that it may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.upstream.overflow.reading import LARGEST_LIMIT, SMALLEST_LIMIT, Overflow

WINDOW_REASONS = frozenset({"model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded"})
"""Finish reasons that say it: Anthropic's since Claude 4.5, and what gateways make of it."""
LENGTH_REASONS = frozenset({"length", "max_tokens", "max_output_tokens", "incomplete"})
ABORT_REASONS = frozenset({"abort", "error"})

FAR_BELOW = 0.6
"""Share of our own count under which a reported size is no matter of tokenizers any more: they stay above 0.7."""
FAR_ABOVE = 1.6
"""Times a known window from which our own count is beyond it, whatever the tokenizer."""
WORTH_A_DOUBT = 0.125
"""Share of a known window from which an answer without anything in it may mean that the real one is smaller."""
JUST_UNDER = 0.02
"""Share of a window that is left free where whole messages are dropped until the rest fits."""
SAME = 0.01
"""Share by which the reported sizes of a prompt that is always cut differ."""
GROWN = 1.1
"""Times by which our own count must have grown for an unchanged reported size to mean something."""
HALF = 0.5
"""Share of our own count under which a reported size may well be that of what no cache held."""
NOTHING_WRITTEN = 16
"""Output tokens up to which an answer that stopped for its length is one that had no room."""
SNAP = 0.0001
"""Share of a full window that some models leave unused: so near to a multiple of 1,000 or 1,024, this is the window."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished answer of status 200.

    ``prompt`` and ``output`` are the tokens that it reports, ``None`` or 0 where it reports none. ``prompt`` includes
    what came from a cache, ``output`` what was thought. ``empty``: neither text nor calls nor thoughts were written.
    ``cached`` is what came from a cache by itself; some count it into the prompt, and some do not.
    """

    finish_reason: str | None
    prompt: int | None
    output: int | None
    empty: bool
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """An earlier request of the same conversation: its size by our own count, and as the upstream reported it."""

    counted: int
    reported: int


def prompt_tokens(usage: Mapping[str, object]) -> int | None:
    """The size of the whole prompt by a usage object; ``None`` if it doesn't say.

    Anthropic's input excludes what was read from and written to a cache. So does the ``prompt_tokens`` of some
    gateways: where more was cached than the prompt had, the two are added.
    """
    base = _first(usage, "prompt_tokens", "input_tokens", "promptTokenCount", "prompt_eval_count")
    if base is None:
        return None
    base += (_first(usage, "cache_read_input_tokens") or 0) + (_first(usage, "cache_creation_input_tokens") or 0)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, Mapping) and (cached := _first(details, "cached_tokens") or 0) > base:
            base += cached
    return base


def cached_tokens(usage: Mapping[str, object]) -> int:
    """Tokens of the prompt that came from a cache, by a usage object; 0 where it doesn't say."""
    details = usage.get("prompt_tokens_details")
    return (_first(details, "cached_tokens") or 0) if isinstance(details, Mapping) else 0


def output_tokens(usage: Mapping[str, object]) -> int | None:
    """The size of the answer by a usage object; ``None`` if it doesn't say."""
    return _first(usage, "completion_tokens", "output_tokens", "candidatesTokenCount", "eval_count")


def _first(usage: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def silent_overflow(
    answer: Finished,
    counted: int,
    *,
    window: int | None = None,
    asked: int | None = None,
    before: Sequence[Sent] = (),
) -> Overflow | None:
    """Whether a finished answer shows that its prompt, or prompt and output, did not fit; ``None`` if it does not.

    ``counted`` is our own count of the prompt in tokens, calibrated for the upstream where that is known. ``window`` is
    the window that we believe in, ``asked`` the output that was asked for, ``before`` what is known of earlier requests
    of the same conversation, oldest first.
    """
    if answer.finish_reason in WINDOW_REASONS:
        return _full(answer)
    return (
        _nothing_written(answer, counted, window, asked)
        or _cut_at_the_front(answer, counted, before)
        or _no_usage(answer, counted, window)
    )


def empty_stream(counted: int, *, window: int | None = None) -> Overflow | None:
    """What a stream of status 200 without a single event says: an overflow, unless the prompt is small.

    It teaches no limit. Where no ``window`` is known, every prompt larger than the smallest windows may be the reason;
    and a window may be smaller than is known.
    """
    least = SMALLEST_LIMIT if window is None else window * WORTH_A_DOUBT
    return _silent(None, None) if counted >= least else None


def _full(answer: Finished) -> Overflow:
    """The finish reason says it: prompt and output together are the window."""
    if not answer.prompt:
        return _silent(None, None, answer.output)
    return _silent(_snapped(answer.prompt + (answer.output or 0)), answer.prompt, answer.output)


def _nothing_written(answer: Finished, counted: int, window: int | None, asked: int | None) -> Overflow | None:
    """Stopped for its length before anything was written, though more was asked for: the prompt filled the window."""
    output = answer.output or 0
    if answer.finish_reason in LENGTH_REASONS and answer.empty:
        if output > NOTHING_WRITTEN or (asked is not None and asked <= max(output, 1)):
            return None
        if not answer.prompt:
            return _silent(None, None, output)
        if window is not None and answer.prompt + output < window * (1 - JUST_UNDER) and counted < window / FAR_ABOVE:
            in_doubt = output <= 1 and counted >= window * WORTH_A_DOUBT
            return _silent(None, answer.prompt, output) if in_doubt else None
        return _silent(answer.prompt + output, answer.prompt, output)
    if answer.finish_reason in ABORT_REASONS and answer.empty and not output and window is not None:
        return _silent(None, None) if counted > window else None
    return None


def _cut_at_the_front(answer: Finished, counted: int, before: Sequence[Sent]) -> Overflow | None:
    """The upstream counted far less than was sent: just the size of a window, or always the same."""
    reported = answer.prompt
    if not reported or reported < SMALLEST_LIMIT:
        return None
    if answer.cached and reported + answer.cached > FAR_BELOW * counted:
        return None  # what the cache held may not be in the number
    if reported < FAR_BELOW * counted and _like_a_window(reported):
        return _silent(reported, None)
    if any(_fell_behind(reported, counted, sent) for sent in before):
        return _silent(max(reported, *(sent.reported for sent in before)), None)
    same = [sent for sent in before if abs(sent.reported - reported) <= SAME * reported]
    if same and counted >= GROWN * min(sent.counted for sent in same) and reported < counted * (1 / GROWN):
        return _silent(max(reported, *(sent.reported for sent in same)), None)
    return None


def _fell_behind(reported: int, counted: int, earlier: Sent) -> bool:
    """Whether an upstream that counted an earlier prompt as we do no longer counts what the conversation has grown by.

    Where whole messages are left out the reported size goes up and down a little.
    """
    alike = earlier.reported >= earlier.counted / GROWN
    stands = HALF * counted <= reported <= earlier.reported * (1 + SAME)
    return alike and stands and counted >= GROWN * earlier.counted and reported < counted / GROWN


def _no_usage(answer: Finished, counted: int, window: int | None) -> Overflow | None:
    """An answer to far more than fits, from a server that counts nothing: it can only have read a part."""
    if answer.prompt or window is None or counted < FAR_ABOVE * window:
        return None
    return _silent(window, None)


def _like_a_window(size: int) -> bool:
    """Whether a size is what windows are: round, or at or just under a power of two or one and a half of it."""
    if size % 1000 == 0 or (size % 1024 == 0 and size >= 2048):
        return True
    power = 1 << (size - 1).bit_length()
    return any(0 <= window - size <= JUST_UNDER * window for window in (power, power * 3 // 4, power * 5 // 8))


def _snapped(size: int) -> int:
    for unit in (1000, 1024):
        above = -(-size // unit) * unit
        if above - size <= SNAP * size:
            return above
    return size


def _silent(limit: int | None, counted: int | None, output: int | None = None) -> Overflow:
    within = limit is not None and SMALLEST_LIMIT <= limit <= LARGEST_LIMIT
    return Overflow("silent", limit if within else None, "total" if within else None, counted, output, "compact")
