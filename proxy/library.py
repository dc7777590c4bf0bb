"""Compaction for Python programs: no server, no configuration file, and no network.

    from proxy import Compaction, compact

    shorter = compact(messages, model="gpt-5").messages

    with Compaction(summarize=lambda prompt: ask(prompt)) as compaction:
        shorter = compaction.compact(messages, model="gpt-5").messages

The import takes no time, because the engine is loaded at the first call, in about half a second.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace, TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import msgspec
import structlog

from proxy.config.loading import policy_from
from proxy.dialects.apis import DIALECTS, body_of, recognized
from proxy.dialects.request import fields_of
from proxy.errors import ProxyError, UpstreamError
from proxy.limits.profiles import Profiles
from proxy.pipeline.budget import bounds_of, rules_for, token_budget
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.runtime import Measures
from proxy.recall.search import original
from proxy.store import open_store
from proxy.store.archive import Archive
from proxy.summary.forms import SummaryForm
from proxy.summary.model import UpstreamSummaryModel
from proxy.summary.single_flight import Summaries
from proxy.summary.writer import SummaryModels
from proxy.summary.writers import TranscriptWriter
from proxy.upstream.transport import JSON, Answer, Outgoing, Transport

Summarize = Callable[[str], str | Awaitable[str]]
"""Returns the text of a summary that a prompt asks for. May be a coroutine function."""

log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")

SECONDS = 600.0  # the time that a summary may take


class Compacted(msgspec.Struct, frozen=True):
    """A conversation after its compaction.

    ``messages`` are those to send: unchanged ones are the caller's own objects. ``tokens_before`` and ``tokens_after``
    count messages, tools, and framing. ``steps`` are the names of what was done, none if nothing was. ``removed`` are
    the caller's messages that ``messages`` no longer has in their own words.
    """

    messages: list[Any]
    tokens_before: int
    tokens_after: int
    steps: tuple[str, ...]
    removed: list[Any]


class Options(TypedDict, total=False):
    """What else is known of a request.

    - ``window`` is the model's context window in tokens, by default that of the built-in table.
    - ``tools`` and ``system`` are those of the request; chat completions have no ``system``.
    - ``api`` is ``chat``, ``messages``, or ``responses``, by default the one that the messages fit.
    """

    window: int | None
    tools: Sequence[Any] | None
    system: Any
    api: str | None


class Compaction:
    """What the turns of conversations share: summaries, counts, and the originals of what was removed.

    ``policy`` has settings as in ``policies.NAME`` of the configuration. ``summarize`` writes summaries. Without it, or
    if it raises an error, an extract takes the summary's place. The error is logged. Close the object, or use it in a
    ``with`` statement. Its methods may be called from any thread. Raises ``errors.ConfigurationError`` for a wrong
    policy.
    """

    def __init__(self, policy: Mapping[str, Any] | None = None, *, summarize: Summarize | None = None) -> None:
        self._policy = policy_from(policy or {})
        self._summarize = summarize
        self._measures = Measures(Profiles())
        self._facts = FactsCache()
        self._store = open_store("sqlite://")
        self._archive = Archive(self._store)
        self._compactor = Compactor(self._facts, Summaries(self._store), self._archive)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="compaction", daemon=True)
        self._thread.start()

    def compact(self, messages: Sequence[Any], *, model: str, **options: Unpack[Options]) -> Compacted:
        """Return a conversation that fits the model, and leaves room for its answer.

        Raises ``errors.BadBody`` for messages of no API, and ``ValueError`` for an unknown ``api``.
        """
        return self._in_loop(self._compacted(messages, model, options, None)).result()

    async def acompact(self, messages: Sequence[Any], *, model: str, **options: Unpack[Options]) -> Compacted:
        """See ``compact``. ``summarize`` runs in the caller's event loop if it's a coroutine function."""
        loop = asyncio.get_running_loop()
        work = self._in_loop(self._compacted(messages, model, options, loop))
        return await asyncio.wrap_future(work)

    def original(self, id: str) -> str | None:
        """Return the text of what a note in a message names by an id; ``None`` if there is none."""
        found = self._in_loop(self._archive.fetch("", id)).result()
        return None if found is None else original(found.messages)

    def close(self) -> None:
        """Drop everything."""
        if not self._loop.is_closed():
            self._in_loop(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._facts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _in_loop(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        await self._archive.aclose()
        await self._store.aclose()

    async def _compacted(
        self, messages: Sequence[Any], model: str, options: Options, loop: asyncio.AbstractEventLoop | None
    ) -> Compacted:
        api, system = options.get("api"), options.get("system")
        if api is not None and api not in DIALECTS:
            raise ValueError(f"api must be one of {', '.join(DIALECTS)}, not {api!r}")
        raws = [json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") for message in messages]
        listed = b"[" + b",".join(raws) + b"]"
        parts = [None if part is None else msgspec.json.encode(part) for part in (options.get("tools"), system)]
        outer = b'{"messages":%b%b}' % (listed, b"" if system is None else b',"system":""')
        dialect = DIALECTS[api] if api else recognized(outer)
        body = await dialect.request.read(body_of(dialect, msgspec.json.encode(model), listed, *parts))
        await self._measures.load()
        profile = self._measures.profiles.find(model, override=SimpleNamespace(context_window=options.get("window")))
        counter, budget = self._measures.counter(profile, dialect), token_budget(profile, body, self._policy)
        input = CompactionInput(
            body=body,
            counter=counter,
            policy=self._policy,
            mode="enforce",
            budget=budget.input,
            largest_budget=budget.largest_input,
            tenant="",
            upstream="",
            writers=() if self._summarize is None else (TranscriptWriter(_Own(self._summarize, loop, counter.text)),),
            rules=rules_for(self._policy, window_known=budget.input is not None, bounds=bounds_of(profile)),
            strict=profile.strict_alternation,
            deadline=SECONDS,
        )
        outcome = await self._compactor.compact(input)
        before = await self._compactor.size(body, counter, "")
        if outcome.messages is None:
            return Compacted(list(messages), before, before, (), [])
        made = body.parse(body.rewritten(units=outcome.messages))
        sent = msgspec.json.decode(fields_of(made.raw)[body.CONVERSATION], type=list[msgspec.Raw])
        own = dict(zip(raws, messages, strict=True))
        result = [own[raw] if (raw := bytes(one)) in own else json.loads(raw) for one in sent]
        staying = set(map(bytes, sent))
        removed = [message for raw, message in zip(raws, messages, strict=True) if raw not in staying]
        after = await self._compactor.size(made, counter, "")
        return Compacted(result, before, after, outcome.steps, removed)


def compact(
    messages: Sequence[Any],
    *,
    model: str,
    policy: Mapping[str, Any] | None = None,
    summarize: Summarize | None = None,
    **options: Unpack[Options],
) -> Compacted:
    """Compact one conversation once. See ``Compaction``, which reuses summaries over the turns of a conversation.

    Notes name no ids of originals, because nothing keeps these. ``removed`` has them.
    """
    with Compaction({**(policy or {}), "archive": None}, summarize=summarize) as compaction:
        return compaction.compact(messages, model=model, **options)


async def acompact(
    messages: Sequence[Any],
    *,
    model: str,
    policy: Mapping[str, Any] | None = None,
    summarize: Summarize | None = None,
    **options: Unpack[Options],
) -> Compacted:
    """See ``compact``."""
    with Compaction({**(policy or {}), "archive": None}, summarize=summarize) as compaction:
        return await compaction.acompact(messages, model=model, **options)


class _Own(SummaryModels):
    """The caller's function in place of a summary model."""

    def __init__(
        self, summarize: Summarize, loop: asyncio.AbstractEventLoop | None, count: Callable[[str], int]
    ) -> None:
        self._summarize = summarize
        self._loop = loop
        self._count = count

    async def for_transcript(self, max_tokens: int, form: SummaryForm | None = None) -> Sequence[UpstreamSummaryModel]:
        transport = _Function(self._summarize, self._loop)
        return [UpstreamSummaryModel(transport, "summarize", "", count=self._count, timeout=SECONDS)]


class _Function(Transport):
    """Answers like a model with chat completions. ``loop`` is that of a coroutine function."""

    def __init__(self, summarize: Summarize, loop: asyncio.AbstractEventLoop | None) -> None:
        self._summarize = summarize
        self._loop = loop

    async def send(self, request: Outgoing) -> Answer:
        sent = msgspec.json.decode(request.body)["messages"]
        try:
            text = await self._text("\n\n".join(message["content"] for message in sent))
        except ProxyError:
            raise
        except Exception as error:
            log.exception("summary.function_failed", error=type(error).__name__)
            raise UpstreamError(f"summarize raised {type(error).__name__}") from error
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return Answer.whole(200, [JSON], msgspec.json.encode({"choices": [choice]}))

    async def _text(self, prompt: str) -> str:
        if not inspect.iscoroutinefunction(self._summarize):
            written = await asyncio.to_thread(self._summarize, prompt)
            return await written if isinstance(written, Awaitable) else written
        work: Coroutine[Any, Any, str] = self._summarize(prompt)
        if self._loop is None:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
