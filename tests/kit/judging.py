"""Properties of every request that the engine sends, for any input."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from proxy.compaction.rules import Envelope, Rules, section_limits
from proxy.compaction.settings import lowest_level
from proxy.compaction.stages import MediaRules
from proxy.compaction.summary_message import TAG
from proxy.compaction.turn import Turn, attributed, group_starts, head_length
from proxy.dialects.chat.alternation import NOTE, NOTED, OPENING
from proxy.dialects.chat.units import text_of
from proxy.dialects.identity import meaning
from proxy.dialects.parts import CHAT
from proxy.dialects.repair import repaired
from proxy.dialects.request import without_lone_surrogates
from proxy.pipeline.budget import rules_for
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import Outcome
from tests.kit.engine import COUNTER, Engine, Request, sent
from tests.kit.upstream import faults as chat_faults

MARK = "The compaction proxy left out"
HANDLE = re.compile(r"in the archive as ([0-9a-f]{20})\.")

_ORDER = ("must be followed by tool messages", "must be a response to a preceeding message")
_STAND_IN = {"role": "user", "content": "."}
_SMALLEST = 120


@dataclass(frozen=True)
class Judged:
    """The sent request, and the origin of its messages.

    ``given`` has the client's messages after repair. ``kept`` has the index in ``given`` of each message after the
    summary. It's empty under strict alternation, which joins messages.
    """

    given: list[Turn]
    out: list[bytes]
    head: int
    summary: bytes | None
    kept: list[int]
    tokens: int

    @property
    def changed(self) -> list[tuple[bytes, Turn]]:
        start = len(self.out) - len(self.kept)
        pairs = [(raw, self.given[index]) for raw, index in zip(self.out[start:], self.kept, strict=True)]
        return [(raw, turn) for raw, turn in pairs if raw != turn.raw]


async def judge(request: Request, outcome: Outcome, remembered: FactsCache, *, clean: bool) -> Judged:
    """Raises ``AssertionError``, whose message says what does not hold."""
    assert outcome.verdict in ("none", "compacted"), outcome.verdict
    came = await remembered.turns(request.messages, COUNTER)
    fixed = COUNTER.overhead({})
    before = fixed + sum(turn.facts.tokens for turn in came)
    head = head_length(came)
    if outcome.messages is None:
        assert request.body.rewritten(units=None) == request.body.raw
        return Judged(came, request.messages, head, None, [*range(head, len(came))], before)
    rules = rules_for(request.setting.policy, window_known=True)
    given = repaired(came, COUNTER.format)
    if clean:
        assert [turn.raw for turn in given] == [turn.raw for turn in came], "a sound conversation was repaired"
    head = head_length(given)  # a message before it may have been dropped
    out = sent(request, outcome)
    left = await remembered.turns(out, COUNTER)
    tokens = fixed + sum(turn.facts.tokens for turn in left)
    assert tokens <= before, f"{tokens} tokens left, {before} came"
    assert outcome.before == before
    if not request.setting.strict:
        assert outcome.after == tokens, "the size that is reported is not the size that left"
    _other_fields(request, outcome.messages)
    _sound(given, out, clean=clean)
    pinned = rules.pins.among(given[head:], COUNTER.format)
    summary = _head_and_summary(request, outcome, rules, given[:head], out)
    _last_words_of_the_user(request, outcome, rules, given, out, fixed)
    kept: list[int] = []
    if not request.setting.strict:
        kept = _aligned(given, out[head + (summary is not None) :], head, pinned, whole=summary is None)
        missing = [i for i in pinned if head + i not in kept]
        assert not missing, f"pinned messages are missing: {missing}"
        for raw, index in zip(out[len(out) - len(kept) :], kept, strict=True):
            assert index - head not in pinned or raw == given[index].raw, "a pinned message was changed"
    _fits(request, rules, given, fixed, tokens - _put_in(request, out), pinned)
    return Judged(given, out, head, summary, kept, tokens)


def _other_fields(request: Request, messages: Sequence[bytes]) -> None:
    fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
    came = fields.decode(request.body.strict or request.body.raw)
    left = fields.decode(without_lone_surrogates(request.body.rewritten(units=messages)))
    assert [*came] == [*left]
    assert all(bytes(came[key]) == bytes(left[key]) for key in came if key != "messages"), "another field was changed"


def _sound(given: Sequence[Turn], out: Sequence[bytes], *, clean: bool) -> None:
    messages = [json.loads(raw) for raw in out]
    found = chat_faults({"messages": messages})
    if found and not clean:
        # The upstream judges messages that the proxy can't read, and calls at the end may get results later.
        as_given = {turn.raw for turn in given}
        messages = [
            _STAND_IN if raw in as_given and _unreadable(m) else m for raw, m in zip(out, messages, strict=True)
        ]
        last = messages[-1]
        if last.get("role") == "assistant" and last.get("tool_calls") and given[-1].facts.calls:
            messages[-1] = _STAND_IN
        found = chat_faults({"messages": messages})
    assert not found, f"what left is not sound: {[fault.message for fault in found]}"


def _unreadable(message: Any) -> bool:
    """Return whether a message is invalid in any position."""
    found = chat_faults({"messages": [message]})
    return any(not any(words in fault.message for words in _ORDER) for fault in found)


def _head_and_summary(
    request: Request, outcome: Outcome, rules: Rules, head: Sequence[Turn], out: Sequence[bytes]
) -> bytes | None:
    joined = request.setting.strict and rules.role in ("system", "developer")
    intact = head[:-1] if joined and "summary" in outcome.steps else head
    assert [turn.raw for turn in intact] == list(out[: len(intact)]), "the head was changed"
    if "summary" not in outcome.steps:
        return None
    raw = out[len(intact)]
    message = json.loads(raw)
    content = text_of(message)
    if not request.setting.strict:
        assert message == {"role": rules.role, "content": content}
        assert content.startswith(f"<{TAG}>\n")
        assert content.endswith(f"\n</{TAG}>")
        assert content.count(f"<{TAG}>") == 1, "a tag is forged"
    elif joined and head:
        assert content.startswith(text_of(json.loads(head[-1].raw))), "the head was changed"
    assert f"<{TAG}>\n" in content
    return raw


def _last_words_of_the_user(
    request: Request, outcome: Outcome, rules: Rules, given: Sequence[Turn], out: Sequence[bytes], fixed: int
) -> None:
    users = [turn for turn in attributed(list(given)) if turn.facts.role == "user"]
    if not users or users[-1].facts.rare.foreign:
        return
    last = users[-1]
    head = head_length(given)
    overhead = fixed + sum(turn.facts.tokens for turn in given[:head])
    envelope = Envelope(request.budget, overhead, head).rounded(lowest_level(rules.trigger, request.budget))
    if last.facts.tokens > section_limits(rules, envelope).newest or (
        rules.shorten_last_user_message and "fit" in outcome.steps
    ):
        return
    if request.setting.strict:
        words = text_of(json.loads(last.raw))
        texts = [text_of(m) for m in map(json.loads, out) if isinstance(m, dict) and m.get("role") == "user"]
        assert any(words in text for text in texts), "the user's last message is missing"
    else:
        assert last.raw in out, "the user's last message is missing, or changed"


def _aligned(
    given: Sequence[Turn], out: Sequence[bytes], head: int, pinned: frozenset[int], *, whole: bool
) -> list[int]:
    """Return the index of each message in the given ones: at the end all of them, before that the retained ones."""
    places: list[int] = []
    at = len(given)
    left = list(out)
    while left and at > head and _is_form_of(left[-1], given[at - 1]):
        at -= 1
        places.append(at)
        left.pop()
    if whole:
        assert at == head, "messages are missing, and nothing stands for them"
    starts = [*group_starts(given[head:]), len(given) - head]
    groups = [range(start, end) for start, end in pairwise(starts)]
    held = {head + i for group in groups if not pinned.isdisjoint(group) for i in group}
    users = [i for i in range(head, at) if given[i].facts.role == "user"]
    while left:
        at -= 1
        assert at >= head, (
            f"what left is no message of the kept part, nor one that may stand before it: {left[-1][:300]!r}"
        )
        stands = given[at].facts.kind == "system" or at in held or at in users
        if stands and _is_form_of(left[-1], given[at]):
            places.append(at)
            left.pop()
    return places[::-1]


def _is_form_of(raw: bytes, turn: Turn) -> bool:
    """Whether a message is one of the client's, with its bytes or shortened with a mark."""
    if raw == turn.raw:
        return True
    if len(raw) >= len(turn.raw) or MARK.encode() not in raw:
        return False
    short, long = json.loads(raw), json.loads(turn.raw)
    if not isinstance(long, dict) or [*short] != [*long]:
        return False
    changed = [key for key in long if short[key] != long[key]]
    return all(_shorter(key, short[key], long[key]) for key in changed)


def _shorter(key: str, short: Any, long: Any) -> bool:
    if key == "content":
        return type(short) is type(long)
    if key == "tool_calls":
        return len(short) == len(long) and all(map(_same_call, short, long))
    return key == "function_call" and bool(short["name"] == long["name"])


def _same_call(short: Any, long: Any) -> bool:
    if {**short, "function": None} != {**long, "function": None}:
        return False
    one, other = short["function"], long["function"]
    if one["name"] != other["name"]:
        return False
    short_arguments, long_arguments = str(one["arguments"]), str(other["arguments"])
    if short_arguments == long_arguments:
        return True
    return bool(_shape(json.loads(short_arguments)) == _shape(json.loads(long_arguments)))


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shape(item) for item in value]
    return str if isinstance(value, str) else value


def _put_in(request: Request, out: Sequence[bytes]) -> int:
    """Tokens that strict alternation put in, after everything had been made to fit."""
    if not request.setting.strict:
        return 0
    messages = [message for message in map(json.loads, out) if isinstance(message, dict)]
    said = sum(COUNTER.message(m) for m in messages if m.get("content") in (OPENING, NOTED))
    return said + sum(COUNTER.text(NOTE) * text_of(m).count(NOTE) for m in messages if m.get("role") == "user")


def _fits(
    request: Request, rules: Rules, given: Sequence[Turn], fixed: int, tokens: int, pinned: frozenset[int]
) -> None:
    """If the fixed part takes at most half of the budget (a quarter in tiny windows), the request must fit.

    The fixed part is the head, later system messages, groups with a pin, and the user's last message. It also has
    images that the policy retains, and the minimum of the newest exchange's results and calls.
    """
    head = head_length(given)
    starts = [*group_starts(given[head:]), len(given) - head]
    users = [i for i, turn in enumerate(given) if turn.facts.role == "user"]
    own = [i for i in users if not given[i].facts.rare.foreign]
    last = {*users[-1:], *own[-1:]}
    firm = fixed
    for index, turn in enumerate(given):
        picture = turn.facts.media and rules.stage(MediaRules) is None
        if turn.facts.kind == "system" or index in last or picture:
            firm += turn.facts.tokens
    for start, end in pairwise(starts):
        if not pinned.isdisjoint(range(start, end)):
            firm += sum(turn.facts.tokens for turn in given[head + start : head + end])
        elif end == starts[-1]:
            firm += sum(min(turn.facts.tokens, _SMALLEST) for turn in given[head + start : head + end])
    # The wording of the summary message alone takes a sixth of the smallest budget.
    share = 2 if request.budget > 2_000 else 4
    if firm <= request.budget // share:
        assert tokens <= request.budget, f"{tokens} tokens left for a budget of {request.budget}; {firm} are fixed"


async def in_archive(engine: Engine, asked: Request, judged: Judged) -> tuple[int, int]:
    """Check that the archive has everything that was removed. Return the numbers of dropped and shortened messages."""
    assert await engine.archive.writes.drained()
    if asked.setting.policy.archive is None:
        assert not any(HANDLE.search(raw.decode()) for raw in judged.out if raw not in asked.messages)
        return 0, 0
    if asked.setting.strict:
        return 0, 0  # which message is which is told by the other policies
    dropped = 0
    if judged.summary is not None:
        handle = HANDLE.search(json.loads(judged.summary)["content"])
        assert handle is not None, "the summary message does not say where the rest is kept"
        found = await engine.archive.fetch(asked.tenant, handle[1])
        assert found is not None, "the archive does not have what was summarised"
        assert found.complete, "the archive lost the beginning"
        values = [json.loads(raw) for raw in found.messages]
        body = [json.loads(turn.raw) for turn in judged.given[judged.head :]]
        assert values == body[: len(values)], "the archive has other messages than those that were taken out"
        gone = {*range(judged.head, len(judged.given))} - {*judged.kept}
        assert all(index - judged.head < len(values) for index in gone), "a message is neither sent nor kept"
        assert await engine.archive.fetch("somebody else", handle[1]) is None, "another tenant can read it"
        dropped = len(gone)
    for raw, turn in judged.changed:
        assert turn.facts.id in HANDLE.findall(raw.decode()), "a shortened message does not say where the whole is"
        found = await engine.archive.fetch(asked.tenant, turn.facts.id)
        assert found is not None, "the archive does not have the whole of a shortened message"
        # A message of the same meaning has the same place. Only the ids of its calls may differ.
        assert [meaning(json.loads(whole), CHAT) for whole in found.messages] == [meaning(json.loads(turn.raw), CHAT)]
    return dropped, len(judged.changed)
