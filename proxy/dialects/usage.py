"""Read what a price depends on from the usage that an upstream reported, in any API's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proxy.overflow.silent import PLAIN, Finished, cached_tokens, output_tokens, prompt_tokens
from proxy.telemetry.record import TIERS, Usage

Object = Mapping[str, object]

_TIER_NAMES = {**{name: name for name in TIERS}, "fast": "priority"}
_REGION_LENGTH = 16
_LARGEST = 10_000_000  # The largest count of searches or of one kind of token. A larger one is an error.

_SERVING = "fallback_message"
"""The type of the call that wrote the answer if another model took over. The outer figures include it."""


def usage_of(end: Finished) -> Usage | None:
    """Return the reported usage, or ``None`` if the response has none."""
    if end.prompt is None and end.output is None:
        return None
    usage = end.usage
    if end.tier is None and not end.searches and usage.keys() <= PLAIN:
        return Usage(end.prompt, _output(end, usage, None), end.cache_read, end.cache_write)
    tier, region = _tier(end, usage), _region(usage.get("inference_geo"))
    calls = list(_calls(usage.get("iterations"), tier, region))
    # LiteLLM's chat completions have sums in `prompt_tokens`.
    compactions = [one for type, one in calls if type != _SERVING and "prompt_tokens" not in usage]
    reading = _object(usage, "prompt_tokens_details", "input_tokens_details", "input_token_details")
    writing = _object(usage, "completion_tokens_details", "output_tokens_details")
    reasoning = _count(writing, "reasoning_tokens")
    return Usage(
        _sum(end.prompt, *(one.input for one in compactions)),
        _sum(_output(end, usage, reasoning), *(one.output for one in compactions)),
        _sum(end.cache_read, *(one.cache_read for one in compactions)),
        _sum(end.cache_write, *(one.cache_write for one in compactions)),
        _sum(_written_for_an_hour(usage, reading, end.cache_write), *(one.cache_write_1h for one in compactions)),
        reasoning,
        _count(reading, "audio_tokens"),
        _count(writing, "audio_tokens"),
        _count(reading, "image_tokens"),
        _count(writing, "image_tokens"),
        _searches(usage, reading) or end.searches or None,
        tier,
        region,
        tuple(one for _, one in calls),
    )


def models_of(usage: Object) -> Iterator[str]:
    """Yield the models of the calls that Anthropic made besides the answer's own."""
    return (one.model for _, one in _calls(usage.get("iterations"), None, None) if one.model is not None)


def _output(end: Finished, usage: Object, reasoning: int | None) -> int | None:
    """Return the tokens of the answer with its reasoning. That of xAI and Gemini is only in their total."""
    if not end.prompt or end.output is None:
        return end.output
    hidden = (_count(usage, "total_tokens") or 0) - end.prompt - end.output
    return end.output + hidden if hidden > 0 and hidden == (reasoning or hidden) else end.output


def _calls(iterations: object, tier: str | None, region: str | None) -> Iterator[tuple[object, Usage]]:
    """Yield the types and the usage of calls that Anthropic made besides the answer's own, or of another model.

    The outer figures exclude all but ``_SERVING``.
    """
    for call in iterations if isinstance(iterations, list) else ():
        if isinstance(call, Mapping) and call.get("type") not in (None, "message"):
            counts = prompt_tokens(call), output_tokens(call), *cached_tokens(call)
            if any(counts) and max(count or 0 for count in counts) <= _LARGEST:
                model = call.get("model") if isinstance(call.get("model"), str) else None
                hour = _written_for_an_hour(call, {}, counts[-1])
                own = Usage(*counts, hour, tier=None if model else tier, region=region, model=model)
                yield call.get("type"), own


def _written_for_an_hour(usage: Object, details: Object, written: int | None) -> int | None:
    """Return the tokens written for an hour. A stream states the lifetimes of its first step, and the sum of all."""
    lifetimes = _object(usage, "cache_creation") or _object(details, "cache_creation_token_details")
    lasting = _count(lifetimes, "ephemeral_1h_input_tokens")
    stated = (lasting or 0) + (_count(lifetimes, "ephemeral_5m_input_tokens") or 0)
    return round(lasting * written / stated) if lasting and written and stated < written else lasting


def _searches(usage: Object, details: Object) -> int | None:
    found = _count(_object(usage, "server_tool_use"), "web_search_requests")
    if found is None:
        found = _count(_object(usage, "server_side_tool_usage_details"), "web_search_calls")
    return _count(details, "web_search_requests") if found is None else found


def _tier(end: Finished, usage: Object) -> str | None:
    if usage.get("speed") == "fast":
        return "fast"
    stated = end.tier or usage.get("service_tier")
    return _TIER_NAMES.get(stated.lower()) if isinstance(stated, str) else None


def _region(stated: object) -> str | None:
    """Return the region that served the request, if it's a short word."""
    if not isinstance(stated, str) or len(stated) > _REGION_LENGTH or not (stated.isascii() and stated.isalpha()):
        return None
    return None if stated == "global" else stated.lower()


def _object(usage: Object, *names: str) -> Object:
    found = (usage.get(name) for name in names)
    return next((value for value in found if isinstance(value, Mapping)), {})


def _count(usage: Object, name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST else None


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
