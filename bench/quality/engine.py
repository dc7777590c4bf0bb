"""Run the proxy's engine in this process: every request of a conversation, as in the server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from bench.quality.conversations import Conversation, Message, Outcome
from bench.quality.judge import named_ids
from bench.quality.summarizer import SUMMARIZERS, Summarizer
from proxy.compaction.rules import Envelope, SectionLimits, section_limits
from proxy.config import Policy
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.request import parse
from proxy.limits.budget import budget, reserved_output
from proxy.limits.profiles import Profile
from proxy.pipeline.budget import rules_for
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionInput
from proxy.store import open_store
from proxy.store.archive import Archive
from proxy.summary.forms import SummaryForm
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.quality import Written
from proxy.summary.single_flight import NothingToAsk, Summaries
from proxy.summary.writer import SummaryModels
from proxy.summary.writers import TranscriptWriter

MODEL = "bench"
TOKENIZER = "o200k_base"
POLICY = Policy.build("default", {})

MATERIAL = re.compile(
    r"(?:<previous_summary>\n(?P<previous>.*?)\n</previous_summary>.*?)?<transcript>\n(?P<transcript>.*)\n</transcript>",
    re.DOTALL,
)


def profile(window: int) -> Profile:
    """Return a model with this window. Its output is at most a quarter of it."""
    return Profile(MODEL, window, window, window // 4, tokenizer=TOKENIZER)


def input_budget(window: int) -> int:
    """Return the input tokens of a request in this window that doesn't name an output."""
    known = profile(window)
    found = budget(known, reserved_output(known, None, None), None)
    if found is None:
        raise ValueError(f"no budget for a window of {window}")
    return found


def shares(window: int) -> SectionLimits:
    """Return the limits of the parts of a summary message in this window."""
    return section_limits(rules_for(POLICY, window_known=True), Envelope(input_budget(window), 0, 1).rounded())


Adapt = Callable[[CompactionInput], CompactionInput]


class _Model:
    """A summary model that calls a function. Records the tokens that it read."""

    def __init__(self, counter: ChatCounter, window: int, summarizer: Summarizer, reads: list[int]) -> None:
        known = profile(window)
        output = output_limit(MODEL, shares(window).summary, known.max_output_tokens)
        self.name = MODEL
        self.input_limit = budget(known, reserved_output(known, output, None), None)
        self.count = counter.text
        self._counter = counter
        self._summarizer = summarizer
        self._reads = reads

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """See ``UpstreamSummaryModel``."""
        self._reads.append(sum(self._counter.message(message) for message in messages))
        found = MATERIAL.search(messages[-1]["content"])
        if found is None:
            raise ValueError("the request for a summary has no transcript")
        material = "\n\n".join(filter(None, (found["previous"], found["transcript"])))
        return Written(self._summarizer(material, max_tokens, self.count), "stop")


class _Models(SummaryModels):
    """These models, in this order."""

    def __init__(self, *models: _Model) -> None:
        self._models = models

    async def for_transcript(self, max_tokens: int, form: SummaryForm | None = None) -> Sequence[UpstreamSummaryModel]:
        """See ``SummaryModels``."""
        return cast("Sequence[UpstreamSummaryModel]", self._models)


def _case(raws: Sequence[bytes], window: int, counter: ChatCounter, tenant: str, models: _Models) -> CompactionInput:
    """Return a request with these messages."""
    return CompactionInput(
        body=parse(b'{"model":"' + MODEL.encode() + b'","messages":[' + b",".join(raws) + b"]}"),
        counter=counter,
        policy=POLICY,
        mode="enforce",
        budget=input_budget(window),
        tenant=tenant,
        upstream=MODEL,
        writers=(TranscriptWriter(models),),
        rules=rules_for(POLICY, window_known=True),
    )


async def _settled() -> None:
    """Wait for the summaries that are made in the background, and for the tasks that these start."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in (await asyncio.wait(others))[0]:
            # The renewal of a lease ends with a cancellation.
            if not task.cancelled() and not isinstance(task.exception(), NothingToAsk):
                task.result()


class Engine:
    """Replay conversations. The store is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._remembered = FactsCache()
        self._store = open_store(f"sqlite:///{folder / 'bench.db'}")
        self._archive = Archive(self._store)
        self._compactor = Compactor(self._remembered, Summaries(self._store), self._archive)
        self._counters: dict[int, ChatCounter] = {}

    async def replay(self, conversation: Conversation, window: int, summarizer: str) -> Outcome:
        """Return the prompts of the conversation's requests. Summaries in the background finish before the next one."""
        replayed = Outcome()
        counter = self._counter(window)
        model = _Model(counter, window, SUMMARIZERS[summarizer], replayed.reads)
        tenant = f"{conversation.name} {window} {summarizer}"
        raws = [msgspec.json.encode(message) for message in conversation.messages]
        models = _Models(model)
        places: dict[bytes, int] = {}
        for end in conversation.requests():
            outcome = await self._compactor.compact(_case(raws[:end], window, counter, tenant, models))
            prompt = raws[:end] if outcome.messages is None else outcome.messages
            replayed.prompts.append([places.setdefault(bytes(raw), len(places)) for raw in prompt])
            await _settled()
        replayed.messages = [msgspec.json.decode(raw) for raw in places]
        replayed.archived = await self._looked_up(replayed, tenant)
        return replayed

    async def last_prompt(
        self, conversation: Conversation, window: int, adapted: Adapt = lambda case: case
    ) -> list[Message]:
        """Return the prompt of the conversation's last request, sent alone. No model writes its summary."""
        raws = [msgspec.json.encode(message) for message in conversation.messages]
        case = _case(raws, window, self._counter(window), f"{conversation.name} {window} alone", _Models())
        outcome = await self._compactor.compact(adapted(case))
        await _settled()
        return [msgspec.json.decode(raw) for raw in (raws if outcome.messages is None else outcome.messages)]

    def _counter(self, window: int) -> ChatCounter:
        return self._counters.setdefault(window, ChatCounter(profile(window)))

    async def _looked_up(self, outcome: Outcome, tenant: str) -> dict[str, list[Message]]:
        """Return the archived messages of every id that the prompts name. Unknown ids are omitted."""
        if not await self._archive.writes.drained():
            raise TimeoutError("the archive didn't finish writing")
        found = {}
        for id_ in sorted(set().union(*map(named_ids, outcome.messages))):
            kept = await self._archive.fetch(tenant, id_)
            if kept is not None:
                found[id_] = [msgspec.json.decode(message) for message in kept.messages]
        return found

    async def aclose(self) -> None:
        """Close the store and end the threads."""
        await self._archive.aclose()
        await self._store.aclose()
        self._remembered.close()


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    """Run an engine until the block ends. Its store is in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with contextlib.aclosing(Engine(Path(folder))) as engine:
            yield engine
