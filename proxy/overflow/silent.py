"""Detect overflows without an error: the upstream cut the prompt, or its answer had no room.

Some servers drop the beginning of a prompt and answer the rest (Ollama, KoboldCpp, text-generation-webui). Their usage
then reports fewer tokens than the proxy sent. Others answer until the window is full and report that in the finish
reason, write nothing, or end a stream before its first event (llama-cpp-python).

An answer states no limit, so each rule needs two independent signs:

    the window is full      the finish reason, or an empty answer although the request asked for more
                            and the known window, or the same total for a prompt of another size
    the prompt was cut      the reported size stays the same while the conversation grows
                            and it has the size of a window, or the upstream counted an earlier prompt in full

A limit is at most the largest size that the upstream accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from proxy.overflow.general import LARGEST_LIMIT, SMALLEST_LIMIT, Overflow

WINDOW_REASONS = frozenset({"model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded"})
"""Finish reasons for a full window: Anthropic's since Claude 4.5, and the variants of gateways."""
LENGTH_REASONS = frozenset({"length", "max_tokens", "max_output_tokens", "incomplete"})
ABORT_REASONS = frozenset({"abort", "error"})

FAR_BELOW = 0.6  # share of our own count below which a prompt's reported size with its cached tokens means a cut
FAR_ABOVE = 1.6  # times a known window from which our own count exceeds it with any tokenizer
WORTH_A_DOUBT = 0.125  # share of a known window from which a stream without any event may mean a smaller window
JUST_UNDER = 0.02  # share of a window that stays free when the upstream drops whole messages until the rest fits
SAME = 0.01  # share by which the reported sizes of a prompt that is always cut differ
EXACTLY = 0.001  # share by which the totals of answers that filled the same window differ
OTHER = 1.03  # times by which two prompts must differ by our count for the same total to mean a window
GROWN = 1.1  # times by which our own count must have grown for an unchanged reported size to mean something
PAST_LOOSE = 1.6  # times the text that a template may drop that a conversation must have gained since
PAST_CACHE = 1.6  # Times the newest text that a reported size must exceed. Less may be the part that no cache held.
CACHE_BLOCK = 128  # tokens by which the part that no cache held exceeds the newest text: caches store whole blocks
HALF = 0.5  # share of a published window below which one sign never proves a smaller window
NOTHING_WRITTEN = 16  # Output tokens. An answer that stopped for its length and has at most this many had no room.
LARGEST_FIGURE = 1_000_000_000
"""Tokens. A larger figure in a usage object is an error of the upstream, and counts as not reported."""
SNAP = 0.0001  # share of a full window that some models leave unused, close to a multiple of 1,000 or 1,024


class Finished(msgspec.Struct, frozen=True):
    """A finished answer of status 200. Figures that the upstream doesn't report are ``None`` or 0."""

    finish_reason: str | None
    prompt: int | None  # tokens with cached ones
    output: int | None  # tokens with reasoning
    empty: bool  # no text, calls, or reasoning
    cache_read: int | None = None  # tokens of the prompt. Some upstreams include them in it, and some don't.
    cache_write: int | None = None
    usage: Mapping[str, object] = {}  # the upstream's object
    tier: object = None  # the service tier that it states elsewhere
    searches: int = 0  # web searches in the answer's content

    @property
    def cached(self) -> int:
        """Return the tokens read from a cache, 0 if the upstream doesn't report them."""
        return self.cache_read or 0


@dataclass(frozen=True, slots=True)
class EarlierPrompt:
    """An earlier prompt of a conversation, in the upstream's tokens."""

    reported: int  # its size, as the upstream reported it
    grown: int  # our count of the text gained since that templates keep (see `dialects.counting.Evidence`)
    full: bool = False  # the upstream counted the whole prompt
    loose: int = 0  # our count of its text that a template may drop later
    share: float = 0  # the part of our own count that was reported, 0 if unknown

    def exceeds(self, reported: int) -> bool:
        """Return whether a prompt that begins with this one and was reported with this size was cut."""
        if reported > self.reported * (1 + SAME) or self.grown < (GROWN - 1) * reported:
            return False
        return self.grown >= PAST_LOOSE * self.loose or self.reported <= reported * (1 + SAME)


@dataclass(frozen=True, slots=True)
class Filled:
    """An answer that seemed to fill its window: our own count of its prompt, and its total size in tokens."""

    counted: int
    total: int


PLAIN = frozenset({"prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"})
"""The fields of a usage object that states nothing but the size of the prompt and of the answer."""

_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")


def prompt_tokens(usage: Mapping[str, object]) -> int | None:
    """Return the size of the whole prompt by a usage object; ``None`` if it has none.

    Anthropic's input excludes the tokens read from and written to a cache. So does the ``prompt_tokens`` of some
    gateways: more tokens were cached than the prompt had, or the total includes them. LiteLLM's includes them.
    """
    base = _first(usage, "prompt_tokens", "input_tokens", "promptTokenCount", "prompt_eval_count")
    if base is None or usage.keys() <= PLAIN:
        return base
    cached = sum(count or 0 for count in cached_tokens(usage))
    apart = "prompt_tokens" not in usage and not usage.keys().isdisjoint(_CACHED)
    total = base + cached + (output_tokens(usage) or 0)
    return base + cached if apart or cached > base or usage.get("total_tokens") == total else base


def cached_tokens(usage: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Return the tokens of the prompt that were read from a cache, and those written to it, by a usage object."""
    if usage.keys() <= PLAIN:
        return None, None
    read = _first(
        usage, "cache_read_input_tokens", "prompt_cache_hit_tokens", "cachedContentTokenCount", "cached_tokens"
    )
    written = _first(usage, "cache_creation_input_tokens")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if (details := usage.get(name)) and isinstance(details, Mapping):
            read = _first(details, "cached_tokens") if read is None else read
            written = _first(details, "cache_write_tokens", "cache_creation_tokens") if written is None else written
    return read, written


def output_tokens(usage: Mapping[str, object]) -> int | None:
    """Return the size of the answer by a usage object; ``None`` if it has none."""
    return _first(usage, "completion_tokens", "output_tokens", "candidatesTokenCount", "eval_count")


def _first(usage: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_FIGURE:
            return value
    return None


def silent_overflow(
    answer: Finished,
    counted: int,
    *,
    window: int | None = None,
    asked: int | None = None,
    filled: Sequence[Filled] = (),
) -> Overflow | None:
    """Return the overflow that one finished answer shows; ``None`` if it shows none.

    ``counted`` is our own count of the prompt in the upstream's tokens. ``window`` is the known window, ``asked``
    the requested output. ``filled`` are earlier answers of the same upstream, model, and tenant that
    seemed to fill their window (see ``seems_full``).
    """
    if seems_full(answer, asked):
        return _full(answer, counted, window, asked, filled)
    if answer.finish_reason in ABORT_REASONS and answer.empty and not answer.output and window is not None:
        return _silent(None, None) if counted > window else None
    # Judge an answer without usage to a prompt far over the window: the upstream can only have read a part.
    if answer.prompt or window is None or counted < FAR_ABOVE * window:
        return None
    return _silent(window, None)


def seems_full(answer: Finished, asked: int | None) -> bool:
    """Return whether an answer seems to have filled its window, by its finish reason or because it wrote nothing."""
    if answer.finish_reason in WINDOW_REASONS:
        return True
    output = answer.output or 0
    used_up = asked is not None and asked <= max(output, 1)
    return answer.finish_reason in LENGTH_REASONS and answer.empty and output <= NOTHING_WRITTEN and not used_up


def without_overstated(before: Sequence[EarlierPrompt], share: float) -> list[EarlierPrompt]:
    """Return earlier prompts without those whose size was overstated, such as by counting a prompt for each search.

    A smaller share of a prompt was reported before them, and again now. A server that cuts prompts reports ever less.
    """
    least, kept = float("inf"), []
    for sent in before:
        if sent.share <= GROWN * least:
            kept.append(sent)
        if sent.share <= GROWN * share:
            least = min(least, sent.share)
    return kept


def cut_prompt(
    answer: Finished, counted: int, newest: int, before: Sequence[EarlierPrompt], window: int | None = None
) -> Overflow | None:
    """Return the overflow if the upstream leaves out a part of a growing conversation; ``None`` if it doesn't.

    ``counted`` is our own count of the prompt and ``newest`` that of its messages that the last prompt didn't have,
    both in the upstream's tokens. ``before`` are the earlier prompts of the conversation, oldest first. The prompt
    begins with each of them. ``window`` is the published one.
    """
    reported = answer.prompt
    if not reported or reported < SMALLEST_LIMIT:
        return None
    if answer.cached and reported + answer.cached > FAR_BELOW * counted:
        return None  # the reported size may exclude the cached tokens
    if reported <= PAST_CACHE * newest + min(CACHE_BLOCK, reported // 8):
        return None  # some upstreams don't report their cached tokens
    # One small figure may be an accident.
    if not any(before[-1].reported <= sent.reported * (1 + SAME) for sent in before[:-1]):
        return None
    larger = [sent for sent in before if sent.exceeds(reported)]
    largest = max(reported, *(sent.reported for sent in before))
    far_below = window is not None and largest < HALF * window
    agreed = any(sent.full for sent in before) or _like_a_window(largest)
    if larger and (agreed or (len(larger) > 1 and not far_below)):
        return _silent(largest, None)
    return None


def counts_in_full(counted: int, reported: int) -> bool:
    """Return whether the upstream reported a prompt of ``counted`` tokens, by our own count, in full."""
    return reported >= counted / GROWN


def empty_stream(counted: int, *, window: int | None = None) -> Overflow | None:
    """Return the overflow that may explain a stream of status 200 without events; ``None`` for a small prompt."""
    least = SMALLEST_LIMIT if window is None else window * WORTH_A_DOUBT
    return _silent(None, None) if counted >= least else None


def _full(
    answer: Finished, counted: int, window: int | None, asked: int | None, filled: Sequence[Filled]
) -> Overflow | None:
    """Judge an answer that seems to have filled its window: a second sign must agree."""
    stated = answer.finish_reason in WINDOW_REASONS
    if not answer.prompt:
        beyond = window is not None and counted >= (HALF * window if stated else window)
        return _silent(None, None, answer.output) if beyond or (stated and window is None) else None
    total = answer.prompt + (answer.output or 0)
    found = _silent(_snapped(total) if stated else total, answer.prompt, answer.output)
    if stated and (window is None or total >= HALF * window):
        return found
    if window is None and _is_window(total):
        return found
    if window is not None and total >= window * (1 - JUST_UNDER):
        return None if asked is not None and answer.prompt + asked <= window else found
    again = (earlier for earlier in filled if abs(earlier.total - total) <= EXACTLY * total)
    if any(not counted / OTHER < earlier.counted < counted * OTHER for earlier in again):
        return found
    return None


def _is_window(size: int) -> bool:
    """Return whether a size is a multiple of 1,000 or 1,024, as windows are."""
    return size >= 2048 and (size % 1000 == 0 or size % 1024 == 0)


def _like_a_window(size: int) -> bool:
    """Return whether a size is that of a window, or just under a power of two or 1.25 or 1.5 times one."""
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


_MANAGED = re.compile(rb'"(?:context_management|truncation|transforms|truncate_prompt_tokens)"\s*:')
"""Request fields that ask the upstream to shorten the prompt."""


_REMOVES = re.compile(rb'"(?:clear_tool_uses\w*|compact\w*)"')
"""Kinds of context management that remove content. Those for reasoning hardly make a prompt smaller."""


def asks_for_removal(field: bytes) -> bool:
    """Return whether ``context_management`` asks the upstream to remove content before it counts the prompt."""
    return _REMOVES.search(field) is not None


def asks_for_cuts(raw: bytes) -> bool:
    """Return whether a request body asks the upstream to shorten the prompt."""
    return _MANAGED.search(raw) is not None
