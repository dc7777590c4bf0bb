"""One request's compaction: its input, its plan, and its outcome."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from proxy.access.spending import Allowance
from proxy.compaction import keeps
from proxy.compaction.fit import fit, label_oldest
from proxy.compaction.named_files import argument_text, project_folders
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.pressure import COMMA, SEPARATOR
from proxy.compaction.render import RenderedConversation, before_cut, render
from proxy.compaction.rules import Envelope, Rules
from proxy.compaction.settings import lowest_level, part, share_of
from proxy.compaction.summary_message import Counts, SummaryMessage, retention, texts_of, with_index
from proxy.compaction.turn import (
    PROGRAM,
    Facts,
    Forms,
    OutgoingMessage,
    Turn,
    attributed,
    digests_in_order,
    faults,
    head_length,
)
from proxy.config import Policy
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request, value_of
from proxy.dialects.units import ByDigest
from proxy.overflow import MediaLimit
from proxy.summary.store import Checkpoint, Origin, StoredSummary
from proxy.summary.writer import SummaryWriter
from proxy.telemetry.record import Reason

Verdict = Literal["none", "compacted", "shadow", "off", "failed"]


ASKS_JSON = "The client asks for answers in JSON."


class Forecast(msgspec.Struct, frozen=True):
    """The result that ``enforce`` would have."""

    after: int  # tokens of the request
    steps: tuple[str, ...]
    summarized: int = 0  # tokens that the newest checkpoint's summary replaces
    written: int = 0  # tokens of that summary


class PromptDigests(msgspec.Struct, eq=False, frozen=True):
    """The digests of the messages to send, without reasoning, and the places of answers in the client's request."""

    digests: tuple[bytes, ...]
    answers: tuple[int, ...]


class Received(msgspec.Struct, frozen=True):
    """The size of a request as it came, in tokens."""

    tokens: int
    sizes: tuple[int, list[int]] | None = None  # those of tools and framing, and of each message, if counted
    estimated: bool | None = None  # whether images or audio make `tokens` an estimate, if known
    shared: int | None = None  # those that the conversation's last request already had, if known
    head: int = 0  # those of the system messages at the start
    told: int = 0  # those of instructions outside the messages


class SummaryUse(msgspec.Struct, frozen=True):
    """The summary in a prompt."""

    origin: Origin | None = None  # `None` if it wasn't worth it
    cause: str | None = None  # the reason for a digest
    replaced: str | None = None  # the reason for the digest before
    breaker_open: bool = False  # the circuit breaker kept the proxy from calling a summary model
    waited: float = 0.0  # milliseconds that the request waited for the summary


NO_SUMMARY = SummaryUse()


class Outcome(msgspec.Struct, eq=False, frozen=True):
    """The result of a request's compaction: the messages to send, and figures to report."""

    verdict: Verdict
    messages: list[bytes] | None = None  # `None`: unchanged
    received: Received | None = None  # `None` if only bytes decided
    after: int | None = None  # tokens to send, if known
    steps: tuple[str, ...] = ()
    summary: SummaryUse = NO_SUMMARY
    parts: Mapping[str, int] = msgspec.field(default_factory=dict)  # the sizes of what is sent, if compacted
    forecast: Forecast | None = None  # in shadow mode
    prompt: PromptDigests | None = None  # if it matters for reasoning that is bound to the messages to send
    checkpoints: int = 0  # the number that the conversation has passed
    reason: Reason | None = None  # the condition that made the proxy compact
    replacement: int = 0  # tokens of the summary message
    archive: tuple[str, ...] = ()  # the ids under which the archive keeps the removed messages
    retention: Mapping[str, Counts] = msgspec.field(default_factory=dict)  # counts the names in the removed messages
    state: int = 0  # tokens of what was put into effect before the summary's end
    unloaded: tuple[str, ...] = ()  # the tools for which there was no room

    @property
    def before(self) -> int | None:
        """Return the tokens of the request as it came; ``None`` if the proxy didn't count them."""
        return None if self.received is None else self.received.tokens


@dataclass(frozen=True, slots=True)
class Explanation:
    """The effect of compaction on a request, in tokens and messages. The first ``head`` messages never change."""

    before: int
    after: int
    messages: int
    head: int
    budget: int | None
    steps: tuple[str, ...]
    plan: Plan
    parts: Mapping[str, int]


PROMPT_VERSION = "15"
"""A part of every summary's key. Raise it when ``keeps``, a prompt's wording, or the summary message changes."""

PROMPT_DIGEST = "15:824d92ee3dca51e4"  # the version, and the digest of its numbers and forms, which a test compares


class CompactionInput(msgspec.Struct, eq=False):
    """A request, and the settings and limits for its compaction."""

    body: Request
    counter: Counter
    policy: Policy
    mode: Literal["enforce", "shadow", "off"]
    budget: int | None  # tokens
    tenant: str
    upstream: str
    rules: Rules
    writers: Sequence[SummaryWriter] = ()  # the ways to have a summary written, in the order to try them
    strict: bool = False  # the upstream requires user and assistant messages to alternate
    stores_summaries: bool = True  # the proxy may store summaries for the caller
    allowance: Allowance | None = None  # limits the tokens of the caller's summaries
    stale_reasoning: int = 0  # the first units whose bound reasoning is removed, because an upstream refused it
    keeps_reasoning: bool = False  # no bound reasoning is removed, because the upstream demands it
    request: str = ""  # the request's id
    attempt: int = 0  # the number of attempts before this one
    largest_budget: int | None = None
    deadline: float = 0.0  # seconds that a summary may take if no request waits for it
    media: tuple[MediaLimit, ...] = ()  # the known limits on images and files


FormKey = tuple[str, object]  # the key of a cached form: its name, and everything that it depends on
PROMPTS = 1_000  # system prompts whose folders are remembered, by their digests

_folders = ByDigest(lambda raw: tuple(project_folders([argument_text(value_of(raw))])), PROMPTS)


@dataclass(slots=True)
class CompactionJob:
    """A request during its compaction."""

    case: CompactionInput
    turns: list[Turn]
    head: int
    fixed: int  # tokens of tools and framing
    before: int
    plan: Plan
    prompt: Sequence[bytes] = ()  # the JSON of the system prompt if it's outside the messages
    _checkpoints: dict[tuple[int, ...], list[Checkpoint]] = field(default_factory=dict)

    @property
    def body(self) -> list[Turn]:
        return self.turns[self.head :]

    @property
    def workload(self) -> tuple[str, int]:
        """Return the tenant and the bytes of the request, for the counting thread."""
        return self.case.tenant, len(self.case.body.raw)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the folders that the system prompt states as the project's. They decide which files have its rules."""
        stated = _folders.of([*(bytes(turn.raw) for turn in self.turns[: self.head]), *map(bytes, self.prompt)])
        return tuple(folder for folders in stated for folder in folders)

    def render(self, summary: OutgoingMessage | None) -> RenderedConversation:
        format = self.case.counter.format
        if summary is not None and b'"json_object"' in self.case.body.raw:
            # Providers refuse this response format if no message contains the word.
            raw = format.with_text(summary.raw, f"{format.replaceable_text(summary.raw)}\n{ASKS_JSON}")
            summary = msgspec.structs.replace(summary, raw=raw, tokens=format.tokens(raw))
        rendered = render(self.turns, self.head, self.plan, self.case.rules, summary, format)
        budget, most = self.case.budget, self.case.rules.bounds.bytes
        free = (budget or 0) // keeps.STRICT_DIVISOR if self.case.strict else 0
        room = None if budget is None else budget - self.fixed - free
        byte_room = None if most is None else most - around_messages(self.case.body)
        rendered = fit(rendered, room, self.case.rules, format, byte_room)
        for limit in self.case.media:
            rendered = label_oldest(rendered, limit.kinds, limit.most, self.case.rules, format)
        return rendered

    def summary_piece(self, entry: StoredSummary) -> OutgoingMessage:
        """Return the summary of the last checkpoint as a message, with its index.

        The index omits the names in the messages that were kept when the checkpoint was made. The result is cached in
        the facts of the last one.
        """
        _, (forms, key) = self._forms(entry)
        form = forms.get(key)
        if form is None:
            format, position = self.case.counter.format, self.plan.cut
            raw = entry.message
            if entry.index_at:
                places = (*before_cut(self.plan), *range(position, self.plan.seen[position]))
                # Later messages may replace kept ones, but don't change the index.
                kept = self.case.rules.shortest(self.body[: self.plan.seen[position]], places, format)
                message = SummaryMessage(raw, entry.index_at)
                raw = with_index(message, entry.names, kept, self.plan.limits_at(position), format)
            form = forms[key] = Turn(raw, Facts("", "", format.tokens(raw), b""))
        return OutgoingMessage(form.raw, form.facts.tokens, None)

    def retention(self, entry: StoredSummary | None, rendered: RenderedConversation) -> dict[str, Counts]:
        """Return how many of the likeliest names in the removed messages the prompt has, by kind.

        The counts are those of the first prompt after a checkpoint or another change of the plan. They're cached in the
        facts of a message before that prompt's end.
        """
        forms, key = self._forms(entry)[0]
        form = forms.get(key)
        if form is None:
            changed = [(p.raw, p.turn.facts) for p in rendered.pieces if p.turn and p.changed]
            removed = [*([entry.names] if entry else []), *(facts.names for _, facts in changed)]
            format, texts = self.case.counter.format, list[str]()
            for p in rendered.pieces:
                texts += [format.text(p.raw)] if p.turn is None else texts_of(Turn(p.raw, p.turn.facts), format)
            counts = retention(removed, texts, archived=self.case.rules.archive)
            form = forms[key] = Turn(msgspec.json.encode(counts), Facts("", "", 0, b""))
        return msgspec.json.decode(form.raw, type=dict[str, Counts])

    def has_cached(self, entry: StoredSummary | None) -> bool:
        """Return whether a summary's message and the counts of names are cached. Making them takes milliseconds."""
        return all(key in forms for forms, key in self._forms(entry))

    def _forms(self, entry: StoredSummary | None) -> list[tuple[Forms, FormKey]]:
        """Return where the counts of names are cached and, with a summary, its message.

        Each is in the forms of the last message that it depends on. The key has all of them, which branches may share.
        """
        plan, cut, message = self.plan, self.plan.cut, None if entry is None else entry.message
        seen = [frontier.seen for frontier in plan.frontiers.values()] + [index + 1 for index in plan.clips]
        last = max([*seen, plan.seen[cut]] if cut else seen, default=len(self.body))
        changes = (tuple(plan.frontiers.items()), tuple(plan.clips.items()))
        places: list[tuple[str, int, object]] = [("retention", last, changes)]
        if entry is not None:
            places.append(("index", plan.seen[cut], plan.limits_at(cut).index))
        forms: list[tuple[Forms, FormKey]] = []
        for name, end, more in places:
            digests = b"".join([turn.facts.digest for turn in self.body[:end]])
            key = (name, (hashlib.sha256(digests).digest(), message, more))
            forms.append((self.body[end - 1].facts.forms, key))
        return forms

    def gains(self, rendered: RenderedConversation) -> bool:
        """Return whether these messages make the request smaller, in tokens or in an exceeded bound."""
        fewer_media = over_media(self.case, self.turns) and any(piece.changed for piece in rendered.pieces)
        if fewer_media or rendered.tokens + self.fixed < self.before:
            return True
        bounds, came = self.case.rules.bounds, self.case.body
        crowded = bounds.reached(len(came.units), 0) and len(rendered.pieces) < len(came.units)
        heavy = bounds.reached(0, len(came.raw)) and rendered.bytes + around_messages(came) < len(came.raw)
        return crowded or heavy

    def checkpoints(self, positions: Sequence[int]) -> list[Checkpoint]:
        """Return the keys of positions. Each is a digest of the summary's settings and all messages before it."""
        known = self._checkpoints.get(tuple(positions))
        if known is not None:
            return known
        case, limits = self.case, self.plan.limits
        shape = (case.tenant, case.policy.fingerprint, case.upstream, case.body.model, PROMPT_VERSION)
        sizes = (limits.summary, limits.users, limits.newest, limits.system, limits.words, limits.index, limits.plan)
        chain = hashlib.sha256(repr((shape, sizes, self.folders)).encode())
        content = hashlib.sha256(b"body")
        keys = []
        start = 0
        body = self.body
        for position in positions:
            digests = b"".join(digests_in_order(body[start:position]))
            chain.update(digests)
            content.update(digests)
            notes = [turn.facts.digest for turn in body[start:position] if turn.facts.role == PROGRAM]
            if notes:
                chain.update(b"".join([b"notes", *notes]))
            start = position
            # The summary message doesn't quote the carried messages.
            place = chain.copy()
            place.update(repr(self.plan.current_user_message.get(position)).encode())
            keys.append(Checkpoint(position, place.hexdigest(), content.hexdigest()))
        self._checkpoints[tuple(positions)] = keys
        return keys

    def quoted(self, position: int) -> list[Turn]:
        """Return the turns before a checkpoint, without those that are sent unchanged."""
        apart = {*self.plan.pinned, *self.plan.current_user_message.get(position, ())}
        return [turn for index, turn in enumerate(self.body[:position]) if index not in apart]

    def archived(self, position: int) -> str | None:
        """Return the archive id of the messages before a checkpoint, or ``None`` without an archive."""
        if not self.case.rules.archive:
            return None
        return archive_id(self.checkpoints([position])[0])


def planned(case: CompactionInput, turns: list[Turn], fixed: int, before: int, repair: bool) -> CompactionJob:
    """Plan the compaction of a request, and compute the keys of its checkpoints."""
    if repair:
        # The proxy repairs a body only if it rewrites the body anyway. The upstream judges all others.
        turns = case.counter.format.repaired(turns)
    turns = attributed(turns)
    head = head_length(turns)
    overhead = fixed + sum(turn.facts.tokens for turn in turns[:head])
    around = around_messages(case.body, SEPARATOR) + sum(len(turn.raw) + SEPARATOR for turn in turns[:head])
    envelope = Envelope(case.budget, overhead, head, around)
    plan = make_plan(turns[head:], case.rules, envelope, case.counter.format)
    stale = case.stale_reasoning - head
    plan = dataclasses.replace(plan, stale_reasoning=0 if case.keeps_reasoning else max(plan.stale_reasoning, stale))
    job = CompactionJob(case, turns, head, fixed, before, plan, list(filter(None, case.body.instructions().overhead)))
    for positions in (plan.checkpoints, (*plan.checkpoints, *([plan.upcoming] if plan.upcoming else []))):
        if positions:
            job.checkpoints(positions)
    return job


def tokens_at_most(case: CompactionInput) -> float:
    """Return an upper bound on the tokens of a request, without tokenizing."""
    return case.counter.at_most(case.body.raw) + case.body.hidden * case.counter.profile.token_ratio


def any_trigger(case: CompactionInput, tokens: int, turns: Sequence[Turn]) -> Reason | None:
    """Return the condition of the policy, a stage, or the upstream that a request meets; ``None`` if it meets none."""
    return reason_for(case, tokens, len(turns)) or over_media(case, turns)


def over_media(case: CompactionInput, turns: Sequence[Turn]) -> Reason | None:
    """Return the limit on images and files that a request exceeds."""
    kinds = [kind for turn in turns for kind in turn.facts.media] if case.media else []
    counts = ((limit.most, limit.count(kinds)) for limit in case.media)
    return next((Reason("media", most, count) for most, count in counts if count > most), None)


def needs_repair(case: CompactionInput, turns: Sequence[Turn]) -> bool:
    repairs = case.policy.repair and not case.rules.rows
    return repairs and case.counter.format.needs_repair([turn.facts for turn in turns])


def around_messages(body: Request, separator: int = COMMA) -> int:
    """Return the bytes of a body outside its messages. ``separator`` is the bytes between two messages."""
    return max(0, len(body.raw) - sum(map(len, body.units)) - separator * len(body.units))


def fixed_tokens(turns: Sequence[Turn], fixed: int) -> int:
    """Return the tokens that compaction can't reduce: those of the head, tools, and framing."""
    return fixed + sum(turn.facts.tokens for turn in turns[: head_length(turns)])


def archive_id(checkpoint: Checkpoint) -> str:
    """Return the archive id of the messages before a checkpoint."""
    return checkpoint.content[:20]


def parts_of(turns: Sequence[Turn], fixed: int) -> dict[str, int]:
    """Return the sizes, in tokens, of the parts of a request that its author can change."""
    head = head_length(turns)
    system = sum(turn.facts.tokens for turn in turns[:head])
    users = [turn.facts.tokens for turn in turns if turn.facts.kind == "user"]
    largest = max((turn.facts.tokens for turn in turns[head:]), default=0)
    return {
        "system messages": system,
        "tools and framing": fixed,
        "last user message": users[-1] if users else 0,
        "largest message": largest,
    }


def last_prompt(
    job: CompactionJob, body: Request, previous: StoredSummary | None, start: int, position: int
) -> Sequence[OutgoingMessage] | None:
    """Return the messages of the conversation's last prompt, up to a checkpoint. ``body`` is that of the request.

    That prompt had all messages before the newest answer. Return ``None`` if it had another summary than ``previous``,
    which ends at ``start``, or if the cut leaves a call without its result.
    """
    end = job.head + position
    newest = max((index for index, turn in enumerate(job.turns) if turn.facts.kind == "assistant"), default=0)
    turns = job.turns[:newest]
    size = job.fixed + sum(turn.facts.tokens for turn in turns)
    pieces = [OutgoingMessage(turn.raw, turn.facts.tokens, turn) for turn in turns]
    case = msgspec.structs.replace(job.case, body=body)
    if any_trigger(case, size, turns):
        prior = planned(case, turns, job.fixed, size, needs_repair(case, turns))
        cut, summary = prior.plan.cut, None
        if cut:
            if previous is None or cut != start:
                return None
            summary = prior.summary_piece(previous)
        rendered = prior.render(summary)
        if prior.gains(rendered):
            pieces = rendered.pieces
    places = {id(turn): index for index, turn in enumerate(job.turns)}
    if any(piece.turn is not None and id(piece.turn) not in places for piece in pieces):
        return None  # this prompt was repaired, and the next one isn't
    kept = [piece for piece in pieces if piece.turn is None or places[id(piece.turn)] < end]
    kept += [OutgoingMessage(turn.raw, turn.facts.tokens, turn) for turn in job.turns[newest:end]]
    return None if faults([piece.turn.facts for piece in kept if piece.turn]) else kept


def whole_prompt(
    job: CompactionJob, previous: StoredSummary | None, start: int, position: int
) -> Sequence[OutgoingMessage] | None:
    """Return the previous summary, which ends at ``start``, and all messages from there to a checkpoint.

    Return ``None`` if the cut leaves a call without its result.
    """
    turns = [*job.turns[: job.head], *job.turns[job.head + start : job.head + position]]
    pieces = [OutgoingMessage(turn.raw, turn.facts.tokens, turn) for turn in turns]
    if previous is not None:
        raw = previous.message
        pieces.insert(job.head, OutgoingMessage(raw, job.case.counter.format.tokens(raw), None))
    return None if faults([turn.facts for turn in turns]) else pieces


def reason_for(case: CompactionInput, tokens: int, messages: int) -> Reason | None:
    """Return the condition that a request of this size meets; ``None`` if it meets none."""
    rules, budget = case.rules, case.budget
    for clause in rules.trigger:
        if clause.met(tokens, messages, budget):
            if clause.price_step:
                return Reason("price_step", clause.tokens, tokens)
            if clause.fraction is not None and budget is not None:
                return Reason("fraction", share_of(clause.fraction, budget), tokens, clause.fraction)
            if clause.tokens is not None:
                return Reason("tokens", clause.tokens, tokens)
            return Reason("messages", clause.messages, messages)
    bounds, size = rules.bounds, len(case.body.raw)
    if bounds.messages is not None and messages >= part(keeps.PRESSING, bounds.messages):
        return Reason("messages", bounds.messages, messages)
    if bounds.bytes is not None and size >= part(keeps.PRESSING, bounds.bytes):
        return Reason("bytes", bounds.bytes, size)
    for stage in rules.stages:
        if any(clause.met(tokens, messages, budget) for clause in stage.trigger):
            return Reason("stage", lowest_level(stage.trigger, budget), tokens)
    return None
