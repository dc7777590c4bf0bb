"""End an answer where its request wanted the end, if the upstream has no field that says so, or refused it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.upstream.bridge.completions import AnswerBuilder, Delta, Event


class Bounds:
    """Passes choices on up to the first of their stop sequences. If it's ``single``, only the first call passes."""

    def __init__(self, stops: Sequence[str], *, single: bool) -> None:
        self._stops = stops
        self._single = single
        self._held = ""
        self._matched: str | None = None
        self._called = False

    def passed(self, choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the part of a choice that passes, if any. It has a delta, and a finish reason if it's the last one."""
        choice, ended = dict(choice), choice["finish_reason"] is not None
        if self._stops or self._single:
            choice["delta"] = {} if self._matched is not None else self._bounded(choice["delta"], ended=ended)
        if ended and self._matched is not None and not self._called:
            choice |= {"finish_reason": "stop", "stop_sequence": self._matched}
        if choice["delta"] or ended:
            yield choice

    def _bounded(self, delta: Delta, *, ended: bool) -> Delta:
        """Return the part of a delta that passes. Text that may begin a stop sequence waits for the next delta."""
        calls = [call for call in delta.get("tool_calls", ()) if call["index"] == 0 or not self._single]
        text, self._held = self._held + delta.get("content", ""), ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self._matched = min(found)
            text, calls = text[:end], []
        elif not ended and not calls:
            tails = range(max(0, len(text) - max(map(len, self._stops), default=0)), len(text))
            begins = (place for place in tails if any(stop.startswith(text[place:]) for stop in self._stops))
            end = next(begins, len(text))
            text, self._held = text[:end], text[end:]
        self._called = self._called or bool(calls)
        made = {**delta, "content": text, "tool_calls": calls}
        return {name: value for name, value in made.items() if value}


class Bounded(AnswerBuilder):
    """Builds an answer of what passes its bounds. Everything behind a stop sequence but the usage is dropped."""

    def __init__(self, builder: AnswerBuilder, stops: Sequence[str], *, single: bool) -> None:
        self._builder = builder
        self._bounds = Bounds(stops, single=single)

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        choices = chunk.get("choices")
        chunks = [{**chunk, "choices": [one]} for one in self._bounds.passed(choices[0])] if choices else [chunk]
        for made in chunks:
            yield from self._builder.feed(made)

    def finish(self) -> Iterator[Event]:
        yield from self._builder.finish()
