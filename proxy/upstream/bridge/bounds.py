"""End an answer where its request wanted the end, if the upstream refused the field that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.upstream.bridge.completions import AnswerBuilder, Delta, Event


class Bounded(AnswerBuilder):
    """Passes an answer on up to the first of its stop sequences. If it's ``single``, only its first call passes."""

    def __init__(self, builder: AnswerBuilder, stops: Sequence[str], *, single: bool) -> None:
        self._builder = builder
        self._stops = stops
        self._single = single
        self._held = ""
        self._matched: str | None = None
        self._called = False

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """See ``AnswerBuilder``. Everything behind a stop sequence but the usage is dropped."""
        if not (choices := chunk.get("choices")):
            yield from self._builder.feed(chunk)
            return
        choice, ended = dict(choices[0]), choices[0]["finish_reason"] is not None
        choice["delta"] = {} if self._matched is not None else self._bounded(choice["delta"], ended=ended)
        if ended and self._matched is not None and not self._called:
            choice |= {"finish_reason": "stop", "stop_sequence": self._matched}
        if choice["delta"] or ended:
            yield from self._builder.feed({**chunk, "choices": [choice]})

    def finish(self) -> Iterator[Event]:
        yield from self._builder.finish()

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
