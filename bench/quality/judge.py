"""Compute the figures: compare the prompts of an engine with the original conversation.

Figures are computed for the same requests with every engine, because compaction has a different effect at each turn.
They are at most ``SAMPLES`` requests of a conversation, evenly spaced, whose original messages exceed the window.
Shares are over all conversations together. A share is ``None`` if nothing was counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter as Multiset
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from itertools import accumulate, pairwise, takewhile

from bench.quality.conversations import Conversation, Message, Outcome
from bench.table import Share
from proxy.compaction import keeps
from proxy.compaction.named_files import parsed
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.units import arguments_of, calls_of, text_of
from tests.kit.upstream import faults

SAMPLES = 12

# The reference to the archive in the summary message and in the notes of shortened messages.
_ARCHIVED_AS = re.compile(r"\bin the archive as ([0-9a-f]{20})\b")
_LISTING = re.compile(r"^( *)- (?:in (\S*/):|(\S*)/(?: \((?:read|written)\))?: (.+))$", re.MULTILINE)


@dataclass
class Figures:
    """The figures of an engine on a kind of conversation. ``Judge.add`` adds one conversation.

    All but the last three are shares from 0 to 1. A dropped message is one that isn't in the prompt unchanged.
    """

    over: Share = field(default_factory=Share)
    """Prompts larger than the window, of all requests whose original messages exceed it."""
    invalid: Share = field(default_factory=Share)
    """Prompts that OpenAI would reject for their structure. Prompts with only system messages don't count."""
    facts: Share = field(default_factory=Share)
    """Facts of dropped messages that are in the prompt nevertheless."""
    archive: Share = field(default_factory=Share)
    """Facts of dropped messages that are in the prompt, or in the archive under an id in the prompt."""
    paths: Share = field(default_factory=Share)
    """Files named by dropped calls whose path is in the prompt."""
    users: Share = field(default_factory=Share)
    """User messages that are in the prompt word for word."""
    users_in_budget: Share = field(default_factory=Share)
    """Like ``users``, of the first and newest user messages that fit the tokens that the default policy reserves."""
    stays: Share = field(default_factory=Share)
    """Tokens of a prompt that are in the same place in the next one, over all requests."""
    tokens: Share = field(default_factory=Share)
    """Tokens of a prompt, over all requests whose original messages exceed the window."""
    summaries: Share = field(default_factory=Share)
    """Requests for a summary, per conversation."""
    read: Share = field(default_factory=Share)
    """Tokens of the requests for a summary, per conversation."""

    def values(self) -> dict[str, float | None]:
        return {part.name: getattr(self, part.name).value for part in fields(self)}


class Judge:
    """Compute figures. Caches the sizes of messages."""

    def __init__(self, counter: ChatCounter) -> None:
        self._counter = counter
        self._sizes: dict[str, int] = {}

    def add(self, figures: Figures, conversation: Conversation, outcome: Outcome, window: int, users: int) -> None:
        """Add an outcome to the figures. ``users`` are the tokens reserved for user messages."""
        messages = [_Read(message) for message in conversation.messages]
        sent = [_Read(message) for message in outcome.messages]
        ends = conversation.requests()
        sizes = [0, *accumulate(self._size(message) for message in messages)]
        large = [number for number, end in enumerate(ends) if sizes[end] > window]
        prompts = [[sent[i] for i in prompt] for prompt in outcome.prompts]
        lengths = [sum(self._size(message) for message in prompt) for prompt in prompts]
        figures.over.add(sum(lengths[number] > window for number in large), len(large))
        figures.tokens.add(sum(lengths[number] for number in large), len(large))
        figures.summaries.add(len(outcome.reads), 1)
        figures.read.add(sum(outcome.reads), 1)
        self._stays(figures.stays, sent, outcome.prompts)
        through_archive = _through_archive(outcome, conversation.facts)
        for number in _spread(large):
            before = messages[: ends[number]]
            reached = through_archive(outcome.prompts[number])
            if any(message.value.get("role") not in ("system", "developer") for message in prompts[number]):
                found = faults({"messages": [message.value for message in prompts[number]]})
                figures.invalid.add(bool(found), 1)
            _judge(figures, before, prompts[number], conversation.facts, self._in_budget(before, users), reached)

    def _size(self, read: _Read) -> int:
        if read.raw not in self._sizes:
            self._sizes[read.raw] = self._counter.message(read.value)
        return self._sizes[read.raw]

    def _in_budget(self, messages: Sequence[_Read], tokens: int) -> set[int]:
        """Return the first user message and the newest ones that fit ``tokens`` together."""
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        chosen: set[int] = set()
        for index in [*users[:1], *reversed(users[1:])]:
            tokens -= self._size(messages[index]) + keeps.USER_FRAME_TOKENS
            if tokens < 0:
                break
            chosen.add(index)
        return chosen

    def _stays(self, share: Share, sent: Sequence[_Read], prompts: Sequence[Sequence[int]]) -> None:
        for previous, current in pairwise(prompts):
            sizes = [self._size(sent[i]) for i in previous]
            same = _common(previous, current)
            part: float = sum(sizes[:same])
            if same < len(previous) and same < len(current):
                one, other = sent[previous[same]].raw, sent[current[same]].raw
                part += sizes[same] * _common(one, other) / len(one)
            share.add(part, sum(sizes))


class _Read:
    """A message and its text."""

    def __init__(self, message: Message) -> None:
        self.value = message
        self.raw = json.dumps(message, ensure_ascii=False)
        self.role = message.get("role")

    @cached_property
    def text(self) -> str:
        return "\n".join([text_of(self.value), *(arguments for _, arguments in arguments_of(self.value))])

    @cached_property
    def key(self) -> str:
        """A key that is equal for messages with the same content in different JSON."""
        calls = [(call.id, call.name) for call in calls_of(self.value)]
        arguments = [parsed(text) for _, text in arguments_of(self.value)]
        return repr((self.role, text_of(self.value), calls, arguments, self.value.get("tool_call_id")))


def named_ids(message: Message) -> set[str]:
    """Return the archive ids in a message."""
    return set(_ARCHIVED_AS.findall(_Read(message).text))


def _through_archive(outcome: Outcome, facts: Iterable[str]) -> Callable[[Sequence[int]], set[str] | None]:
    """Return a function for the facts in the archive under an id in a prompt; ``None`` without an archive."""
    archived = outcome.archived
    if archived is None:
        return lambda prompt: None

    @cache
    def ids(place: int) -> set[str]:
        return named_ids(outcome.messages[place])

    @cache
    def found(id_: str) -> set[str]:
        text = "\n".join(_Read(message).text for message in archived.get(id_, ()))
        return {fact for fact in facts if fact in text}

    return lambda prompt: set().union(*map(found, set().union(*map(ids, prompt))))


def _judge(
    figures: Figures,
    before: Sequence[_Read],
    prompt: Sequence[_Read],
    facts: dict[str, int],
    in_budget: set[int],
    reached: set[str] | None,
) -> None:
    """Add the figures of one prompt."""
    text = "\n".join(message.text for message in prompt)
    dropped = _missing(before, prompt)
    lost = [fact for fact, index in facts.items() if index in dropped]
    readable = {fact for fact in lost if fact in text}
    figures.facts.add(len(readable), len(lost))
    if reached is not None:
        figures.archive.add(len(readable | (reached & set(lost))), len(lost))
    paths = {path for i in dropped for path in _paths(before[i].value)}
    figures.paths.add(len(readable_paths(paths, text)), len(paths))
    users = {i: text_of(before[i].value) in text for i in range(len(before)) if before[i].role == "user"}
    figures.users.add(sum(users.values()), len(users))
    figures.users_in_budget.add(sum(users[i] for i in in_budget), len(in_budget))


def _missing(before: Sequence[_Read], prompt: Sequence[_Read]) -> set[int]:
    """Return the dropped messages. Of equal ones, the newest count as present."""
    there = Multiset(message.key for message in prompt)
    missing = set()
    for index in range(len(before) - 1, -1, -1):
        key = before[index].key
        if there[key]:
            there[key] -= 1
        else:
            missing.add(index)
    return missing


def _paths(message: Message) -> Iterable[str]:
    """Yield the files named by a message's calls."""
    for _, text in arguments_of(message):
        arguments = parsed(text)
        if isinstance(arguments, dict) and isinstance(arguments.get("path"), str):
            yield arguments["path"]


def readable_paths(paths: Iterable[str], text: str) -> set[str]:
    """Return the paths in the text, either unchanged or as in a line ``- folder/ (read): a.py: name name; b.py``.

    Below a line ``- in root/:``, such lines are indented. A relative path may be listed as a longer one.
    """
    listed = set()
    root = ""
    for indented, top, folder, names in _LISTING.findall(text):
        root = top or (root if indented else "")
        listed |= {f"{root}{folder}/{name.rstrip(':;')}".replace("/./", "/") for name in names.split(" ")}
    return {path for path in paths if path in text or any(f"/{one}".endswith(f"/{path}") for one in listed)}


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _spread(numbers: Sequence[int]) -> list[int]:
    """Return at most ``SAMPLES`` numbers, including the last one."""
    if len(numbers) <= SAMPLES:
        return list(numbers)
    return [numbers[round(i * (len(numbers) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
